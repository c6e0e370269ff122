package deadconn

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// A way is one way to use HTTP: the bare transport or one of ours, over a
// dialer whose connections can be broken.
type way struct {
	name string
	new  func(base *http.Transport) http.RoundTripper
}

var (
	bare    = way{"net/http", func(b *http.Transport) http.RoundTripper { return b }}
	wrapped = way{"Wrap", func(b *http.Transport) http.RoundTripper { return Wrap(b) }}
	owned   = way{"NewTransport", func(b *http.Transport) http.RoundTripper { return Options{Base: b}.NewTransport() }}
	ours    = []way{owned, wrapped}
)

// client returns a client that dials through d.
func (w way) client(t *testing.T, d *faultnet.Dialer, cfg *tls.Config) *http.Client {
	t.Helper()
	rt := w.new(&http.Transport{DialContext: d.DialContext, TLSClientConfig: cfg, ForceAttemptHTTP2: true})
	c := &http.Client{Transport: rt}
	t.Cleanup(func() {
		c.CloseIdleConnections()
		d.CloseAll()
	})
	return c
}

func get(c *http.Client, url string) error {
	resp, err := c.Get(url)
	if err != nil {
		return err
	}
	return drain(resp)
}

func drain(resp *http.Response) error {
	defer resp.Body.Close()
	_, err := io.Copy(io.Discard, resp.Body)
	return err
}

func mustGet(t *testing.T, c *http.Client, url string) {
	t.Helper()
	if err := get(c, url); err != nil {
		t.Fatalf("GET: %v", err)
	}
}

// counting counts what its handler runs.
func ok(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") }

func newServer(t *testing.T, h http.HandlerFunc, opts ...faultnet.ServerOption) *faultnet.Server {
	t.Helper()
	s := faultnet.NewServer(h, opts...)
	t.Cleanup(s.Close)
	return s
}

func newPeer(t *testing.T, script func(*faultnet.PeerConn)) *faultnet.Peer {
	t.Helper()
	p, err := faultnet.NewPeer(script)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func request(t *testing.T, method, url string, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// eventually waits for what another goroutine or the kernel brings about.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
	}
}

func withTimeout(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// onlyReader hides what a reader can do besides, so that http.NewRequest sets
// no GetBody.
func onlyReader(s string) io.Reader { return struct{ io.Reader }{strings.NewReader(s)} }

var _ net.Conn = (*conn)(nil)

func newString(s string) *strings.Reader { return strings.NewReader(s) }

// failWrites makes the writes of all open connections fail: net/http may have
// dialed once more for a request that came before its connection was in the
// pool, and which is in use cannot be told.
func failWrites(d *faultnet.Dialer, err error) {
	for _, conn := range d.Conns() {
		if !conn.Closed() {
			conn.FailWrites(err)
		}
	}
}

// inUse returns a connection that has carried requests and that its user has
// not closed, the newest; nil if there is none. One that dies while it is
// being set up is a failed dial.
func inUse(d *faultnet.Dialer) *faultnet.Conn {
	conns := d.Conns()
	for i := len(conns) - 1; i >= 0; i-- {
		if !conns[i].Closed() && conns[i].BytesRead() > 3000 {
			return conns[i]
		}
	}
	return nil
}

// live returns a connection that its user has not closed, the newest.
func live(d *faultnet.Dialer) *faultnet.Conn {
	conns := d.Conns()
	for i := len(conns) - 1; i >= 0; i-- {
		if !conns[i].Closed() {
			return conns[i]
		}
	}
	return nil
}
