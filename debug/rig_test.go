package debug

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
)

// A rig is a Transport, servers by name, and the connections between them.
type rig struct {
	t       *testing.T
	tr      *deadconn.Transport
	client  *http.Client
	servers map[string]*faultnet.Server // by address as dialed
	dialers map[string]*faultnet.Dialer

	mu      sync.Mutex
	gate    chan struct{} // requests to /hold wait until it is closed
	arrived int           // how many do
}

// newRig starts an HTTP/2 server for each of hosts, and one of HTTP/1 without
// TLS for legacy.test.
func newRig(t *testing.T, hosts ...string) *rig {
	t.Helper()
	r := &rig{t: t, servers: make(map[string]*faultnet.Server), dialers: make(map[string]*faultnet.Dialer)}
	base := &http.Transport{DialContext: r.dial, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 2000}
	serve := func(addr string, opts ...faultnet.ServerOption) {
		s := faultnet.NewServer(http.HandlerFunc(r.serve), opts...)
		t.Cleanup(s.Close)
		r.servers[addr], r.dialers[addr] = s, new(faultnet.Dialer)
	}
	serve("legacy.test:80", faultnet.NoTLS())
	for _, host := range hosts {
		serve(host + ":443")
		base.TLSClientConfig = r.servers[host+":443"].ClientTLS() // it fits them all
		base.TLSClientConfig.ServerName = "127.0.0.1"
	}
	r.tr = deadconn.Options{Base: base}.NewTransport()
	r.client = &http.Client{Transport: r.tr, Timeout: 20 * time.Second}
	t.Cleanup(func() {
		r.tr.CloseIdleConnections()
		for _, d := range r.dialers {
			d.CloseAll()
		}
	})
	return r
}

func (r *rig) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d, s := r.dialers[addr], r.servers[addr]
	if d == nil {
		return nil, errors.New("no such host: " + addr)
	}
	return d.DialContext(ctx, network, s.Addr())
}

func (r *rig) serve(w http.ResponseWriter, req *http.Request) {
	if req.URL.Path == "/hold" {
		r.mu.Lock()
		gate := r.gate
		r.arrived++
		r.mu.Unlock()
		select {
		case <-gate:
		case <-req.Context().Done():
		}
	}
	io.WriteString(w, "ok")
}

func (r *rig) get(url string) error {
	resp, err := r.client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

func (r *rig) mustGet(url string) {
	r.t.Helper()
	if err := r.get(url); err != nil {
		r.t.Error(err)
	}
}

// hold calls do while n requests to url, one after the other if it is HTTP/1
// on a connection each, wait for their answers.
func (r *rig) hold(url string, n int, do func()) {
	r.t.Helper()
	gate := make(chan struct{})
	r.mu.Lock()
	r.gate, r.arrived = gate, 0
	r.mu.Unlock()
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() { r.mustGet(url + "/hold") })
	}
	eventually(r.t, "all wait", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.arrived >= n
	})
	do()
	close(gate)
	wg.Wait()
}

// die lets the connection to host die under n requests. They are rescued, as
// is the one that finds it out.
func (r *rig) die(host string, n int, how func(*faultnet.Conn)) {
	r.t.Helper()
	r.hold("https://"+host, n, func() {
		how(r.live(host + ":443"))
		r.mustGet("https://" + host)
	})
}

// lose loses a request: its connection dies, and no other can be had.
func (r *rig) lose(host string) {
	r.t.Helper()
	r.live(host + ":443").FailWrites(syscall.EPIPE)
	d := r.dialers[host+":443"]
	d.SetErr(syscall.ECONNREFUSED)
	defer d.SetErr(nil)
	if err := r.get("https://" + host); err == nil {
		r.t.Error("it was rescued")
	}
}

// live returns the open connection to addr.
func (r *rig) live(addr string) *faultnet.Conn {
	r.t.Helper()
	conns := r.dialers[addr].Conns()
	for i := len(conns) - 1; i >= 0; i-- {
		if !conns[i].Closed() {
			return conns[i]
		}
	}
	r.t.Fatalf("no connection to %s is open", addr)
	return nil
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
	}
}

// fetch fetches the page, and fails the test if it cannot be had.
func fetch(t *testing.T, h http.Handler, target string) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", target, nil))
	if w.Code != http.StatusOK {
		t.Fatalf("%s: %d %s", target, w.Code, w.Body)
	}
	return w.Body.String()
}

func epipe(c *faultnet.Conn) { c.FailWrites(syscall.EPIPE) }
