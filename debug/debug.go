package debug

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/deadconn/deadconn"
)

// Handler returns a page about t, as the package comment says. What
// [deadconn.Wrap] returns is a *deadconn.Transport too.
func Handler(t *deadconn.Transport) http.Handler {
	if t == nil {
		panic("debug: Handler of a nil Transport")
	}
	return handler{func() snapshot { return look(t, time.Now()) }}
}

type handler struct{ look func() snapshot }

func (h handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "only GET and HEAD", http.StatusMethodNotAllowed)
		return
	}
	var (
		body        bytes.Buffer
		contentType string
		err         error
	)
	switch format := r.URL.Query().Get("format"); format {
	case "json":
		contentType = "application/json"
		enc := json.NewEncoder(&body)
		enc.SetIndent("", "  ")
		err = enc.Encode(h.look())
	case "", "html":
		contentType = "text/html; charset=utf-8"
		err = pageTemplate.Execute(&body, newView(h.look()))
	default:
		http.Error(w, "format is html or json", http.StatusBadRequest)
		return
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	header := w.Header()
	header.Set("Content-Type", contentType)
	header.Set("Content-Length", strconv.Itoa(body.Len()))
	header.Set("Content-Security-Policy", policy)
	header.Set("Cache-Control", "no-store")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("X-Content-Type-Options", "nosniff")
	w.Write(body.Bytes())
}
