package clientgo

import (
	"errors"
	"log/slog"
	"net/http"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
	"golang.org/x/net/http2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/metrics"
)

// deaths are what becomes of a pooled connection.
var deaths = map[string]func(*faultnet.Conn){
	"closed underneath": (*faultnet.Conn).CloseUnderneath,
	"EPIPE":             func(c *faultnet.Conn) { c.FailWrites(syscall.EPIPE) },
	"RST":               (*faultnet.Conn).Reset,
}

func TestDeadConnection(t *testing.T) {
	for name, kill := range deaths {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, protect func(*rest.Config)) {
				a, d := newAPI(t), new(faultnet.Dialer)
				cfg := a.config()
				cfg.Dial = d.DialContext
				protect(cfg)
				c := clientset(t, cfg)
				for range 3 {
					if _, err := c.Discovery().ServerVersion(); err != nil {
						t.Fatal("GET:", err)
					}
					kill(d.Last())
					if err := updateLease(c); err != nil {
						t.Fatal("PUT on a dead connection:", err)
					}
					kill(d.Last())
					if _, err := c.Discovery().ServerVersion(); err != nil {
						t.Fatal("GET on a dead connection:", err)
					}
				}
				if d.Dials() != 7 {
					t.Errorf("%d dials, want 7: one a death", d.Dials())
				}
			})
		})
	}
}

// Without us, a PUT is lost.
func TestDeadConnectionPlain(t *testing.T) {
	a, d := newAPI(t), new(faultnet.Dialer)
	cfg := a.config()
	cfg.Dial = d.DialContext
	c := clientset(t, cfg)
	if err := updateLease(c); err != nil {
		t.Fatal(err)
	}
	d.Last().CloseUnderneath()
	if err := updateLease(c); err == nil {
		t.Error("client-go does by itself what this module is for")
	}
}

// A create may go again if nothing of it was sent: on a connection that is
// known dead, or whose writes fail.
func TestCreateNotSent(t *testing.T) {
	eachWay(t, func(t *testing.T, protect func(*rest.Config)) {
		a, d := newAPI(t), new(faultnet.Dialer)
		cfg := a.config()
		cfg.Dial = d.DialContext
		protect(cfg)
		c := clientset(t, cfg)
		create := func() error {
			_, err := c.CoreV1().ConfigMaps("ns").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "x"}}, metav1.CreateOptions{})
			return err
		}
		if err := create(); err != nil {
			t.Fatal(err)
		}
		a.KillConns()
		for d.Open() > 0 {
			if err := create(); err != nil {
				t.Fatal("POST after the server closed the connection:", err)
			}
			if d.Dials() > 1 {
				break
			}
		}
	})
}

// A request that may have run: GET and PUT go again, once; POST and PATCH do
// not, nor does anything that Retryable refuses.
func TestMayHaveRun(t *testing.T) {
	for _, tt := range []struct {
		method    string
		retryable func(*http.Request) bool
		sent      int
	}{
		{method: http.MethodGet, sent: 2},
		{method: http.MethodPut, sent: 2},
		{method: http.MethodDelete, sent: 2},
		{method: http.MethodPost, sent: 1},
		{method: http.MethodPatch, sent: 1},
		{method: http.MethodDelete, retryable: onlyGet, sent: 1},
		{method: http.MethodPut, retryable: onlyGet, sent: 1},
		{method: http.MethodGet, retryable: onlyGet, sent: 2},
	} {
		for name, protect := range map[string]func(*rest.Config){
			"Protect": func(cfg *rest.Config) { Protect(cfg, deadconn.Options{Retryable: tt.retryable}) },
			"twice":   func(cfg *rest.Config) { Protect(cfg); Protect(cfg, deadconn.Options{Retryable: tt.retryable}) },
			"a copy": func(cfg *rest.Config) {
				Protect(cfg)
				c := rest.CopyConfig(cfg)
				Protect(c, deadconn.Options{Retryable: tt.retryable})
				*cfg = *c
			},
			"Wrap alone": func(cfg *rest.Config) { cfg.Wrap(deadconn.Options{Retryable: tt.retryable}.Wrap) },
			"Wrap before": func(cfg *rest.Config) {
				cfg.Wrap(deadconn.Options{Retryable: tt.retryable}.Wrap)
				Protect(cfg, deadconn.Options{Retryable: tt.retryable})
			},
		} {
			what := tt.method + ", " + name
			if tt.retryable != nil {
				what += ", only GET"
			}
			t.Run(what, func(t *testing.T) {
				p, sent := deadly(t, (*faultnet.PeerConn).RST)
				cfg := configFor(t, p.URL(), p.ClientTLS())
				protect(cfg)
				c := httpClient(t, cfg)
				if err := get(c, p.URL()); err != nil {
					t.Fatal(err)
				}
				err := do(c, tt.method, p.URL(), "{}")
				if n := len(sent); err == nil || n != tt.sent {
					t.Errorf("sent %d times, want %d; error %v", n, tt.sent, err)
				}
				var re *deadconn.RetryError
				if errors.As(err, &re) != (tt.sent == 2) {
					t.Errorf("got %v", err)
				}
			})
		}
	}
}

func onlyGet(r *http.Request) bool { return r.Method == http.MethodGet }

// deadly is a server whose connections die of a request that it has taken. The
// first one answers a request before, so that it is no refusal.
func deadly(t *testing.T, die func(*faultnet.PeerConn) error) (p *faultnet.Peer, sent chan string) {
	t.Helper()
	sent = make(chan string, 100)
	p, err := faultnet.NewPeer(func(c *faultnet.PeerConn) {
		r, err := c.ReadRequest()
		if err == nil && c.N == 1 { // caOf was the first
			c.Respond(r.StreamID, http.StatusOK, "")
			r, err = c.ReadRequest()
		}
		if err == nil {
			sent <- r.Method
			die(c)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p, sent
}

// What goes wrong reaches client-go's predicates: of one attempt as the very
// value, of two (GET) in a RetryError.
func TestPredicates(t *testing.T) {
	type predicate func(error) bool
	goAway := func(c *faultnet.PeerConn) error {
		c.GoAway(1, http2.ErrCodeInternal, "")
		return c.FINRaw()
	}
	for _, tt := range []struct {
		name string
		die  func(*faultnet.PeerConn) error
		is   map[string]predicate
	}{
		{"RST", (*faultnet.PeerConn).RST, map[string]predicate{"IsConnectionReset": utilnet.IsConnectionReset, "IsProbableEOF": utilnet.IsProbableEOF}},
		{"EOF", (*faultnet.PeerConn).FINRaw, map[string]predicate{"IsProbableEOF": utilnet.IsProbableEOF}},
		{"GOAWAY", goAway, map[string]predicate{"IsProbableEOF": utilnet.IsProbableEOF}},
	} {
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			t.Run(tt.name+", "+method, func(t *testing.T) {
				p, _ := deadly(t, tt.die)
				cfg := configFor(t, p.URL(), p.ClientTLS())
				Protect(cfg)
				c := httpClient(t, cfg)
				if err := get(c, p.URL()); err != nil {
					t.Fatal(err)
				}
				err := do(c, method, p.URL(), "{}")
				for name, is := range tt.is {
					if !is(err) {
						t.Errorf("%s says no to %v", name, err)
					}
				}
				if method == http.MethodPost {
					if errors.As(err, new(*deadconn.RetryError)) {
						t.Errorf("one attempt gave %v", err)
					}
				}
			})
		}
	}
	t.Run("ping lost", func(t *testing.T) {
		p, err := faultnet.NewPeer(func(c *faultnet.PeerConn) {
			c.ReadRequest()
			c.IgnorePings(true)
			c.Silence()
		})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			cfg := configFor(t, p.URL(), p.ClientTLS())
			Protect(cfg, deadconn.Options{Health: deadconn.Health{PingInterval: 100 * time.Millisecond, PingTimeout: 100 * time.Millisecond}})
			if err := do(httpClient(t, cfg), method, p.URL(), "{}"); !utilnet.IsHTTP2ConnectionLost(err) {
				t.Errorf("%s: IsHTTP2ConnectionLost says no to %v", method, err)
			}
		}
	})
	t.Run("timeout", func(t *testing.T) {
		p, err := faultnet.NewPeer((*faultnet.PeerConn).Silence)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		cfg := configFor(t, p.URL(), p.ClientTLS())
		cfg.Timeout = 300 * time.Millisecond
		Protect(cfg)
		if err := get(httpClient(t, cfg), p.URL()); !utilnet.IsTimeout(err) {
			t.Errorf("IsTimeout says no to %v", err)
		}
	})
}

// apimachinery's helpers see through what we put in.
func TestHelpers(t *testing.T) {
	eachWay(t, func(t *testing.T, protect func(*rest.Config)) {
		a, d := newAPI(t), new(faultnet.Dialer)
		cfg := a.config()
		cfg.Dial = d.DialContext
		protect(cfg)
		c := httpClient(t, cfg)
		if err := get(c, a.URL); err != nil {
			t.Fatal(err)
		}
		dial, err := utilnet.DialerFor(c.Transport)
		if err != nil || dial == nil {
			t.Fatal("DialerFor:", err)
		}
		nc, err := dial(t.Context(), "tcp", a.Addr())
		if err != nil || d.Dials() != 2 {
			t.Fatalf("DialerFor's dialer: %v, %d dials", err, d.Dials())
		}
		nc.Close()
		if tc, err := utilnet.TLSClientConfig(c.Transport); err != nil || tc == nil || tc.RootCAs == nil {
			t.Errorf("TLSClientConfig: %v, %v", tc, err)
		}
		utilnet.CloseIdleConnectionsFor(c.Transport)
		deadline := time.Now().Add(5 * time.Second)
		for d.Open() > 0 {
			if time.Now().After(deadline) {
				// Wrap alone: client-go 0.37's own round tripper says no.
				t.Fatalf("CloseIdleConnectionsFor has left %d connections", d.Open())
			}
			time.Sleep(time.Millisecond)
		}
	})
}

// What was in the config stays: its dialer dials, its wrappers see each
// request once, also one that was sent twice.
func TestKeepsDialAndWrappers(t *testing.T) {
	a, d := newAPI(t), new(faultnet.Dialer)
	cfg := a.config()
	cfg.Dial = d.DialContext
	var before, after int
	cfg.Wrap(counter(&before))
	Protect(cfg)
	cfg.Wrap(counter(&after))
	c := httpClient(t, cfg)
	for range 2 {
		if err := get(c, a.URL); err != nil {
			t.Fatal(err)
		}
		d.Last().CloseUnderneath()
	}
	if before != 2 || after != 2 || d.Dials() != 2 {
		t.Errorf("wrappers saw %d and %d requests, want 2; %d dials, want 2", before, after, d.Dials())
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func counter(n *int) func(http.RoundTripper) http.RoundTripper {
	return func(rt http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			*n++
			return rt.RoundTrip(r)
		})
	}
}

// entries is client-go's metric of its transport cache.
type entries struct{ n int }

func (e *entries) Observe(n int) { e.n = n }

// Clients of equal configs share a transport and its connections, however
// often Protect is called. With a Dial of ours each would have its own.
func TestCacheDoesNotGrow(t *testing.T) {
	a := newAPI(t)
	seen := new(entries)
	defer func(was metrics.TransportCacheMetric) { metrics.TransportCacheEntries = was }(metrics.TransportCacheEntries)
	metrics.TransportCacheEntries = seen

	hooks, logger := new(deadconn.Hooks), slog.New(slog.DiscardHandler)
	opts := func() deadconn.Options {
		return deadconn.Options{Hooks: hooks, Logger: logger, Retryable: onlyGet, Health: deadconn.Health{PingInterval: time.Minute}}
	}
	var all []*http.Client
	client := func(o ...deadconn.Options) *http.Client {
		cfg := a.config()
		Protect(cfg, o...)
		Protect(cfg, o...)
		c := httpClient(t, cfg)
		if err := get(c, a.URL); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
		return c
	}
	first := client()
	was, conns := seen.n, a.Conns()
	for range 50 {
		if c := client(); below(c.Transport) != below(first.Transport) {
			t.Fatal("a second transport for an equal config")
		}
	}
	if seen.n > was || a.Conns() != conns {
		t.Errorf("the cache has grown from %d to %d, and %d connections from %d", was, seen.n, a.Conns(), conns)
	}
	other := client(opts())
	if below(other.Transport) == below(first.Transport) {
		t.Error("different options share a transport")
	}
	for range 10 {
		if c := client(opts()); below(c.Transport) != below(other.Transport) {
			t.Fatal("a second transport for equal options")
		}
	}
	if seen.n > was {
		t.Errorf("the cache has grown from %d to %d", was, seen.n)
	}
	runtime.KeepAlive(all)
}

// This is why Protect leaves cfg.Dial alone. If it fails, client-go has got
// better, and the dialer of a Registry could go there.
func TestDialMakesTheCacheGrow(t *testing.T) {
	a, reg := newAPI(t), new(deadconn.Registry)
	distinct := make(map[http.RoundTripper]bool)
	for range 10 {
		cfg := a.config()
		cfg.Dial = reg.DialContext
		distinct[httpClient(t, cfg).Transport] = true
	}
	if len(distinct) != 10 {
		t.Errorf("10 clients with the same Dial have %d transports", len(distinct))
	}
}

// below returns the deadconn.Transport.
func below(rt http.RoundTripper) *deadconn.Transport {
	for {
		switch u := rt.(type) {
		case *deadconn.Transport:
			return u
		case utilnet.RoundTripperWrapper:
			rt = u.WrappedRoundTripper()
		default:
			return nil
		}
	}
}

// Clients that are gone leave nothing behind, so that client-go's collection
// of unused transports works.
func TestCollected(t *testing.T) {
	a := newAPI(t)
	cfg := a.config()
	Protect(cfg)
	p := poolFor(deadconn.Options{})
	was := p.len()
	for i := range 10 {
		c := rest.CopyConfig(cfg)
		c.DisableCompression = i%2 == 0
		c.Dial = new(faultnet.Dialer).DialContext // as many transports as clients
		client := httpClient(t, c)
		if err := get(client, a.URL); err != nil {
			t.Fatal(err)
		}
		client.CloseIdleConnections()
	}
	deadline := time.Now().Add(10 * time.Second)
	for p.len() > was {
		if time.Now().After(deadline) {
			t.Fatalf("%d guards, %d before", p.len(), was)
		}
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
	}
	runtime.KeepAlive(cfg)
}

func (p *pool) len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.guards)
}

// A transport that is not client-go's dials by itself and keeps what it does.
func TestOtherTransports(t *testing.T) {
	a, d := newAPI(t), new(faultnet.Dialer)
	own := &http.Transport{TLSClientConfig: a.ClientTLS(), DialContext: d.DialContext, ForceAttemptHTTP2: true}
	var through int
	for name, rt := range map[string]http.RoundTripper{
		"http.Transport": own,
		"a wrapper":      counter(&through)(own),
		"one that tells": &telling{RoundTripper: counter(&through)(own), base: own},
	} {
		t.Run(name, func(t *testing.T) {
			dials, seen := d.Dials(), through
			cfg := &rest.Config{Host: a.URL, Transport: rt}
			Protect(cfg)
			c := httpClient(t, cfg)
			for range 2 {
				if err := get(c, a.URL); err != nil {
					t.Fatal(err)
				}
				d.Last().CloseUnderneath()
			}
			if n := d.Dials() - dials; n > 3 || n == 0 {
				t.Errorf("%d dials", n)
			}
			if name != "http.Transport" && through == seen {
				t.Error("the wrapper was left out")
			}
		})
	}
}

type telling struct {
	http.RoundTripper
	base http.RoundTripper
}

func (w *telling) WrappedRoundTripper() http.RoundTripper { return w.base }

func TestBadOptions(t *testing.T) {
	dialing := &deadconn.Registry{Dial: new(faultnet.Dialer).DialContext}
	for name, o := range map[string][]deadconn.Options{
		"two":           {{}, {}},
		"Base":          {{Base: new(http.Transport)}},
		"contradictory": {{DisableRetry: true, Retryable: onlyGet}},
		"dialer":        {{Registry: dialing}},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error(name, "was accepted")
				}
			}()
			Protect(new(rest.Config), o...)
		}()
	}
}

func TestEqualOptions(t *testing.T) {
	n := 0
	closure := func() func(*http.Request) bool {
		return func(*http.Request) bool { n++; return n > 0 }
	}
	c1, c2 := closure(), closure()
	if !equal(deadconn.Options{Retryable: c1}, deadconn.Options{Retryable: c1}) {
		t.Error("a function is not equal to itself")
	}
	if equal(deadconn.Options{Retryable: c1}, deadconn.Options{Retryable: c2}) {
		t.Error("two closures are equal")
	}
	if equal(deadconn.Options{}, deadconn.Options{DisableRetry: true}) {
		t.Error("different options are equal")
	}
	if !equal(deadconn.Options{}, deadconn.Options{}) {
		t.Error("defaults are not equal")
	}
}
