package clientgo

import (
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// The end of a watch whose connection was evicted has to look like the end of
// a connection. Otherwise a reflector waits for its backoff before it resumes.
func TestEvictedWatch(t *testing.T) {
	release := make(chan struct{})
	server := faultnet.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/watch" {
			w.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
			case <-release:
			}
		}
	}))
	defer server.Close()
	defer close(release)
	d := new(faultnet.Dialer)
	cfg := configFor(t, server.URL, server.ClientTLS())
	cfg.Dial = d.DialContext
	Protect(cfg)
	c := httpClient(t, cfg)
	resp, err := c.Get(server.URL + "/watch")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := faultnet.BlackholeSocket(d.Last()); err != nil {
		t.Skip("no black hole for a socket here: ", err)
	}
	if err := do(c, http.MethodPut, server.URL, "x"); err != nil {
		t.Error(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := io.ReadAll(resp.Body)
		ended <- err
	}()
	select {
	case err := <-ended:
		if !utilnet.IsProbableEOF(err) {
			t.Errorf("IsProbableEOF says no to %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("the watch goes on")
	}
}
