package deadconn

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// Options that contradict each other panic at once, and say which and why.
func TestOptionsContradict(t *testing.T) {
	own := func(o Options) func() { return func() { o.NewTransport() } }
	wrap := func(o Options) func() { return func() { o.Wrap(http.DefaultTransport) } }
	dial := new(net.Dialer).DialContext
	always := func(*http.Request) bool { return true }
	for _, tt := range []struct {
		name string
		f    func()
		says []string
	}{
		{"Base with Wrap", wrap(Options{Base: &http.Transport{}}), []string{"Options.Base is set"}},
		{"Base with Wrap(nil)", func() { Options{Base: &http.Transport{}}.Wrap(nil) }, []string{"Options.Base is set"}},
		{"DisableRetry", own(Options{DisableRetry: true, Retryable: always}), []string{"Options.DisableRetry is true", "Options.Retryable"}},
		{"DisableRetry with Wrap", wrap(Options{DisableRetry: true, Retryable: always}), []string{"Options.DisableRetry is true", "Options.Retryable"}},
		{"PingInterval", own(Options{Health: Health{PingInterval: -time.Second}}), []string{"Options.Health.PingInterval", "-1s"}},
		{"PingTimeout", own(Options{Health: Health{PingTimeout: -2 * time.Second}}), []string{"Options.Health.PingTimeout", "-2s"}},
		{"WriteTimeout", own(Options{Health: Health{WriteTimeout: -1}}), []string{"Options.Health.WriteTimeout", "-1ns"}},
		{"WriteTimeout with Wrap", wrap(Options{Health: Health{WriteTimeout: -1}}), []string{"Options.Health.WriteTimeout", "-1ns"}},
		{"negative and disabled", own(Options{Health: Health{Disable: true, PingTimeout: -time.Second}}), []string{"Options.Health.PingTimeout", "-1s"}},
		{"Disable, PingInterval", own(Options{Health: Health{Disable: true, PingInterval: time.Second}}),
			[]string{"Options.Health.Disable is true", "Options.Health.PingInterval", "1s"}},
		{"Disable, PingTimeout", own(Options{Health: Health{Disable: true, PingTimeout: time.Second}}),
			[]string{"Options.Health.Disable is true", "Options.Health.PingTimeout", "1s"}},
		{"Disable, WriteTimeout", own(Options{Health: Health{Disable: true, WriteTimeout: time.Second}}),
			[]string{"Options.Health.Disable is true", "Options.Health.WriteTimeout", "1s"}},
		{"two dialers", own(Options{Registry: &Registry{Dial: dial}, Base: &http.Transport{DialContext: dial}}), []string{"Options.Registry.Dial", "Options.Base"}},
		{"two dialers, Dial", own(Options{Registry: &Registry{Dial: dial}, Base: &http.Transport{Dial: net.Dial}}), []string{"Options.Registry.Dial", "Options.Base"}},
		{"Registry.TLSClientConfig", own(Options{Registry: &Registry{TLSClientConfig: &tls.Config{}}}), []string{"Options.Registry.TLSClientConfig"}},
		{"Registry.TLSHandshakeTimeout", own(Options{Registry: &Registry{TLSHandshakeTimeout: time.Second}}),
			[]string{"Options.Registry.TLSHandshakeTimeout", "1s"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			defer func() {
				text, ok := recover().(string)
				if !ok || !strings.HasPrefix(text, "deadconn: ") {
					t.Fatalf("panic with %q", text)
				}
				for _, s := range tt.says {
					if !strings.Contains(text, s) {
						t.Errorf("%q does not say %q", text, s)
					}
				}
			}()
			tt.f()
			t.Error("no panic")
		})
	}
}

// What does not contradict is taken.
func TestOptionsAgree(t *testing.T) {
	for i, f := range []func(){
		func() { Options{}.NewTransport() },
		func() { Options{}.Wrap(nil) },
		func() { NewTransport() },
		func() { Wrap(nil) },
		func() { Wrap(&http.Transport{}) },
		func() { Options{DisableRetry: true}.NewTransport() },
		func() { Options{Hooks: &Hooks{}, Logger: slog.New(slog.DiscardHandler)}.NewTransport() },
		func() { Options{Health: Health{Disable: true}}.Wrap(nil) },
		func() {
			Options{Registry: &Registry{TLSClientConfig: &tls.Config{}, TLSHandshakeTimeout: time.Second, Dial: new(net.Dialer).DialContext}}.Wrap(nil)
		},
		func() {
			Options{Registry: &Registry{Dial: new(net.Dialer).DialContext}, Base: &http.Transport{}}.NewTransport()
		},
	} {
		func() {
			defer func() {
				if p := recover(); p != nil {
					t.Errorf("%d: %v", i, p)
				}
			}()
			f()
		}()
	}
	if _, ok := Wrap(nil).(*Transport); !ok {
		t.Error("Wrap returns something else than a *Transport")
	}
}

// A Registry's own dialer is used if the Base has none, the default one too.
func TestOptionsRegistryDial(t *testing.T) {
	s := newServer(t, ok, faultnet.NoTLS())
	for _, base := range []*http.Transport{nil, {}} {
		d := new(faultnet.Dialer)
		reg := &Registry{Dial: d.DialContext}
		tr := Options{Registry: reg, Base: base}.NewTransport()
		c := &http.Client{Transport: tr}
		mustGet(t, c, s.URL)
		failWrites(d, net.ErrClosed)
		mustGet(t, c, s.URL)
		if d.Dials() != 2 || reg.Len() != 1 {
			t.Errorf("Base %v: %d dials, %d tracked", base != nil, d.Dials(), reg.Len())
		}
		tr.CloseIdleConnections()
		d.CloseAll()
	}
}

// Options are copied when used: what the caller does with them afterwards has
// no effect.
func TestOptionsCopied(t *testing.T) {
	s := newServer(t, ok)
	d := new(faultnet.Dialer)
	t.Cleanup(d.CloseAll)
	var told atomic.Int64
	hooks := &Hooks{
		ConnEvicted: func(ConnEvictedInfo) { told.Add(1) },
		RequestDone: func(RequestDoneInfo) { told.Add(1) },
	}
	base := &http.Transport{DialContext: d.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true, HTTP2: &http.HTTP2Config{}}
	o := Options{Base: base, Hooks: hooks, Retryable: IsIdempotent}
	rts := []*Transport{
		o.NewTransport(),
		Options{Hooks: hooks, Retryable: IsIdempotent}.Wrap(base.Clone()).(*Transport),
	}

	never := func(*http.Request) bool { t.Error("later changes are seen"); return false }
	o.Retryable, o.DisableRetry, o.Health.Disable = never, true, true
	hooks.ConnEvicted = func(ConnEvictedInfo) { t.Error("later changes are seen") }
	hooks.RequestDone = func(RequestDoneInfo) { t.Error("later changes are seen") }
	base.Proxy = func(*http.Request) (*url.URL, error) { return nil, errors.New("later changes are seen") }
	base.DialContext = func(context.Context, string, string) (net.Conn, error) {
		return nil, errors.New("later changes are seen")
	}
	base.TLSClientConfig.RootCAs = x509.NewCertPool()
	base.TLSClientConfig.NextProtos = []string{"later"}
	base.HTTP2.PingTimeout = 1

	for i, tr := range rts {
		c := &http.Client{Transport: tr}
		mustGet(t, c, s.URL)
		failWrites(d, net.ErrClosed)
		mustGet(t, c, s.URL)
		eventually(t, "two hooks called", func() bool { return told.Load() == int64(2*(i+1)) })
		tr.CloseIdleConnections()
	}
}

// The same Options make as many Transports as wanted, none of which shares a
// connection with another.
func TestOptionsReused(t *testing.T) {
	s := newServer(t, ok)
	d := new(faultnet.Dialer)
	t.Cleanup(d.CloseAll)
	o := Options{Base: &http.Transport{DialContext: d.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true}}
	a, b := o.NewTransport(), o.NewTransport()
	for _, tr := range []*Transport{a, b} {
		mustGet(t, &http.Client{Transport: tr}, s.URL)
		if tr.Stats().Open != 1 {
			t.Errorf("%+v", tr.Stats())
		}
	}
	if d.Dials() != 2 {
		t.Errorf("%d dials", d.Dials())
	}
	if err := a.CloseConnections(); err != nil {
		t.Error(err)
	}
	eventually(t, "closed", func() bool { return a.Stats().Open == 0 })
	mustGet(t, &http.Client{Transport: b}, s.URL)
	if d.Dials() != 2 {
		t.Error("the other's connection was closed")
	}
	b.CloseIdleConnections()
}

// Hooks may be nil, in whole and in part; so may the Logger.
func TestOptionsHooksAndLogger(t *testing.T) {
	s := newServer(t, ok)
	for _, tt := range []struct {
		name  string
		hooks *Hooks
		log   bool
	}{
		{"none", nil, false},
		{"empty", &Hooks{}, false},
		{"Logger", nil, true},
		{"Logger and empty", &Hooks{}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var mu sync.Mutex
			var buf bytes.Buffer
			o := Options{Hooks: tt.hooks}
			if tt.log {
				o.Logger = slog.New(slog.NewTextHandler(optWriter(func(p []byte) (int, error) {
					mu.Lock()
					defer mu.Unlock()
					return buf.Write(p)
				}), &slog.HandlerOptions{Level: slog.LevelDebug}))
			}
			d := new(faultnet.Dialer)
			t.Cleanup(d.CloseAll)
			o.Base = &http.Transport{DialContext: d.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true}
			c := &http.Client{Transport: o.NewTransport()}
			mustGet(t, c, s.URL)
			failWrites(d, syscall.EPIPE)
			mustGet(t, c, s.URL)
			c.CloseIdleConnections()
			if !tt.log {
				return
			}
			var text string
			eventually(t, "two lines logged", func() bool {
				mu.Lock()
				defer mu.Unlock()
				text = buf.String()
				return strings.Count(text, "\n") == 2
			})
			if !strings.Contains(text, "level=WARN") || !strings.Contains(text, "level=DEBUG") || !strings.Contains(text, "cause=reset") {
				t.Errorf("logged:\n%s", text)
			}
		})
	}
}

type optWriter func([]byte) (int, error)

func (f optWriter) Write(p []byte) (int, error) { return f(p) }

// A Registry alone, in a transport that somebody else builds, gives it full
// evidence: as TestDeadBeforePOST.
func TestRegistryAlone(t *testing.T) {
	bodies := []struct {
		name string
		body func() io.Reader
	}{
		{"GetBody", func() io.Reader { return newString("payload") }},
		{"io.Reader", func() io.Reader { return onlyReader("payload") }},
		{"no body", func() io.Reader { return nil }},
	}
	for _, tt := range []struct {
		name  string
		proto string
		base  func(s *faultnet.Server, d *faultnet.Dialer) (*http.Transport, *Registry)
	}{
		{"DialContext", "HTTP/2.0", func(s *faultnet.Server, d *faultnet.Dialer) (*http.Transport, *Registry) {
			r := &Registry{Dial: d.DialContext}
			return &http.Transport{DialContext: r.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true}, r
		}},
		{"DialContext, HTTP/1", "HTTP/1.1", func(s *faultnet.Server, d *faultnet.Dialer) (*http.Transport, *Registry) {
			r := &Registry{Dial: d.DialContext}
			return &http.Transport{DialContext: r.DialContext, TLSClientConfig: s.ClientTLS()}, r
		}},
		{"DialTLSContext", "HTTP/2.0", func(s *faultnet.Server, d *faultnet.Dialer) (*http.Transport, *Registry) {
			cfg := s.ClientTLS()
			cfg.NextProtos = []string{"h2", "http/1.1"}
			r := &Registry{Dial: d.DialContext, TLSClientConfig: cfg, TLSHandshakeTimeout: 10 * time.Second}
			return &http.Transport{DialTLSContext: r.DialTLSContext, ForceAttemptHTTP2: true}, r
		}},
		{"DialTLSContext, HTTP/1", "HTTP/1.1", func(s *faultnet.Server, d *faultnet.Dialer) (*http.Transport, *Registry) {
			r := &Registry{Dial: d.DialContext, TLSClientConfig: s.ClientTLS()}
			return &http.Transport{DialTLSContext: r.DialTLSContext}, r
		}},
	} {
		for _, b := range bodies {
			t.Run(tt.name+"/"+b.name, func(t *testing.T) {
				for _, werr := range writeErrors {
					var runs atomic.Int64
					s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
						if r.Method == "POST" {
							if got, _ := io.ReadAll(r.Body); string(got) != "payload" && b.name != "no body" {
								t.Errorf("body %q", got)
							}
							runs.Add(1)
						}
					})
					d := new(faultnet.Dialer)
					base, reg := tt.base(s, d)
					c := &http.Client{Transport: Options{Registry: reg}.Wrap(base)}
					resp, err := c.Get(s.URL)
					if err != nil {
						t.Fatal(err)
					}
					drain(resp)
					if resp.Proto != tt.proto || resp.TLS == nil || reg.Len() != 1 {
						t.Errorf("%s, TLS %v, %d tracked", resp.Proto, resp.TLS != nil, reg.Len())
					}
					failWrites(d, werr)
					if resp, err = c.Do(request(t, "POST", s.URL, b.body())); err != nil {
						t.Errorf("%v: %v", werr, err)
					} else {
						drain(resp)
					}
					if runs.Load() != 1 {
						t.Errorf("the POST ran %d times", runs.Load())
					}
					eventually(t, "nothing tracked", func() bool {
						base.CloseIdleConnections() // a stream may be ending yet
						return reg.Len() == 0
					})
					d.CloseAll()
				}
			})
		}
	}
}

// The zero Registry dials, with and without TLS, and forgets what is closed.
func TestRegistryZero(t *testing.T) {
	s := newServer(t, ok)
	var r Registry
	if r.Len() != 0 {
		t.Errorf("Len %d", r.Len())
	}
	if err := r.CloseAll(); err != nil {
		t.Error(err)
	}
	a, err := r.DialContext(t.Context(), "tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	b, err := r.DialContext(t.Context(), "tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if r.Len() != 2 {
		t.Errorf("Len %d, want 2", r.Len())
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := a.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("second Close: %v", err)
	}
	if r.Len() != 1 {
		t.Errorf("Len %d, want 1", r.Len())
	}
	if err := r.CloseAll(); err != nil {
		t.Error(err)
	}
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Read after CloseAll: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Errorf("Close after CloseAll: %v", err)
	}
	if r.Len() != 0 {
		t.Errorf("Len %d, want 0", r.Len())
	}
	if _, err := r.DialTLSContext(t.Context(), "tcp", s.Addr()); !errors.As(err, new(x509.UnknownAuthorityError)) {
		t.Errorf("err = %v", err)
	}
	if _, err := r.DialContext(t.Context(), "tcp", "127.0.0.1:0"); err == nil {
		t.Error("no error")
	}
	if r.Len() != 0 {
		t.Errorf("Len %d after failures, want 0", r.Len())
	}
	nothing := Registry{Dial: func(context.Context, string, string) (net.Conn, error) { return nil, nil }}
	if c, err := nothing.DialContext(t.Context(), "tcp", s.Addr()); c != nil || err != nil {
		t.Errorf("%v, %v", c, err)
	}
	if c, err := nothing.DialTLSContext(t.Context(), "tcp", s.Addr()); c != nil || err != nil {
		t.Errorf("%v, %v", c, err)
	}
}

func TestRegistryDialTLS(t *testing.T) {
	var hellos dialHellos
	s := newServer(t, ok, faultnet.Configure(hellos.configure))
	silent := dialSilentListener(t)
	cfg := s.ClientTLS()
	cfg.NextProtos = []string{"h2"}
	r := Registry{TLSClientConfig: cfg, TLSHandshakeTimeout: 50 * time.Millisecond}

	if _, err := r.DialTLSContext(t.Context(), "tcp", silent.Addr().String()); err == nil || err.Error() != "net/http: TLS handshake timeout" {
		t.Errorf("err = %v", err)
	} else if ne, ok := err.(net.Error); !ok || !ne.Timeout() {
		t.Errorf("%T is no timeout", err)
	}
	patient := Registry{TLSClientConfig: cfg}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := patient.DialTLSContext(ctx, "tcp", silent.Addr().String()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("err = %v", err)
	}
	if r.Len() != 0 || patient.Len() != 0 {
		t.Errorf("%d and %d connections left", r.Len(), patient.Len())
	}

	for addr, sni := range map[string]string{"localhost": "localhost", "127.0.0.1": ""} {
		_, port, _ := net.SplitHostPort(s.Addr())
		r := Registry{
			TLSClientConfig: cfg,
			Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, network, s.Addr())
			},
		}
		hellos.take()
		nc, err := r.DialTLSContext(t.Context(), "tcp", net.JoinHostPort(addr, port))
		if err != nil {
			t.Fatal(err)
		}
		tc, ok := nc.(*tls.Conn)
		if !ok {
			t.Fatalf("%T, net/http speaks HTTP/2 over a *tls.Conn only", nc)
		}
		if cs := tc.ConnectionState(); !cs.HandshakeComplete || cs.NegotiatedProtocol != "h2" {
			t.Errorf("%+v", cs)
		}
		if got := hellos.take(); len(got) != 1 || got[0] != (dialHello{sni, "h2"}) {
			t.Errorf("%+v", got)
		}
		if r.Len() != 1 {
			t.Errorf("Len %d", r.Len())
		}
		nc.Close()
		if r.Len() != 0 {
			t.Errorf("Len %d", r.Len())
		}
	}
	if cfg.ServerName != "" {
		t.Error("the user's config was changed")
	}
}

// Closing everything under requests: those that may be are sent again, the
// others fail, and the Registry goes on.
func TestCloseConnectionsInFlight(t *testing.T) {
	for _, proto := range []struct {
		name string
		opts []faultnet.ServerOption
	}{{"HTTP/2", nil}, {"HTTP/1", []faultnet.ServerOption{faultnet.HTTP1Only()}}} {
		for _, tt := range []struct {
			name, method string
			registry     bool // Registry.CloseAll, not Transport.CloseConnections
			again        bool
		}{
			{"GET", "GET", false, true},
			{"GET, CloseAll", "GET", true, true},
			{"POST", "POST", false, false},
			{"POST, CloseAll", "POST", true, false},
		} {
			t.Run(proto.name+"/"+tt.name, func(t *testing.T) {
				const n = 8
				arrived := make(chan struct{}, 2*n)
				var runs atomic.Int64
				s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path != "/hold" {
						return
					}
					again := runs.Add(1) > n
					arrived <- struct{}{}
					if !again {
						<-r.Context().Done()
					}
				}, proto.opts...)
				d := new(faultnet.Dialer)
				reg := new(Registry)
				tr := Options{
					Base:     &http.Transport{DialContext: d.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true},
					Registry: reg,
				}.NewTransport()
				t.Cleanup(func() {
					tr.CloseIdleConnections()
					d.CloseAll()
				})
				c := &http.Client{Transport: tr}
				mustGet(t, c, s.URL)
				done := make(chan error, n)
				for range n {
					go func() {
						resp, err := c.Do(request(t, tt.method, s.URL+"/hold", nil))
						if err == nil {
							err = drain(resp)
						}
						done <- err
					}()
				}
				for range n {
					<-arrived
				}
				var err error
				if tt.registry {
					err = reg.CloseAll()
				} else {
					err = tr.CloseConnections()
				}
				if err != nil {
					t.Error(err)
				}
				for range n {
					err := <-done
					if (err == nil) != tt.again {
						t.Errorf("err = %v", err)
					}
					dialCheckText(t, err)
				}
				if want := map[bool]int64{true: 2 * n, false: n}[tt.again]; runs.Load() != want {
					t.Errorf("the handler ran %d times, want %d", runs.Load(), want)
				}
				mustGet(t, c, s.URL)
				eventually(t, "nothing is left", func() bool {
					tr.CloseIdleConnections() // a stream may be ending yet
					return reg.Len() == 0 && d.Open() == 0
				})
			})
		}
	}
}

// Errors of closing are all told.
func TestCloseConnectionsErrors(t *testing.T) {
	s := newServer(t, ok, faultnet.NoTLS())
	errClose := []error{errors.New("close 0 failed"), errors.New("close 1 failed")}
	var n atomic.Int64
	reg := &Registry{Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &dialBadClose{Conn: nc, err: errClose[(n.Add(1)-1)%2]}, nil
	}}
	tr := Options{Registry: reg}.NewTransport()
	dial := func() (conns []net.Conn) {
		for range errClose {
			nc, err := reg.DialContext(t.Context(), "tcp", s.Addr())
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, nc)
		}
		return conns
	}
	for _, f := range []func() error{reg.CloseAll, tr.CloseConnections} {
		conns := dial()
		err := f()
		for _, want := range errClose {
			if !strings.Contains(fmt.Sprint(err), want.Error()) {
				t.Errorf("err = %v, want %v in it", err, want)
			}
			if !errors.Is(err, want) {
				t.Errorf("err = %v, %v is not in its chain", err, want)
			}
		}
		if err := f(); err != nil {
			t.Errorf("again: %v", err)
		}
		for _, nc := range conns {
			nc.Close()
		}
	}
	if reg.Len() != 0 {
		t.Errorf("Len %d", reg.Len())
	}
}

type dialBadClose struct {
	net.Conn
	err error
}

func (c *dialBadClose) Close() error {
	c.Conn.Close()
	return c.err
}

// Len and CloseAll may be called at any time.
func TestRegistryConcurrently(t *testing.T) {
	r := Registry{Dial: func(context.Context, string, string) (net.Conn, error) {
		here, there := net.Pipe()
		there.Close()
		return here, nil
	}}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 200 {
				c, err := r.DialContext(t.Context(), "tcp", "host:1")
				if err != nil {
					t.Error(err)
					return
				}
				if r.Len() < 1 {
					t.Error("Len counts nothing")
				}
				c.Close()
			}
		})
		wg.Go(func() {
			for range 50 {
				if err := r.CloseAll(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if r.Len() != 0 {
		t.Errorf("Len %d, want 0", r.Len())
	}
}
