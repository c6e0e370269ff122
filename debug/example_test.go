package debug_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/debug"
)

// The page belongs where only operators get at it.
func ExampleHandler() {
	t := deadconn.NewTransport()
	mux := http.NewServeMux()
	mux.Handle("/debug/deadconn", debug.Handler(t))

	w := httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequest("GET", "/debug/deadconn", nil))
	fmt.Println(w.Code, strings.Contains(w.Body.String(), "No connection has died."))
	// Output: 200 true
}
