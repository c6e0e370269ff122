package deadconn

import (
	"io"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// The server closes its idle connections, and a request comes right after.
func TestRequestRightAfterIdleClose(t *testing.T) {
	const rounds = 200
	for _, tt := range []struct {
		name string
		send func(t *testing.T, url string) *http.Request
	}{
		{"GET", func(t *testing.T, url string) *http.Request { return request(t, "GET", url, nil) }},
		{"POST with GetBody", func(t *testing.T, url string) *http.Request { return request(t, "POST", url, newString("x")) }},
		{"POST", func(t *testing.T, url string) *http.Request { return request(t, "POST", url, onlyReader("x")) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			run := func(t *testing.T, w way) (failed int) {
				var runs atomic.Int64
				s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
					io.Copy(io.Discard, r.Body)
					runs.Add(1)
				})
				d := new(faultnet.Dialer)
				c := w.client(t, d, s.ClientTLS())
				for range rounds {
					mustGet(t, c, s.URL)
					before := runs.Load()
					pooled := d.Last()
					s.KillConns()
					// A request that overtakes the FIN may have been
					// processed, for all that can be known.
					sock := rawSocket(pooled)
					eventually(t, "the FIN is here", func() bool { return pooled.Closed() || sock == nil || peerHungUp(sock) })
					resp, err := c.Do(tt.send(t, s.URL))
					if err != nil {
						failed++
						if failed == 1 {
							t.Logf("%s: %v", w.name, err)
						}
						continue
					}
					drain(resp)
					if ran := runs.Load() - before; ran != 1 {
						t.Errorf("%s: the request ran %d times", w.name, ran)
					}
				}
				return failed
			}
			t.Logf("net/http: %d of %d failed", run(t, bare), rounds)
			if failed := run(t, owned); failed != 0 {
				t.Errorf("%d of %d failed", failed, rounds)
			}
		})
	}
}
