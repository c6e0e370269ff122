package deadconn

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
	"golang.org/x/net/http2"
)

// What DialTLSContext takes over from net/http is compared with net/http's
// own, side by side.

// dialHello is what a server sees of a client's handshake.
type dialHello struct {
	serverName string
	protos     string
}

type dialHellos struct {
	mu    sync.Mutex
	all   []dialHello
	delay time.Duration
}

func (h *dialHellos) configure(s *http.Server) {
	s.TLSConfig.GetConfigForClient = func(i *tls.ClientHelloInfo) (*tls.Config, error) {
		h.mu.Lock()
		h.all = append(h.all, dialHello{i.ServerName, strings.Join(i.SupportedProtos, " ")})
		h.mu.Unlock()
		time.Sleep(h.delay)
		return nil, nil
	}
}

func (h *dialHellos) take() []dialHello {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := h.all
	h.all = nil
	return all
}

// dialMapped dials s whatever the address, which it remembers.
type dialMapped struct {
	to    string
	mu    sync.Mutex
	addrs []string
}

func (d *dialMapped) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d.mu.Lock()
	d.addrs = append(d.addrs, addr)
	d.mu.Unlock()
	return new(net.Dialer).DialContext(ctx, network, d.to)
}

func dialText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func dialClient(t *testing.T, w way, base *http.Transport) *http.Client {
	t.Helper()
	c := &http.Client{Transport: w.new(base)}
	t.Cleanup(c.CloseIdleConnections)
	return c
}

func TestDialServerName(t *testing.T) {
	var hellos dialHellos
	s := newServer(t, ok, faultnet.Configure(hellos.configure))
	trusted := s.ClientTLS
	insecure := func() *tls.Config { return &tls.Config{InsecureSkipVerify: true} }
	for _, tt := range []struct {
		name, url string
		cfg       func() *tls.Config
		fails     bool
		sni       string
	}{
		{"DNS name", "https://example.test/", trusted, false, "example.test"},
		{"upper case", "https://Example.Test/", trusted, false, "Example.Test"},
		{"port", "https://example.test:8443/", trusted, false, "example.test"},
		{"IPv4", "https://127.0.0.1:8443/", trusted, false, ""},
		{"IPv6", "https://[::1]/", trusted, false, ""},
		{"zone", "https://[fe80::1%25lo]/", insecure, false, ""},
		{"IDN", "https://bücher.test/", insecure, false, "xn--bcher-kva.test"},
		{"trailing dot", "https://example.test./", trusted, false, "example.test"},
		{"wrong name", "https://other.test/", trusted, true, "other.test"},
		{"wrong IP", "https://127.0.0.2/", trusted, true, ""},
		{"unknown authority", "https://example.test/", func() *tls.Config { return &tls.Config{} }, true, "example.test"},
		{"InsecureSkipVerify", "https://other.test/", insecure, false, "other.test"},
		{"override", "https://other.test/", func() *tls.Config {
			cfg := s.ClientTLS()
			cfg.ServerName = "example.test"
			return cfg
		}, false, "example.test"},
		{"wrong override", "https://example.test/", func() *tls.Config {
			cfg := s.ClientTLS()
			cfg.ServerName = "other.test"
			return cfg
		}, true, "other.test"},
		{"VerifyConnection", "https://example.test/", func() *tls.Config {
			cfg := s.ClientTLS()
			cfg.VerifyConnection = func(cs tls.ConnectionState) error {
				return fmt.Errorf("refused %s %s", cs.ServerName, cs.NegotiatedProtocol)
			}
			return cfg
		}, true, "example.test"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			type result struct {
				err    string
				proto  string
				tls    bool
				server string
				addrs  []string
				hellos []dialHello
			}
			run := func(w way) (r result) {
				hellos.take()
				d := &dialMapped{to: s.Addr()}
				c := dialClient(t, w, &http.Transport{DialContext: d.dial, TLSClientConfig: tt.cfg(), ForceAttemptHTTP2: true})
				resp, err := c.Get(tt.url)
				if err == nil {
					r.proto, r.tls = resp.Proto, resp.TLS != nil && resp.TLS.HandshakeComplete
					r.server = resp.TLS.ServerName
					err = drain(resp)
				}
				r.err, r.addrs, r.hellos = dialText(err), d.addrs, hellos.take()
				return r
			}
			want, got := run(bare), run(owned)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got\n%+v, net/http\n%+v", got, want)
			}
			if (got.err != "") != tt.fails || !tt.fails && (got.proto != "HTTP/2.0" || !got.tls) {
				t.Errorf("got %+v", got)
			}
			if len(got.hellos) != 1 || got.hellos[0].serverName != tt.sni {
				t.Errorf("hellos %+v, want one for %q", got.hellos, tt.sni)
			}
		})
	}
}

func TestDialClientCertificates(t *testing.T) {
	for _, opts := range [][]faultnet.ServerOption{
		{faultnet.RequireClientCert()},
		{faultnet.RequireClientCert(), faultnet.HTTP1Only()},
	} {
		s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, r.Proto, " ", len(r.TLS.PeerCertificates))
		}, opts...)
		for _, tt := range []struct {
			name string
			set  func(cfg *tls.Config, called func())
			ok   bool
		}{
			{"Certificates", func(cfg *tls.Config, _ func()) { cfg.Certificates = []tls.Certificate{faultnet.ClientCert()} }, true},
			{"GetClientCertificate", func(cfg *tls.Config, called func()) {
				cfg.GetClientCertificate = func(i *tls.CertificateRequestInfo) (*tls.Certificate, error) {
					called()
					if i.Context() == nil || i.Context().Value(http.ServerContextKey) != "value" {
						t.Error("the context of the request is not there")
					}
					cert := faultnet.ClientCert()
					return &cert, nil
				}
			}, true},
			{"GetClientCertificate fails", func(cfg *tls.Config, called func()) {
				cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
					called()
					return nil, errors.New("no key")
				}
			}, false},
			{"none", func(*tls.Config, func()) {}, false},
		} {
			t.Run(fmt.Sprint(tt.name, len(opts)), func(t *testing.T) {
				type result struct {
					body  string
					calls int64
					dials int
				}
				run := func(w way) (r result) {
					var calls atomic.Int64
					cfg := s.ClientTLS()
					tt.set(cfg, func() { calls.Add(1) })
					d := new(faultnet.Dialer)
					c := w.client(t, d, cfg)
					ctx := context.WithValue(t.Context(), http.ServerContextKey, "value")
					resp, err := c.Do(request(t, "GET", s.URL, nil).WithContext(ctx))
					if err != nil {
						if tt.ok || !strings.Contains(err.Error(), "certificate required") && !strings.Contains(err.Error(), "no key") &&
							Classify(err) == KindUnknown {
							t.Errorf("%s: %v", w.name, err)
						}
						dialCheckText(t, err)
						if re := (*RetryError)(nil); errors.As(err, &re) {
							t.Errorf("%s: a refusal was answered by a retry: %v", w.name, err)
						}
						if d.Dials() > 1 {
							// BUG (roundtripper.go, rescue), on a busy machine: if net/http
							// notices the end of the new connection before the request is
							// on it, that is KindNotSent, so landed, and it dials again.
							t.Logf("%s: %d dials: %v", w.name, d.Dials(), err)
						}
					} else {
						b, _ := io.ReadAll(resp.Body)
						resp.Body.Close()
						r.body = string(b)
					}
					r.calls, r.dials = calls.Load(), d.Dials()
					return r
				}
				want, got := run(bare), run(owned)
				if !tt.ok {
					got.dials, got.calls = min(got.dials, want.dials), min(got.calls, want.calls)
				}
				if got != want || tt.ok != (got.body != "") || got.dials != 1 {
					t.Errorf("got %+v, net/http %+v", got, want)
				}
			})
		}
	}
}

// dialFailure tells failures apart that a handshake gave. What a connection of
// the wrong protocol gives depends on who sees the end of it first.
func dialFailure(err error) string {
	if text := err.Error(); strings.Contains(text, "tls: ") {
		return text
	}
	return "failed"
}

// Which protocol is spoken, for all the ways to say so.
func TestDialProtocols(t *testing.T) {
	protocols := func(set ...func(*http.Protocols, bool)) func(*http.Transport) {
		return func(tr *http.Transport) {
			tr.Protocols = new(http.Protocols)
			for _, f := range set {
				f(tr.Protocols, true)
			}
		}
	}
	h1, h2, h2c := (*http.Protocols).SetHTTP1, (*http.Protocols).SetHTTP2, (*http.Protocols).SetUnencryptedHTTP2
	noTLS := func(f func(*http.Transport)) func(*http.Transport) {
		return func(tr *http.Transport) { tr.TLSClientConfig = nil; f(tr) }
	}
	bases := []struct {
		name string
		set  func(*http.Transport)
	}{
		{"TLSClientConfig", func(*http.Transport) {}},
		{"zero", noTLS(func(*http.Transport) {})},
		{"zero with ForceAttemptHTTP2", noTLS(func(tr *http.Transport) { tr.ForceAttemptHTTP2 = true })},
		{"zero with DialContext", noTLS(func(tr *http.Transport) { tr.DialContext = new(net.Dialer).DialContext })},
		{"ForceAttemptHTTP2", func(tr *http.Transport) { tr.ForceAttemptHTTP2 = true }},
		{"ForceAttemptHTTP2 with DialContext", func(tr *http.Transport) {
			tr.ForceAttemptHTTP2, tr.DialContext = true, new(net.Dialer).DialContext
		}},
		{"empty TLSNextProto", func(tr *http.Transport) {
			tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
		}},
		{"empty TLSNextProto, ForceAttemptHTTP2", func(tr *http.Transport) {
			tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
			tr.ForceAttemptHTTP2 = true
		}},
		{"Protocols none", protocols()},
		{"Protocols 1", protocols(h1)},
		{"Protocols 1 with ForceAttemptHTTP2", func(tr *http.Transport) { protocols(h1)(tr); tr.ForceAttemptHTTP2 = true }},
		{"Protocols 2", protocols(h2)},
		{"Protocols 1 2", protocols(h1, h2)},
		{"Protocols h2c", protocols(h2c)},
		{"Protocols 1 h2c", protocols(h1, h2c)},
		{"Protocols 2 h2c", protocols(h2, h2c)},
		{"Protocols 1 2 h2c", protocols(h1, h2, h2c)},
		{"zero with Protocols 1 2", noTLS(protocols(h1, h2))},
		{"NextProtos 1", func(tr *http.Transport) { tr.TLSClientConfig.NextProtos = []string{"http/1.1"} }},
		{"NextProtos 1 ForceAttemptHTTP2", func(tr *http.Transport) {
			tr.TLSClientConfig.NextProtos = []string{"http/1.1"}
			tr.ForceAttemptHTTP2 = true
		}},
		{"NextProtos other", func(tr *http.Transport) {
			tr.TLSClientConfig.NextProtos = []string{"other"}
			tr.ForceAttemptHTTP2 = true
		}},
		{"ConfigureTransport", func(tr *http.Transport) {
			if err := http2.ConfigureTransport(tr); err != nil {
				t.Error(err)
			}
		}},
	}
	var hellos dialHellos
	record := faultnet.Configure(hellos.configure)
	servers := []struct {
		name string
		*faultnet.Server
	}{
		{"both", newServer(t, ok, record)},
		{"HTTP/1", newServer(t, ok, record, faultnet.HTTP1Only())},
		{"HTTP/2", newServer(t, ok, record, faultnet.HTTP2Only())},
		{"cleartext HTTP/1", newServer(t, ok, faultnet.NoTLS())},
		{"h2c", newServer(t, ok, faultnet.H2C())},
	}
	for _, b := range bases {
		t.Run(b.name, func(t *testing.T) {
			for _, s := range servers {
				run := func(w way) string {
					hellos.take()
					base := &http.Transport{TLSClientConfig: s.ClientTLS()}
					b.set(base)
					c := dialClient(t, w, base)
					var said string
					for range 2 { // the second one may find a connection
						resp, err := c.Get(s.URL)
						if err == nil {
							said += resp.Proto + " "
							err = drain(resp)
						}
						if err != nil {
							said += dialFailure(err) + " "
						}
					}
					for i, h := range hellos.take() {
						if i > 0 && strings.Contains(said, "failed") {
							break // it may have been sent again
						}
						said += "[" + h.protos + "]"
					}
					return said
				}
				want, got := run(bare), run(owned)
				if want != got {
					t.Errorf("%s: %s\nnet/http: %s", s.name, got, want)
				} else {
					t.Logf("%s: %s", s.name, got)
				}
			}
		})
	}
}

func TestDialHandshakeTimeout(t *testing.T) {
	silent := dialSilentListener(t)
	var through atomic.Pointer[faultnet.Conn]
	for _, tt := range []struct {
		name string
		dial dialFunc
	}{
		{"silent server", nil},
		{"black hole", func(ctx context.Context, network, addr string) (net.Conn, error) {
			raw, err := new(net.Dialer).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			c := faultnet.NewConn(raw)
			c.Blackhole()
			through.Store(c)
			return c, nil
		}},
		{"stalled write", func(ctx context.Context, network, addr string) (net.Conn, error) {
			raw, err := new(net.Dialer).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			c := faultnet.NewConn(raw)
			c.HoldWrites()
			through.Store(c)
			return c, nil
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, w := range []way{bare, owned} {
				var traced atomic.Pointer[error]
				var started, done atomic.Int64
				through.Store(nil)
				rt := w.new(&http.Transport{DialContext: tt.dial, TLSHandshakeTimeout: 50 * time.Millisecond, ForceAttemptHTTP2: true})
				ctx := httptrace.WithClientTrace(withTimeout(t, 20*time.Second), &httptrace.ClientTrace{
					TLSHandshakeStart: func() { started.Add(1) },
					TLSHandshakeDone: func(_ tls.ConnectionState, err error) {
						done.Add(1)
						traced.Store(&err)
					},
				})
				start := time.Now()
				_, err := rt.RoundTrip(request(t, "GET", "https://"+silent.Addr().String(), nil).WithContext(ctx))
				d := time.Since(start)
				if err == nil || err.Error() != "net/http: TLS handshake timeout" {
					t.Fatalf("%s: after %v: %v", w.name, d, err)
				}
				if ne, ok := err.(net.Error); !ok || !ne.Timeout() {
					t.Errorf("%s: %T is no timeout", w.name, err)
				}
				if d < 50*time.Millisecond || d > 10*time.Second {
					t.Errorf("%s: after %v", w.name, d)
				}
				if started.Load() != 1 || done.Load() != 1 || (*traced.Load()) == nil || (*traced.Load()).Error() != err.Error() {
					t.Errorf("%s: TLSHandshakeStart %d times, TLSHandshakeDone %d times, %v", w.name, started.Load(), done.Load(), traced.Load())
				}
				if c := through.Load(); c != nil {
					eventually(t, "closed", c.Closed)
				}
				if tr, ok := rt.(*Transport); ok {
					eventually(t, "nothing tracked", func() bool { return tr.Stats().Open == 0 })
					if st := tr.Stats(); st.Evicted != 0 || st.Lost != 0 {
						t.Errorf("stats %+v", st)
					}
				}
			}
		})
	}
}

func TestDialPlainServer(t *testing.T) {
	s := newServer(t, ok, faultnet.NoTLS())
	u := "https://" + s.Addr()
	run := func(w way) string {
		return dialText(get(dialClient(t, w, &http.Transport{TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true}), u))
	}
	want, got := run(bare), run(owned)
	if got != want || !strings.Contains(got, "server gave HTTP response to HTTPS client") {
		t.Errorf("%s\nnet/http: %s", got, want)
	}
}

// A WebSocket needs HTTP/1.1, whatever the server offers.
func TestDialWebSocket(t *testing.T) {
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" {
			return
		}
		if r.ProtoMajor != 1 {
			w.WriteHeader(http.StatusHTTPVersionNotSupported)
			return
		}
		nc, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer nc.Close()
		rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		rw.Flush()
		line, _ := rw.ReadString('\n')
		rw.WriteString(line)
		rw.Flush()
	})
	for _, header := range []struct{ connection, upgrade string }{
		{"Upgrade", "websocket"}, {"keep-alive, upgrade", "WebSocket"}, {"Upgrade", "other"}, {"keep-alive", "websocket"},
	} {
		for _, warm := range []bool{false, true} {
			run := func(w way) string {
				d := new(faultnet.Dialer)
				c := w.client(t, d, s.ClientTLS())
				if warm {
					mustGet(t, c, s.URL)
				}
				req := request(t, "GET", s.URL, nil)
				req.Header.Set("Connection", header.connection)
				req.Header.Set("Upgrade", header.upgrade)
				resp, err := c.Do(req)
				if err != nil {
					return err.Error()
				}
				defer resp.Body.Close()
				said := resp.Proto + " " + resp.Status
				if rw, ok := resp.Body.(io.ReadWriteCloser); ok && resp.StatusCode == http.StatusSwitchingProtocols {
					io.WriteString(rw, "hello\n")
					line, err := bufio.NewReader(rw).ReadString('\n')
					said += fmt.Sprint(" ", line, err)
				}
				mustGet(t, c, s.URL)
				return fmt.Sprint(said, " dials ", d.Dials())
			}
			want, got := run(bare), run(owned)
			if got != want {
				t.Errorf("%+v, warm=%v: %q, net/http %q", header, warm, got, want)
			}
			if ws := header.upgrade != "other" && header.connection != "keep-alive"; ws != strings.Contains(got, "101 Switching Protocols hello\n") {
				t.Errorf("%+v, warm=%v: %q", header, warm, got)
			}
		}
	}
}

// dialTrace counts what httptrace tells.
type dialTrace struct {
	mu     sync.Mutex
	counts map[string]int
	shook  time.Time
	took   time.Duration
}

func (d *dialTrace) inc(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.counts == nil {
		d.counts = make(map[string]int)
	}
	d.counts[name]++
}

func (d *dialTrace) trace() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		GetConn:              func(a string) { d.inc("GetConn " + a) },
		GotConn:              func(i httptrace.GotConnInfo) { d.inc(fmt.Sprintf("GotConn reused=%v", i.Reused)) },
		GotFirstResponseByte: func() { d.inc("GotFirstResponseByte") },
		DNSStart:             func(i httptrace.DNSStartInfo) { d.inc("DNSStart " + i.Host) },
		DNSDone:              func(i httptrace.DNSDoneInfo) { d.inc(fmt.Sprint("DNSDone ", i.Err)) },
		ConnectStart:         func(network, addr string) { d.inc("ConnectStart " + network) },
		ConnectDone:          func(network, addr string, err error) { d.inc(fmt.Sprint("ConnectDone ", network)) },
		TLSHandshakeStart: func() {
			d.inc("TLSHandshakeStart")
			d.mu.Lock()
			defer d.mu.Unlock()
			d.shook = time.Now()
		},
		TLSHandshakeDone: func(cs tls.ConnectionState, err error) {
			d.inc(fmt.Sprint("TLSHandshakeDone ", cs.HandshakeComplete, cs.NegotiatedProtocol, err))
			d.mu.Lock()
			defer d.mu.Unlock()
			d.took = time.Since(d.shook)
		},
		WroteHeaders: func() { d.inc("WroteHeaders") },
		WroteRequest: func(i httptrace.WroteRequestInfo) { d.inc(fmt.Sprint("WroteRequest ", i.Err)) },
	}
}

func (d *dialTrace) snapshot() map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := make(map[string]int)
	for k, v := range d.counts {
		m[k] = v
	}
	return m
}

// The hooks of httptrace fire as often as with net/http.
func TestDialTraceHooks(t *testing.T) {
	for _, tt := range []struct {
		name  string
		opts  []faultnet.ServerOption
		fails bool
	}{
		{"HTTP/2", nil, false},
		{"HTTP/1", []faultnet.ServerOption{faultnet.HTTP1Only()}, false},
		{"cleartext", []faultnet.ServerOption{faultnet.NoTLS()}, false},
		{"fails", nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			hellos := &dialHellos{delay: 60 * time.Millisecond}
			opts := append(tt.opts, faultnet.Configure(hellos.configure))
			s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body) // else the answer may overtake it
				ok(w, r)
			}, opts...)
			u, err := url.Parse(s.URL)
			if err != nil {
				t.Fatal(err)
			}
			u.Host = "localhost:" + u.Port()
			run := func(w way, method string) []map[string]int {
				cfg := s.ClientTLS()
				if tt.fails {
					cfg = &tls.Config{}
				}
				d := &net.Dialer{}
				c := dialClient(t, w, &http.Transport{
					TLSClientConfig: cfg, ForceAttemptHTTP2: true,
					DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
						return d.DialContext(ctx, "tcp4", addr) // one address
					},
				})
				var all []map[string]int
				for i := range 2 {
					var tr dialTrace
					var body io.Reader
					if method == "POST" {
						body = newString("body")
					}
					req := request(t, method, u.String(), body)
					resp, err := c.Do(req.WithContext(httptrace.WithClientTrace(req.Context(), tr.trace())))
					if err == nil {
						drain(resp)
						eventually(t, "WroteRequest", func() bool { return tr.snapshot()["WroteRequest <nil>"] > 0 })
					}
					if tt.fails != (err != nil) {
						t.Fatalf("err = %v", err)
					}
					if i == 0 && tt.name != "cleartext" && tr.took < 30*time.Millisecond {
						t.Errorf("%s: the handshake took %v, less than it took", w.name, tr.took)
					}
					all = append(all, tr.snapshot())
				}
				return all
			}
			for _, method := range []string{"GET", "POST"} {
				want, got := run(bare, method), run(owned, method)
				if !reflect.DeepEqual(got, want) {
					t.Errorf("%s: %v\nnet/http: %v", method, got, want)
				}
			}
		})
	}
}

// The user's own dialers are used, and what they return is looked after.
func TestDialOwnDialers(t *testing.T) {
	for _, tt := range []struct {
		name  string
		opts  []faultnet.ServerOption
		proto string
		set   func(tr *http.Transport, d *faultnet.Dialer)
		lost  bool // requests that meet a dead connection are lost with net/http
	}{
		{"DialContext", nil, "HTTP/2.0", func(tr *http.Transport, d *faultnet.Dialer) { tr.DialContext = d.DialContext }, true},
		{"Dial", nil, "HTTP/2.0", func(tr *http.Transport, d *faultnet.Dialer) {
			tr.Dial = func(network, addr string) (net.Conn, error) { //nolint:staticcheck // in use
				return d.DialContext(context.Background(), network, addr)
			}
		}, true},
		{"DialContext before Dial", nil, "HTTP/2.0", func(tr *http.Transport, d *faultnet.Dialer) {
			tr.DialContext = d.DialContext
			tr.Dial = func(network, addr string) (net.Conn, error) { return nil, errors.New("Dial called") } //nolint:staticcheck // in use
		}, true},
		{"DialTLSContext, done", nil, "HTTP/2.0", func(tr *http.Transport, d *faultnet.Dialer) {
			tr.DialTLSContext = dialTLSBy(tr.TLSClientConfig, d, true)
		}, true},
		{"DialTLSContext, not done", nil, "HTTP/2.0", func(tr *http.Transport, d *faultnet.Dialer) {
			tr.DialTLSContext = dialTLSBy(tr.TLSClientConfig, d, false)
		}, true},
		{"DialTLS", nil, "HTTP/2.0", func(tr *http.Transport, d *faultnet.Dialer) {
			dial := dialTLSBy(tr.TLSClientConfig, d, true)
			tr.DialTLS = func(network, addr string) (net.Conn, error) { return dial(context.Background(), network, addr) } //nolint:staticcheck // in use
		}, true},
		{"DialTLSContext, HTTP/1", []faultnet.ServerOption{faultnet.HTTP1Only()}, "HTTP/1.1", func(tr *http.Transport, d *faultnet.Dialer) {
			tr.DialTLSContext = dialTLSBy(tr.TLSClientConfig, d, true)
		}, false},
		{"DialTLSContext, no *tls.Conn", []faultnet.ServerOption{faultnet.HTTP1Only()}, "HTTP/1.1", func(tr *http.Transport, d *faultnet.Dialer) {
			dial := dialTLSBy(tr.TLSClientConfig, d, true)
			tr.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
				nc, err := dial(ctx, network, addr)
				if err != nil {
					return nil, err
				}
				return struct{ net.Conn }{nc}, nil
			}
		}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, w := range []way{bare, owned} {
				s := newServer(t, ok, tt.opts...)
				d := new(faultnet.Dialer)
				t.Cleanup(d.CloseAll)
				base := &http.Transport{TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true}
				tt.set(base, d)
				c := dialClient(t, w, base)
				resp, err := c.Get(s.URL)
				if err != nil {
					t.Fatalf("%s: %v", w.name, err)
				}
				drain(resp)
				if resp.Proto != tt.proto || d.Dials() != 1 {
					t.Errorf("%s: %s by %d dials", w.name, resp.Proto, d.Dials())
				}
				failed := 0
				for range 5 {
					failWrites(d, net.ErrClosed)
					if err := get(c, s.URL); err != nil {
						failed++
						mustGet(t, c, s.URL)
					}
				}
				if w.name == bare.name && tt.lost && failed == 0 {
					t.Error("net/http lost no request: has the fault been cured?")
				}
				// Unmerged, net/http may dial once more for a request that comes before
				// the connection is in its pool.
				if w.name != bare.name && (failed != 0 || d.Dials() < 6 || d.Dials() > 9) {
					t.Errorf("%s: lost %d requests, %d dials", w.name, failed, d.Dials())
				}
			}
		})
	}
}

// dialTLSBy is a DialTLSContext as users write it.
func dialTLSBy(cfg *tls.Config, d *faultnet.Dialer, shake bool) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := d.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		cfg := tlsConfig(cfg, addr)
		if !slices.Contains(cfg.NextProtos, "h2") {
			cfg.NextProtos = []string{"h2", "http/1.1"}
		}
		tc := tls.Client(nc, cfg)
		if shake {
			if err := tc.HandshakeContext(ctx); err != nil {
				nc.Close()
				return nil, err
			}
		}
		return tc, nil
	}
}

// A dialer that returns neither a connection nor an error is net/http's to
// complain about.
func TestDialReturnsNothing(t *testing.T) {
	for _, u := range []string{"http://127.0.0.1:1/", "https://127.0.0.1:1/"} {
		run := func(w way) string {
			return dialText(get(dialClient(t, w, &http.Transport{
				DialContext: func(context.Context, string, string) (net.Conn, error) { return nil, nil },
			}), u))
		}
		want, got := run(bare), run(owned)
		if !strings.Contains(got, "(nil, nil)") || !strings.Contains(want, "(nil, nil)") {
			t.Errorf("%s\nnet/http: %s", got, want)
		}
	}
}

// dialProxy is a proxy as small as can be, for absolute URLs and CONNECT.
func dialProxy(t *testing.T, tlsToo bool) (s *faultnet.Server, seen *atomic.Int64) {
	t.Helper()
	seen = new(atomic.Int64)
	opts := []faultnet.ServerOption{faultnet.NoTLS()}
	if tlsToo {
		opts = []faultnet.ServerOption{faultnet.HTTP1Only()}
	}
	out := &http.Transport{}
	s = newServer(t, func(w http.ResponseWriter, r *http.Request) {
		seen.Add(1)
		if r.Method != http.MethodConnect {
			resp, err := out.RoundTrip(&http.Request{Method: r.Method, URL: r.URL, Header: r.Header, Body: r.Body, ContentLength: r.ContentLength})
			if err != nil {
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			defer resp.Body.Close()
			w.WriteHeader(resp.StatusCode)
			io.Copy(w, resp.Body)
			return
		}
		to, err := net.Dial("tcp", r.Host)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer to.Close()
		from, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer from.Close()
		rw.WriteString("HTTP/1.1 200 OK\r\n\r\n")
		rw.Flush()
		dialSplice(from, rw, to)
	}, opts...)
	t.Cleanup(out.CloseIdleConnections)
	return s, seen
}

func dialSplice(from net.Conn, fromR io.Reader, to net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		io.Copy(to, fromR)
		to.Close()
	}()
	io.Copy(from, to)
	from.Close()
	<-done
}

// dialSOCKS is a SOCKS5 proxy (RFC 1928) without authentication.
func dialSOCKS(t *testing.T) (addr string, seen *atomic.Int64) {
	t.Helper()
	seen = new(atomic.Int64)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	serve := func(c net.Conn) error {
		defer c.Close()
		head := make([]byte, 2)
		if _, err := io.ReadFull(c, head); err != nil {
			return err
		}
		if _, err := io.ReadFull(c, make([]byte, head[1])); err != nil {
			return err
		}
		c.Write([]byte{5, 0})
		req := make([]byte, 4)
		if _, err := io.ReadFull(c, req); err != nil {
			return err
		}
		var host string
		switch req[3] {
		case 1:
			ip := make(net.IP, 4)
			io.ReadFull(c, ip)
			host = ip.String()
		case 3:
			n := make([]byte, 1)
			io.ReadFull(c, n)
			name := make([]byte, n[0])
			io.ReadFull(c, name)
			host = string(name)
		default:
			return fmt.Errorf("address type %d", req[3])
		}
		port := make([]byte, 2)
		if _, err := io.ReadFull(c, port); err != nil {
			return err
		}
		to, err := net.Dial("tcp", net.JoinHostPort(host, strconv.Itoa(int(port[0])<<8|int(port[1]))))
		if err != nil {
			return err
		}
		defer to.Close()
		seen.Add(1)
		c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
		dialSplice(c, c, to)
		return nil
	}
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				if err := serve(c); err != nil {
					t.Errorf("SOCKS5: %v", err)
				}
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
	return ln.Addr().String(), seen
}

// Through proxies connections are tracked and their deaths survived, as
// without.
func TestDialProxies(t *testing.T) {
	cleartext, secure := newServer(t, ok, faultnet.NoTLS()), newServer(t, ok)
	for _, tt := range []struct {
		name   string
		proxy  func(t *testing.T) (string, *atomic.Int64)
		server *faultnet.Server
		proto  string
		lost   bool // with net/http
	}{
		{"http by http", func(t *testing.T) (string, *atomic.Int64) {
			s, seen := dialProxy(t, false)
			return s.URL, seen
		}, cleartext, "HTTP/1.1", false},
		{"https by http", func(t *testing.T) (string, *atomic.Int64) {
			s, seen := dialProxy(t, false)
			return s.URL, seen
		}, secure, "HTTP/2.0", true},
		{"http by https", func(t *testing.T) (string, *atomic.Int64) {
			s, seen := dialProxy(t, true)
			return s.URL, seen
		}, cleartext, "HTTP/1.1", false},
		{"https by https", func(t *testing.T) (string, *atomic.Int64) {
			s, seen := dialProxy(t, true)
			return s.URL, seen
		}, secure, "HTTP/2.0", true},
		{"http by socks5", func(t *testing.T) (string, *atomic.Int64) {
			addr, seen := dialSOCKS(t)
			return "socks5://" + addr, seen
		}, cleartext, "HTTP/1.1", false},
		{"https by socks5", func(t *testing.T) (string, *atomic.Int64) {
			addr, seen := dialSOCKS(t)
			return "socks5h://" + addr, seen
		}, secure, "HTTP/2.0", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, w := range []way{bare, owned} {
				proxy, seen := tt.proxy(t)
				u, err := url.Parse(proxy)
				if err != nil {
					t.Fatal(err)
				}
				d := new(faultnet.Dialer)
				reg := new(Registry)
				base := &http.Transport{
					Proxy:             http.ProxyURL(u),
					DialContext:       d.DialContext,
					TLSClientConfig:   secure.ClientTLS(),
					ForceAttemptHTTP2: true,
				}
				var rt http.RoundTripper = base
				if w.name == owned.name {
					rt = Options{Base: base, Registry: reg}.NewTransport()
				}
				c := &http.Client{Transport: rt}
				resp, err := c.Get(tt.server.URL)
				if err != nil {
					t.Fatalf("%s: %v", w.name, err)
				}
				drain(resp)
				if resp.Proto != tt.proto || seen.Load() != 1 {
					t.Errorf("%s: %s, the proxy saw %d", w.name, resp.Proto, seen.Load())
				}
				if w.name == owned.name && reg.Len() != 1 {
					t.Errorf("%d connections tracked", reg.Len())
				}
				failed := 0
				for range 3 {
					failWrites(d, syscall.EPIPE)
					if err := get(c, tt.server.URL); err != nil {
						failed++
						mustGet(t, c, tt.server.URL)
					}
				}
				if w.name == bare.name && tt.lost && failed == 0 {
					t.Error("net/http lost no request: has the fault been cured?")
				}
				if w.name == owned.name {
					if failed != 0 || d.Dials() != 4 {
						t.Errorf("lost %d requests, %d dials", failed, d.Dials())
					}
					eventually(t, "one tracked", func() bool { return reg.Len() == 1 })
				}
				c.CloseIdleConnections()
				d.CloseAll()
			}
		})
	}
}

// A connection that has answered is none that a server did not want, also if
// its handshake was inside a proxy: those who had it dialed are sent again.
func TestDialProxyThenReset(t *testing.T) {
	var held atomic.Int64
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hold" && held.Add(1) <= 4 {
			<-r.Context().Done()
			return
		}
		w.Write(make([]byte, 100))
	})
	proxy, _ := dialProxy(t, false)
	u, err := url.Parse(proxy.URL)
	if err != nil {
		t.Fatal(err)
	}
	d := new(faultnet.Dialer)
	c := dialClient(t, owned, &http.Transport{
		Proxy: http.ProxyURL(u), DialContext: d.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true,
	})
	t.Cleanup(d.CloseAll)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := get(c, s.URL+"/hold"); err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "all are there", func() bool { return held.Load() == 4 })
	mustGet(t, c, s.URL)
	s.ResetConns()
	wg.Wait()
}

// A proxy that says no is no dead connection.
func TestDialProxyRefuses(t *testing.T) {
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusProxyAuthRequired) }, faultnet.NoTLS())
	u, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	run := func(w way) string {
		d := new(faultnet.Dialer)
		c := dialClient(t, w, &http.Transport{Proxy: http.ProxyURL(u), DialContext: d.DialContext})
		return fmt.Sprint(get(c, "https://example.test/"), d.Dials())
	}
	want, got := run(bare), run(owned)
	if got != want {
		t.Errorf("%s\nnet/http: %s", got, want)
	}
}

func TestDialCleartext(t *testing.T) {
	for _, tt := range []struct {
		name, proto string
		opt         faultnet.ServerOption
	}{
		{"HTTP/1", "HTTP/1.1", faultnet.NoTLS()},
		{"h2c", "HTTP/2.0", faultnet.H2C()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newServer(t, ok, tt.opt)
			d := new(faultnet.Dialer)
			reg := new(Registry)
			base := &http.Transport{DialContext: d.DialContext}
			if tt.proto == "HTTP/2.0" {
				base.Protocols = new(http.Protocols)
				base.Protocols.SetUnencryptedHTTP2(true)
			}
			tr := Options{Base: base, Registry: reg}.NewTransport()
			defer d.CloseAll()
			defer tr.CloseIdleConnections()
			c := &http.Client{Transport: tr}
			for i := range 5 {
				resp, err := c.Get(s.URL)
				if err != nil {
					t.Fatal(err)
				}
				drain(resp)
				// net/http may dial twice for a request that comes before the
				// connection of the last one is in its pool.
				if resp.Proto != tt.proto || reg.Len() == 0 || d.Dials() <= i || d.Dials() > 2*i+1 {
					t.Errorf("%s, %d tracked, %d dials after %d deaths", resp.Proto, reg.Len(), d.Dials(), i)
				}
				failWrites(d, writeErrors[i%len(writeErrors)])
			}
			// A POST that cannot be had again, too: nothing was sent.
			resp, err := c.Do(request(t, "POST", s.URL, onlyReader("payload")))
			if err != nil {
				t.Fatal(err)
			}
			drain(resp)
		})
	}
}

// dialFields returns a copy of the exported fields of tr, and of what they
// point to as far as net/http changes it.
func dialFields(tr *http.Transport) map[string]string {
	fields := make(map[string]string)
	v := reflect.ValueOf(tr).Elem()
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if !f.IsExported() {
			continue
		}
		switch x := v.Field(i).Interface().(type) {
		case *tls.Config:
			if x != nil {
				fields[f.Name] = fmt.Sprintf("%p %v %v %v", x, x.NextProtos, x.ServerName, x.RootCAs != nil)
			}
		case *http.HTTP2Config:
			if x != nil {
				fields[f.Name] = fmt.Sprintf("%p %+v", x, *x)
			}
		case *http.Protocols:
			if x != nil {
				fields[f.Name] = fmt.Sprintf("%p %+v", x, *x)
			}
		case map[string]func(string, *tls.Conn) http.RoundTripper:
			var keys []string
			for k, f := range x {
				keys = append(keys, fmt.Sprintf("%s=%p", k, f))
			}
			slices.Sort(keys)
			fields[f.Name] = fmt.Sprint(x == nil, keys)
		default:
			if k := v.Field(i).Kind(); k == reflect.Func {
				fields[f.Name] = fmt.Sprint(v.Field(i).Pointer())
			} else {
				fields[f.Name] = fmt.Sprintf("%+v", x)
			}
		}
	}
	return fields
}

// Base is never changed, other than by what net/http itself fills in on it
// when it is used or cloned for the first time.
func TestBaseUnchanged(t *testing.T) {
	s := newServer(t, ok)
	for _, tt := range []struct {
		name string
		new  func() *http.Transport
	}{
		{"zero", func() *http.Transport { return &http.Transport{} }},
		{"dialers", func() *http.Transport {
			return &http.Transport{DialContext: new(net.Dialer).DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true}
		}},
		{"HTTP2", func() *http.Transport {
			return &http.Transport{TLSClientConfig: s.ClientTLS(), HTTP2: &http.HTTP2Config{PingTimeout: time.Second}, ForceAttemptHTTP2: true}
		}},
		{"Protocols", func() *http.Transport {
			p := new(http.Protocols)
			p.SetHTTP1(true)
			p.SetHTTP2(true)
			return &http.Transport{TLSClientConfig: s.ClientTLS(), Protocols: p}
		}},
		{"ConfigureTransports", func() *http.Transport {
			tr := &http.Transport{TLSClientConfig: s.ClientTLS()}
			if _, err := http2.ConfigureTransports(tr); err != nil {
				t.Fatal(err)
			}
			return tr
		}},
	} {
		for _, used := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/used=%v", tt.name, used), func(t *testing.T) {
				base := tt.new()
				defer base.CloseIdleConnections()
				if used {
					get(&http.Client{Transport: base}, s.URL)
				} else {
					base.Clone() // net/http fills in the same as at first use
				}
				before := dialFields(base)
				tr := Options{Base: base}.NewTransport()
				defer tr.CloseIdleConnections()
				get(&http.Client{Transport: tr}, s.URL)
				if after := dialFields(base); !reflect.DeepEqual(before, after) {
					t.Errorf("before\n%v\nafter\n%v", before, after)
				}
			})
		}
	}
}

// client-go's transports have been through http2.ConfigureTransports. What is
// made from one has a pool and a health check of its own.
func TestBaseConfiguredForHTTP2(t *testing.T) {
	s := newServer(t, ok)
	d := new(faultnet.Dialer)
	t.Cleanup(d.CloseAll)
	base := &http.Transport{DialContext: d.DialContext, TLSClientConfig: s.ClientTLS()}
	t2, err := http2.ConfigureTransports(base)
	if err != nil {
		t.Fatal(err)
	}
	t2.ReadIdleTimeout, t2.PingTimeout = 30*time.Second, 15*time.Second
	defer base.CloseIdleConnections()
	mustGet(t, &http.Client{Transport: base}, s.URL)
	theirs := d.Last()

	reg := new(Registry)
	var evicted atomic.Int64
	tr := Options{
		Base:     base,
		Registry: reg,
		Health:   Health{PingInterval: 100 * time.Millisecond, PingTimeout: 500 * time.Millisecond},
		Hooks:    &Hooks{ConnEvicted: func(ConnEvictedInfo) { evicted.Add(1) }},
	}.NewTransport()
	defer tr.CloseIdleConnections()
	c := &http.Client{Transport: tr}
	resp, err := c.Get(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	drain(resp)
	if resp.Proto != "HTTP/2.0" || d.Dials() != 2 || reg.Len() != 1 {
		t.Errorf("%s, %d dials, %d tracked: it rides on the original's connection", resp.Proto, d.Dials(), reg.Len())
	}
	ours := d.Last()
	ours.Blackhole()
	if err := get(c, s.URL); err != nil {
		t.Errorf("through a black hole: %v", err)
	}
	if d.Dials() != 3 {
		t.Errorf("%d dials", d.Dials())
	}
	// net/http ends the streams of a lost connection before it closes it.
	eventually(t, "the dead one is closed", ours.Closed)
	if st := tr.Stats(); st.Rescued != 1 {
		t.Errorf("stats %+v, %d evictions told", st, evicted.Load())
	}
	if theirs.Closed() {
		t.Error("the original's connection was closed")
	}
	mustGet(t, &http.Client{Transport: base}, s.URL)
	if d.Dials() != 3 {
		t.Errorf("%d dials: the original has lost its connection", d.Dials())
	}
}

// A handshake that net/http runs, and that we wait for, ends well even if
// CloseIdleConnections comes at its end, when its request has been served.
func TestDialThenCloseIdle(t *testing.T) {
	s := newServer(t, ok)
	d := new(faultnet.Dialer)
	c := owned.client(t, d, s.ClientTLS())
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				c.CloseIdleConnections()
			}
		}
	})
	for range 40 {
		if err := get(c, s.URL); err != nil {
			t.Errorf("%v", err)
			break
		}
	}
	close(stop)
	wg.Wait()
}
