package deadconn

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// What dialers do in trials. Each has a pooled connection whose packets vanish,
// and one GET on it.
func TestTrialDialers(t *testing.T) {
	t.Parallel()
	hang := func(ctx context.Context) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	wrap := func(b *http.Transport) http.RoundTripper { return Wrap(b) }
	own := func(b *http.Transport) http.RoundTripper { return Options{Base: b}.NewTransport() }
	for _, tt := range []struct {
		name   string
		within time.Duration // the GET's deadline
		// set changes base, which dials by d, and returns the RoundTripper and
		// what is to be done when the path is dead.
		set  func(t *testing.T, s *faultnet.Server, d *faultnet.Dialer, base *http.Transport) (rt http.RoundTripper, dead func())
		url  string // if it is not the server's
		want func(error) bool
	}{
		{"only by a proxy", 15 * time.Second, func(t *testing.T, s *faultnet.Server, d *faultnet.Dialer, base *http.Transport) (http.RoundTripper, func()) {
			proxy, _ := dialProxy(t, false)
			u, err := url.Parse(proxy.URL)
			if err != nil {
				t.Fatal(err)
			}
			base.Proxy = http.ProxyURL(u)
			d.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if addr != proxy.Addr() {
					return hang(ctx)
				}
				return new(net.Dialer).DialContext(ctx, network, addr)
			}
			return wrap(base), func() {}
		}, "", nil},
		{"slow", 30 * time.Second, func(t *testing.T, s *faultnet.Server, d *faultnet.Dialer, base *http.Transport) (http.RoundTripper, func()) {
			return own(base), func() { d.SetDelay(trialTimeout + time.Second) }
		}, "", nil},
		{"one hangs", 18 * time.Second, func(t *testing.T, s *faultnet.Server, d *faultnet.Dialer, base *http.Transport) (http.RoundTripper, func()) {
			var once atomic.Bool
			back := make(chan struct{})
			t.Cleanup(func() { close(back) })
			base.DialContext = nil
			base.Dial = func(network, addr string) (net.Conn, error) {
				if once.CompareAndSwap(true, false) {
					<-back
				}
				return d.DialContext(context.Background(), network, addr)
			}
			return wrap(base), func() { once.Store(true) }
		}, "", nil},
		{"refused", 18 * time.Second, func(t *testing.T, s *faultnet.Server, d *faultnet.Dialer, base *http.Transport) (http.RoundTripper, func()) {
			return own(base), func() { s.Listener.Close() }
		}, "", func(err error) bool { return err != nil && !errors.Is(err, context.DeadlineExceeded) }},
		{"mapped above the Registry", 15 * time.Second, func(t *testing.T, s *faultnet.Server, d *faultnet.Dialer, base *http.Transport) (http.RoundTripper, func()) {
			other := newServer(t, ok)
			var gone atomic.Bool
			d.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				if gone.Load() && addr == s.Addr() {
					return hang(ctx)
				}
				return new(net.Dialer).DialContext(ctx, network, addr)
			}
			reg := &Registry{Dial: d.DialContext}
			base.TLSClientConfig.ServerName = "127.0.0.1"
			base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
				switch {
				case addr != "orders.test:443":
					return hang(ctx)
				case gone.Load():
					return reg.DialContext(ctx, network, other.Addr())
				}
				return reg.DialContext(ctx, network, s.Addr())
			}
			return Options{Registry: reg}.Wrap(base), func() { gone.Store(true) }
		}, "https://orders.test/", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, ok)
			d := new(faultnet.Dialer)
			t.Cleanup(d.CloseAll)
			rt, dead := tt.set(t, s, d, &http.Transport{DialContext: d.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true})
			c := &http.Client{Transport: rt}
			target := cmp.Or(tt.url, s.URL)
			for range 2 {
				mustGet(t, c, target)
				awaitForgotten(t, rt.(*Transport))
			}
			for _, fc := range d.Conns() {
				if fc.Closed() {
					continue
				}
				if err := faultnet.BlackholeSocket(fc); err != nil {
					t.Skipf("no rights for a socket filter: %v", err)
				}
			}
			dead()
			start := time.Now()
			err := getWithin(c, target, tt.within)
			t.Logf("%v after %v", err, time.Since(start))
			if tt.want == nil && err != nil || tt.want != nil && !tt.want(err) {
				t.Error(err)
			}
		})
	}
}

// A server may close, meanwhile, what a trial has opened. It is asked before it
// is used.
func TestTrialConnectionClosed(t *testing.T) {
	t.Parallel()
	s := newServer(t, ok, faultnet.Configure(func(s *http.Server) { s.ReadHeaderTimeout = 300 * time.Millisecond }))
	d := new(faultnet.Dialer)
	c := owned.client(t, d, s.ClientTLS())
	tr := c.Transport.(*Transport)
	for range 3 {
		mustGet(t, c, s.URL)
	}
	if err := faultnet.BlackholeSocket(live(d)); err != nil {
		t.Skipf("no rights for a socket filter: %v", err)
	}
	getWithin(c, s.URL, 100*time.Millisecond)
	eventually(t, "a suspicion", func() bool { return tr.spare.hosts.Load() != nil })
	tried := d.Last()
	eventually(t, "the server has closed it", func() bool { return peerHungUp(rawSocket(tried)) })
	resp, err := c.Do(request(t, "POST", s.URL, nil))
	if err != nil {
		t.Fatal(err)
	}
	drain(resp)
	if !tried.Closed() {
		t.Error("the trial's connection is still open")
	}
}
