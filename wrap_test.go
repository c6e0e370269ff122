package deadconn

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"reflect"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/deadconn/deadconn/internal/faultnet"
	"golang.org/x/net/http2"
)

// dialPrivate is a wrapper as client-go has them: of a private type, with
// nothing but RoundTrip and WrappedRoundTripper.
type dialPrivate struct{ rt http.RoundTripper }

func (p *dialPrivate) RoundTrip(req *http.Request) (*http.Response, error) {
	return p.rt.RoundTrip(req)
}
func (p *dialPrivate) WrappedRoundTripper() http.RoundTripper { return p.rt }

// dialOtel is a wrapper as otelhttp's: it clones the request, wraps the body,
// and shows nothing of what it wraps.
type dialOtel struct{ rt http.RoundTripper }

func (o dialOtel) RoundTrip(req *http.Request) (*http.Response, error) {
	type key struct{}
	r := req.Clone(context.WithValue(req.Context(), key{}, "span"))
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = struct{ io.ReadCloser }{r.Body}
	}
	resp, err := o.rt.RoundTrip(r)
	if err == nil {
		resp.Body = struct{ io.ReadCloser }{resp.Body}
	}
	return resp, err
}

// dialOpaque lets no context values through either, so that httptrace sees
// nothing.
type dialOpaque struct{ rt http.RoundTripper }

type dialNoValues struct{ context.Context }

func (dialNoValues) Value(any) any { return nil }

func (o dialOpaque) RoundTrip(req *http.Request) (*http.Response, error) {
	return o.rt.RoundTrip(req.Clone(dialNoValues{req.Context()}))
}

func dialTransport2(cfg *tls.Config, dial dialFunc) *http2.Transport {
	return &http2.Transport{
		TLSClientConfig: cfg,
		DialTLSContext: func(ctx context.Context, network, addr string, cfg *tls.Config) (net.Conn, error) {
			nc, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			tc := tls.Client(nc, cfg)
			if err := tc.HandshakeContext(ctx); err != nil {
				nc.Close()
				return nil, err
			}
			return tc, nil
		},
	}
}

// All that Wrap may be given.
var dialBases = []struct {
	name string
	new  func(cfg *tls.Config, dial dialFunc) http.RoundTripper
	// hidden: the base tells nothing of its connections, so that none is
	// evicted by us.
	hidden bool
}{
	{"*http.Transport", func(cfg *tls.Config, dial dialFunc) http.RoundTripper {
		return &http.Transport{DialContext: dial, TLSClientConfig: cfg, ForceAttemptHTTP2: true}
	}, false},
	{"http2.ConfigureTransports", func(cfg *tls.Config, dial dialFunc) http.RoundTripper {
		tr := &http.Transport{DialContext: dial, TLSClientConfig: cfg}
		if _, err := http2.ConfigureTransports(tr); err != nil {
			panic(err)
		}
		return tr
	}, false},
	{"*http2.Transport", func(cfg *tls.Config, dial dialFunc) http.RoundTripper { return dialTransport2(cfg, dial) }, false},
	{"private", func(cfg *tls.Config, dial dialFunc) http.RoundTripper {
		return &dialPrivate{&http.Transport{DialContext: dial, TLSClientConfig: cfg, ForceAttemptHTTP2: true}}
	}, false},
	{"otelhttp", func(cfg *tls.Config, dial dialFunc) http.RoundTripper {
		return dialOtel{&http.Transport{DialContext: dial, TLSClientConfig: cfg, ForceAttemptHTTP2: true}}
	}, false},
	{"opaque", func(cfg *tls.Config, dial dialFunc) http.RoundTripper {
		return dialOpaque{&http.Transport{DialContext: dial, TLSClientConfig: cfg, ForceAttemptHTTP2: true}}
	}, true},
	{"Transport", func(cfg *tls.Config, dial dialFunc) http.RoundTripper {
		return Options{Base: &http.Transport{DialContext: dial, TLSClientConfig: cfg, ForceAttemptHTTP2: true}}.NewTransport()
	}, true}, // the inner one has done it all
}

// golang/go#39750 under everything that can be wrapped.
func TestWrapDeathsInTurn(t *testing.T) {
	const deaths = 6
	for _, b := range dialBases {
		t.Run(b.name, func(t *testing.T) {
			s := newServer(t, ok)
			d := new(faultnet.Dialer)
			base := b.new(s.ClientTLS(), d.DialContext)
			var told atomic.Int64
			tr := Options{Hooks: &Hooks{ConnEvicted: func(i ConnEvictedInfo) {
				told.Add(1)
				if i.Cause == KindUnknown || i.Err == nil || i.LocalAddr == nil || i.RemoteAddr == nil {
					t.Errorf("%+v", i)
				}
			}}}.Wrap(base).(*Transport)
			t.Cleanup(func() {
				closeIdle(base)
				d.CloseAll()
			})
			c := &http.Client{Transport: tr}
			mustGet(t, c, s.URL)
			for i := range deaths {
				dying := live(d)
				dying.FailWrites(writeErrors[i%len(writeErrors)])
				if err := get(c, s.URL); err != nil {
					t.Errorf("death %d: %v", i, err)
				}
				eventually(t, "the dead one is closed", dying.Closed)
			}
			if n := d.Dials() - 1; n < deaths || n > 2*deaths {
				t.Errorf("%d dials in %d deaths", n, deaths)
			}
			want := int64(deaths)
			if b.hidden {
				want = 0
			}
			if st := tr.Stats(); st.Evicted != want || st.Lost != 0 {
				t.Errorf("%+v, want %d", st, want)
			}
			eventually(t, "evictions told", func() bool { return told.Load() == want })
		})
	}
}

// A POST whose body cannot be had again is sent again if a Registry dialed
// its connection, whatever the transport above it.
func TestWrapWithRegistry(t *testing.T) {
	for _, b := range dialBases {
		t.Run(b.name, func(t *testing.T) {
			var runs atomic.Int64
			s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == "POST" {
					if b, _ := io.ReadAll(r.Body); string(b) != "payload" {
						t.Errorf("body %q", b)
					}
					runs.Add(1)
				}
			})
			d := new(faultnet.Dialer)
			reg := &Registry{Dial: d.DialContext}
			base := b.new(s.ClientTLS(), reg.DialContext)
			c := &http.Client{Transport: Options{Registry: reg}.Wrap(base)}
			t.Cleanup(func() {
				closeIdle(base)
				d.CloseAll()
			})
			mustGet(t, c, s.URL)
			lost := int64(0)
			for _, werr := range writeErrors {
				failWrites(d, werr)
				resp, err := c.Do(request(t, "POST", s.URL, onlyReader("payload")))
				if err != nil {
					lost++
					mustGet(t, c, s.URL)
					continue
				}
				drain(resp)
			}
			// Nothing proves it if httptrace is cut off.
			if hidden := b.name == "opaque"; hidden != (lost > 0) || runs.Load()+lost != 3 {
				t.Errorf("%d lost, %d ran", lost, runs.Load())
			}
			if reg.Len() != 1 {
				t.Errorf("%d connections tracked", reg.Len())
			}
		})
	}
}

// The usual way to h2c before Go 1.24, where "TLS" dials are none.
func TestWrapTransport2Cleartext(t *testing.T) {
	for _, registry := range []bool{false, true} {
		s := newServer(t, ok, faultnet.H2C())
		d := new(faultnet.Dialer)
		reg := &Registry{Dial: d.DialContext}
		dial := d.DialContext
		if registry {
			dial = reg.DialContext
		}
		base := &http2.Transport{
			AllowHTTP: true,
			DialTLSContext: func(ctx context.Context, network, addr string, _ *tls.Config) (net.Conn, error) {
				return dial(ctx, network, addr)
			},
		}
		tr := Options{Registry: reg}.Wrap(base).(*Transport)
		c := &http.Client{Transport: tr}
		for i := range 4 {
			resp, err := c.Get(s.URL)
			if err != nil {
				t.Fatalf("registry=%v, death %d: %v", registry, i, err)
			}
			drain(resp)
			if resp.ProtoMajor != 2 {
				t.Errorf("%s", resp.Proto)
			}
			live(d).FailWrites(writeErrors[i%len(writeErrors)])
		}
		if st := tr.Stats(); st.Evicted != 3 || st.Rescued != 3 {
			t.Errorf("registry=%v: %+v", registry, st)
		}
		base.CloseIdleConnections()
		d.CloseAll()
	}
}

// A connection that somebody else dialed is evicted by identity: neither one
// to another host nor a second one to the same is touched.
func TestWrapEvictsByIdentity(t *testing.T) {
	for _, b := range dialBases[:5] {
		t.Run(b.name, func(t *testing.T) {
			arrived := make(chan struct{}, 2)
			release := make(chan struct{})
			hold := func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/hold" {
					w.(http.Flusher).Flush()
					arrived <- struct{}{}
					<-release
				}
				io.WriteString(w, "ok")
			}
			one := faultnet.Configure(func(s *http.Server) { s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 1} })
			s, other := newServer(t, hold, one), newServer(t, hold, one)
			d := new(faultnet.Dialer)
			base := b.new(s.ClientTLS(), d.DialContext)
			tr := Wrap(base).(*Transport)
			t.Cleanup(func() {
				closeIdle(base)
				d.CloseAll()
			})
			c := &http.Client{Transport: tr}
			var held []*http.Response
			for _, u := range []string{s.URL, other.URL} {
				resp, err := c.Get(u + "/hold")
				if err != nil {
					t.Fatal(err)
				}
				<-arrived
				held = append(held, resp)
			}
			// The held streams keep their connections full.
			mustGet(t, c, s.URL)
			conns := d.Conns()
			if len(conns) != 3 {
				t.Skipf("%d connections: this base does not dial a second one", len(conns))
			}
			conns[2].FailWrites(syscall.EPIPE)
			mustGet(t, c, s.URL)
			if !dialRawClosed(conns[2]) || dialRawClosed(conns[0]) || dialRawClosed(conns[1]) {
				t.Errorf("closed: %v %v %v, want the last", dialRawClosed(conns[0]), dialRawClosed(conns[1]), dialRawClosed(conns[2]))
			}
			close(release)
			for _, resp := range held {
				b, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if string(b) != "ok" || err != nil {
					t.Errorf("a held stream: %q, %v", b, err)
				}
			}
			if st := tr.Stats(); st.Evicted != 1 || st.Rescued != 1 {
				t.Errorf("%+v", st)
			}
		})
	}
}

// dialRawClosed asks the socket below c.
func dialRawClosed(c *faultnet.Conn) bool {
	sc, err := c.NetConn().(syscall.Conn).SyscallConn()
	if err != nil {
		return true
	}
	return sc.Control(func(uintptr) {}) != nil
}

// http.DefaultTransport is everybody's.
// awaitForgotten waits until tr knows no connection of somebody else's.
func awaitForgotten(t *testing.T, tr *Transport) {
	t.Helper()
	eventually(t, "all is forgotten", func() bool {
		for range tr.reg.foreign.Range {
			return false
		}
		return true
	})
}

// A connection of somebody else's is forgotten while all is quiet on it. It dies
// once all the same, whoever of its requests finds out.
func TestWrapTellsADeathOnce(t *testing.T) {
	var held atomic.Int64
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		if held.Add(1) <= 3 {
			<-r.Context().Done()
			return
		}
		ok(w, r)
	})
	c := wrapped.client(t, new(faultnet.Dialer), s.ClientTLS())
	tr := c.Transport.(*Transport)
	var wg sync.WaitGroup
	for i := range int64(3) {
		wg.Go(func() {
			if err := get(c, s.URL); err != nil {
				t.Error(err)
			}
		})
		eventually(t, "the request is there", func() bool { return held.Load() == i+1 })
		awaitForgotten(t, tr)
	}
	s.ResetConns()
	wg.Wait()
	all := tr.Autopsies()
	if st := tr.Stats(); st.Evicted != 1 || st.Rescued != 3 || len(all) != 1 || all[0].Rescued != 3 {
		t.Errorf("%+v, %+v", st, all)
	}
}

func TestWrapDefaultTransport(t *testing.T) {
	s := newServer(t, ok, faultnet.NoTLS())
	def := http.DefaultTransport.(*http.Transport)
	def.Clone() // net/http fills in the same as at first use
	before := dialFields(def)
	c := &http.Client{Transport: Wrap(nil)}
	mustGet(t, c, s.URL)
	mustGet(t, &http.Client{Transport: Wrap(def)}, s.URL)
	if err := c.Transport.(*Transport).CloseConnections(); err != nil {
		t.Error(err)
	}
	mustGet(t, c, s.URL)
	tr := NewTransport()
	mustGet(t, &http.Client{Transport: tr}, s.URL)
	tr.CloseIdleConnections()
	if after := dialFields(def); !reflect.DeepEqual(before, after) {
		t.Errorf("before\n%v\nafter\n%v", before, after)
	}
	if http.DefaultTransport != http.RoundTripper(def) {
		t.Error("http.DefaultTransport was replaced")
	}
	if c.Transport.(*Transport).WrappedRoundTripper() != http.RoundTripper(def) {
		t.Error("WrappedRoundTripper is not what was wrapped")
	}
	def.CloseIdleConnections()
}

// When a path goes, all its connections go with it. A request that meets one
// after the other has been sent on none of them. To know that takes a Registry:
// a transport that only Wrap knows may lose one.
func TestSeveralDeadConnections(t *testing.T) {
	const n = 4
	registered := way{"Wrap with a Registry", func(b *http.Transport) http.RoundTripper {
		reg := &Registry{Dial: b.DialContext}
		b.DialContext = reg.DialContext
		return Options{Registry: reg}.Wrap(b)
	}}
	for _, w := range []way{owned, registered} {
		t.Run(w.name, func(t *testing.T) {
			arrived := make(chan struct{}, n)
			release := make(chan struct{})
			s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/hold" {
					arrived <- struct{}{}
					<-release
				}
			}, faultnet.Configure(func(s *http.Server) { s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 1} }))
			d := new(faultnet.Dialer)
			c := w.client(t, d, s.ClientTLS())
			done := make(chan error, n)
			for range n {
				go func() { done <- get(c, s.URL+"/hold") }()
				<-arrived
			}
			close(release)
			for range n {
				if err := <-done; err != nil {
					t.Fatal(err)
				}
			}
			conns := d.Conns()
			if len(conns) != n {
				t.Fatalf("%d connections, want %d", len(conns), n)
			}
			if w.name == owned.name {
				for _, conn := range conns {
					conn.FailWrites(syscall.EPIPE)
				}
			} else {
				// Wrap has no proof of its own that nothing was sent. It asks
				// the socket.
				s.ResetConns()
			}
			if err := get(c, s.URL); err != nil {
				t.Errorf("lost: %v", err)
			}
			if errs := dialBurst(t, c, s.URL, 2*n); len(errs) != 0 {
				t.Errorf("%d lost, such as: %v", len(errs), errs[0])
			}
		})
	}
}

var errDialBase = errors.New("no such base")

// A base that fails by itself is nobody's dead connection.
func TestWrapBaseFails(t *testing.T) {
	rt := dialFails{}
	_, err := Wrap(rt).RoundTrip(request(t, "GET", "http://example.test/", nil))
	if err != errDialBase {
		t.Errorf("err = %v, want the same value", err)
	}
}

type dialFails struct{}

func (dialFails) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body != nil {
		req.Body.Close()
	}
	return nil, errDialBase
}
