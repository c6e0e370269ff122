package deadconn

import (
	"bufio"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// A play is a Peer whose first connection answers one request well and then
// does to the next, on its stream id, what the test is about. Everything else
// is answered well.
type play struct {
	*faultnet.Peer
	mu   sync.Mutex
	seen map[string]int // requests, by method
}

func newPlay(t *testing.T, fault func(c *faultnet.PeerConn, id uint32)) *play {
	t.Helper()
	p := &play{seen: make(map[string]int)}
	p.Peer = newPeer(t, scripted(func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
		if _, err := c.ReadBody(r.StreamID); err != nil {
			return
		}
		p.mu.Lock()
		p.seen[r.Method]++
		p.mu.Unlock()
		if c.N == 0 && r.StreamID == 3 {
			fault(c, r.StreamID)
			return
		}
		respond(c, r)
	}))
	return p
}

func (p *play) count(method string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen[method]
}

// act sends the two requests, the second with method, and returns its error.
func (p *play) act(t *testing.T, w way, method string, set func(*http.Transport)) (*http.Client, error) {
	t.Helper()
	d := new(faultnet.Dialer)
	c := way{w.name, func(b *http.Transport) http.RoundTripper {
		set(b)
		return w.new(b)
	}}.client(t, d, p.ClientTLS())
	warm := request(t, "OPTIONS", p.URL(), nil) // a method of its own, for the count
	resp, err := c.Transport.RoundTrip(warm)
	if err != nil {
		t.Fatal(err)
	}
	drain(resp)
	var body io.Reader
	if method != "GET" {
		body = newString("payload")
	}
	if resp, err = c.Transport.RoundTrip(request(t, method, p.URL(), body)); err == nil {
		err = drain(resp)
	}
	return c, err
}

func noChange(*http.Transport) {}

// quickPings make net/http find out within a third of a second.
func quickPings(b *http.Transport) {
	b.HTTP2 = &http.HTTP2Config{SendPingTimeout: 50 * time.Millisecond, PingTimeout: 250 * time.Millisecond}
}

// The peer ends a connection that has a request in flight. An idempotent one
// is rescued, a POST is not repeated and gets net/http's own error.
func TestConnectionEndsInFlight(t *testing.T) {
	for _, tt := range []struct {
		name  string
		fault func(c *faultnet.PeerConn, id uint32)
		set   func(*http.Transport)
	}{
		{"FIN", func(c *faultnet.PeerConn, _ uint32) { c.FIN() }, noChange},
		{"RST", func(c *faultnet.PeerConn, _ uint32) { c.RST() }, noChange},
		{"GOAWAY then close", goAwayAndFIN(3, http2.ErrCodeNo, "max_age"), noChange},
		{"GOAWAY INTERNAL_ERROR then close", goAwayAndFIN(3, http2.ErrCodeInternal, ""), noChange},
		{"garbage", func(c *faultnet.PeerConn, _ uint32) { c.Garbage() }, noChange},
		{"garbage in TLS", func(c *faultnet.PeerConn, _ uint32) { c.GarbageFrame() }, noChange},
		{"DATA on stream 0", func(c *faultnet.PeerConn, _ uint32) { c.DataOnStream0() }, noChange},
		{"lost PING", func(c *faultnet.PeerConn, _ uint32) { c.Silence() }, quickPings},
	} {
		for _, method := range []string{"GET", "PUT", "POST"} {
			t.Run(tt.name+"/"+method, func(t *testing.T) {
				want := newPlay(t, tt.fault)
				_, wantErr := want.act(t, bare, method, tt.set)
				if wantErr == nil {
					t.Error("net/http lost nothing: has the fault been cured?")
				}
				for _, w := range ours {
					p := newPlay(t, tt.fault)
					c, err := p.act(t, w, method, tt.set)
					if method == "POST" {
						if err == nil || p.count("POST") != 1 {
							t.Errorf("%s: the POST ran %d times: %v", w.name, p.count("POST"), err)
						}
						if Classify(err) != Classify(wantErr) {
							t.Errorf("%s: err = %v, want as from net/http: %v", w.name, err, wantErr)
						}
					} else if err != nil || p.count(method) != 2 {
						t.Errorf("%s: sent %d times: %v", w.name, p.count(method), err)
					}
					// One that net/http has closed by itself need not be counted.
					if st := stats(c); st.Evicted > 1 {
						t.Errorf("%s: %+v, want one eviction", w.name, st)
					}
				}
			})
		}
	}
}

// A graceful GOAWAY: the older streams finish, new requests go elsewhere, and
// the connection is not ours to close.
func TestGracefulGoAway(t *testing.T) {
	for _, w := range ours {
		t.Run(w.name, func(t *testing.T) {
			older := make(chan *faultnet.PeerConn, 1)
			var going atomic.Pointer[faultnet.PeerConn]
			p := newPeer(t, scripted(func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
				switch {
				case r.Path == "/older":
					going.Store(c)
					c.GoAway(r.StreamID, http2.ErrCodeNo, "")
					older <- c
				case going.Load() != c: // else it was sent before the GOAWAY came in
					respond(c, r)
				}
			}))
			d := new(faultnet.Dialer)
			c := w.client(t, d, p.ClientTLS())
			done := make(chan error, 1)
			go func() { done <- get(c, p.URL()+"/older") }()
			oldConn := <-older
			// net/http has to have read the GOAWAY. It has when the requests
			// go to the second connection.
			eventually(t, "a second connection", func() bool {
				mustGet(t, c, p.URL())
				return p.Conns() > 1
			})
			for range 10 {
				mustGet(t, c, p.URL())
			}
			oldConn.Respond(1, 200, "at last")
			if err := <-done; err != nil {
				t.Errorf("the older request: %v", err)
			}
			if st := stats(c); st.Evicted+st.Rescued+st.Lost != 0 || p.Conns() != 2 {
				t.Errorf("%d connections, want 2; %+v", p.Conns(), st)
			}
		})
	}
}

// Requests that a draining server did not take are sent elsewhere, a POST too:
// that is net/http's doing where the body can be had again, and ours where it
// cannot.
func TestGracefulGoAwayUnprocessed(t *testing.T) {
	fault := func(c *faultnet.PeerConn, id uint32) { c.GoAway(1, http2.ErrCodeNo, "") }
	for _, w := range ours {
		for _, method := range []string{"GET", "POST"} {
			p := newPlay(t, fault)
			c, err := p.act(t, w, method, noChange)
			if err != nil || p.count(method) != 2 {
				t.Errorf("%s: %s was sent %d times: %v", w.name, method, p.count(method), err)
			}
			if st := stats(c); st.Evicted != 0 {
				t.Errorf("%s: %s: %+v, want no eviction", w.name, method, st)
			}
		}
	}
}

// One stream fails, or one request: the connection stays, and the caller gets
// what net/http returns.
func TestStreamErrorsKeepTheConnection(t *testing.T) {
	reset := func(code http2.ErrCode) func(*faultnet.PeerConn, uint32) {
		return func(c *faultnet.PeerConn, id uint32) { c.Reset(id, code) }
	}
	status := func(code int) func(*faultnet.PeerConn, uint32) {
		return func(c *faultnet.PeerConn, id uint32) { c.Respond(id, code, "") }
	}
	for _, tt := range []struct {
		name  string
		fault func(c *faultnet.PeerConn, id uint32)
	}{
		{"REFUSED_STREAM", reset(http2.ErrCodeRefusedStream)}, // net/http sends it again
		{"CANCEL", reset(http2.ErrCodeCancel)},
		{"INTERNAL_ERROR", reset(http2.ErrCodeInternal)},
		{"ENHANCE_YOUR_CALM", reset(http2.ErrCodeEnhanceYourCalm)},
		{"HTTP_1_1_REQUIRED", reset(http2.ErrCodeHTTP11Required)},
		{"500", status(500)},
		{"503", status(503)},
		{"429", status(429)},
	} {
		for _, method := range []string{"GET", "POST"} {
			t.Run(tt.name+"/"+method, func(t *testing.T) {
				want := newPlay(t, tt.fault)
				_, wantErr := want.act(t, bare, method, noChange)
				for _, w := range ours {
					p := newPlay(t, tt.fault)
					c, err := p.act(t, w, method, noChange)
					if (err == nil) != (wantErr == nil) || err != nil && err.Error() != wantErr.Error() {
						t.Errorf("%s: err = %v, want as from net/http: %v", w.name, err, wantErr)
					}
					if p.count(method) != want.count(method) {
						t.Errorf("%s: sent %d times, by net/http %d", w.name, p.count(method), want.count(method))
					}
					mustGet(t, c, p.URL())
					if st := stats(c); p.Conns() != 1 || st.Evicted+st.Rescued+st.Lost != 0 {
						t.Errorf("%s: %d connections, want the same; %+v", w.name, p.Conns(), st)
					}
				}
			})
		}
	}
}

// A server that asks for calm gets it: nothing is sent again at once.
func TestEnhanceYourCalm(t *testing.T) {
	for _, w := range ours {
		p := newPlay(t, goAwayAndFIN(3, http2.ErrCodeEnhanceYourCalm, "too_many_pings"))
		c, err := p.act(t, w, "GET", noChange)
		if Classify(err) != KindGoAwayCalm || p.count("GET") != 1 {
			t.Errorf("%s: sent %d times, err = %v", w.name, p.count("GET"), err)
		}
		if st := stats(c); st.Evicted > 1 || st.Rescued+st.Lost != 0 {
			t.Errorf("%s: %+v", w.name, st)
		}
		mustGet(t, c, p.URL()) // a request of the caller's own is another matter
	}
}

// A server that does not want us says so on a new connection, each time in
// another way. Sending again would meet the same (golang/go#76671): there are
// as many connections as with net/http alone.
func TestRefusedOnFirstUse(t *testing.T) {
	const runs = 20
	tlsThen := func(protocol string, then func(c *tls.Conn)) func(*testing.T) (string, *tls.Config, func() int) {
		return func(t *testing.T) (string, *tls.Config, func() int) {
			var conns atomic.Int32
			cfg := new(tls.Config)
			s := newServer(t, ok, faultnet.Configure(func(srv *http.Server) { cfg.Certificates = srv.TLSConfig.Certificates }))
			cfg.NextProtos = []string{protocol}
			ln := listen(t, func(c net.Conn, _ int) {
				conns.Add(1)
				tc := tls.Server(c, cfg)
				if tc.Handshake() == nil {
					then(tc)
				}
			})
			return "https://" + ln.Addr().String(), s.ClientTLS(), func() int { return int(conns.Load()) }
		}
	}
	rst := func(c *tls.Conn) {
		c.NetConn().(*net.TCPConn).SetLinger(0)
		c.NetConn().Close()
	}
	// As on a busy machine: the server's end is there before the request is
	// written, and the connection has been at rest for a while.
	slow := &httptrace.ClientTrace{TLSHandshakeDone: func(tls.ConnectionState, error) { time.Sleep(3 * quietSpell) }}
	for _, tt := range []struct {
		name  string
		start func(t *testing.T) (url string, cfg *tls.Config, conns func() int)
	}{
		{"client certificate HTTP/2", func(t *testing.T) (string, *tls.Config, func() int) {
			s := newServer(t, ok, faultnet.RequireClientCert())
			return s.URL, s.ClientTLS(), s.Conns
		}},
		{"client certificate HTTP/1.1", func(t *testing.T) (string, *tls.Config, func() int) {
			s := newServer(t, ok, faultnet.RequireClientCert(), faultnet.HTTP1Only())
			return s.URL, s.ClientTLS(), s.Conns
		}},
		{"FIN after the handshake, HTTP/2", tlsThen("h2", func(c *tls.Conn) { c.Close() })},
		{"RST after the handshake, HTTP/2", tlsThen("h2", rst)},
		{"FIN after the handshake, HTTP/1.1", tlsThen("http/1.1", func(c *tls.Conn) { c.Close() })},
		{"RST after the handshake, HTTP/1.1", tlsThen("http/1.1", rst)},
		{"FIN instead of a handshake", func(t *testing.T) (string, *tls.Config, func() int) {
			var conns atomic.Int32
			ln := listen(t, func(c net.Conn, _ int) {
				conns.Add(1)
				c.Read(make([]byte, 5))
			})
			return "https://" + ln.Addr().String(), &tls.Config{}, func() int { return int(conns.Load()) }
		}},
		{"FIN on the request, HTTP/1.1", func(t *testing.T) (string, *tls.Config, func() int) {
			var conns atomic.Int32
			ln := listen(t, func(c net.Conn, _ int) {
				conns.Add(1)
				http.ReadRequest(bufio.NewReader(c))
			})
			return "http://" + ln.Addr().String(), nil, func() int { return int(conns.Load()) }
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			count := func(t *testing.T, w way, method string) int {
				url, cfg, conns := tt.start(t)
				for range runs {
					d := new(faultnet.Dialer)
					c := w.client(t, d, cfg)
					req := request(t, method, url, nil)
					resp, err := c.Transport.RoundTrip(req.WithContext(httptrace.WithClientTrace(t.Context(), slow)))
					if err == nil {
						drain(resp)
						t.Errorf("%s: %s: no error", w.name, method)
					}
					d.CloseAll()
				}
				return conns()
			}
			for _, w := range ours {
				t.Run(w.name, func(t *testing.T) {
					for _, method := range []string{"GET", "POST"} {
						want := count(t, bare, method)
						// net/http may dial beside the first connection.
						if got := count(t, w, method); got < want || got > want+2 {
							t.Errorf("%s: %d connections for %d requests, net/http makes %d", method, got, runs, want)
						}
					}
				})
			}
		})
	}
}

// Over HTTP/1.1, where net/http does much by itself, no request fails that
// does not fail without us, and none is repeated that may not be.
func TestHTTP1NeverWorse(t *testing.T) {
	for _, tt := range []struct {
		name  string
		after int // requests answered well before
		end   func(net.Conn)
	}{
		{"first use, FIN", 0, closeConn},
		{"first use, RST", 0, resetConn},
		{"first use, half a header", 0, func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nA: ") }},
		{"reused, FIN", 1, closeConn},
		{"reused, RST", 1, resetConn},
		{"reused, half a header", 1, func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nA: ") }},
	} {
		for _, method := range []string{"GET", "PUT", "POST"} {
			t.Run(tt.name+"/"+method, func(t *testing.T) {
				run := func(w way) (runs int32, dials int, err error) {
					var n, served atomic.Int32
					ln := listen(t, func(c net.Conn, _ int) {
						br := bufio.NewReader(c)
						for {
							req, err := http.ReadRequest(br)
							if err != nil {
								return
							}
							io.Copy(io.Discard, req.Body)
							if req.Method == method {
								n.Add(1)
							}
							if int(served.Add(1)) == tt.after+1 {
								tt.end(c)
								return
							}
							io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
						}
					})
					url := "http://" + ln.Addr().String()
					d := new(faultnet.Dialer)
					c := w.client(t, d, nil)
					for range tt.after {
						resp, err := c.Transport.RoundTrip(request(t, "OPTIONS", url, nil))
						if err != nil {
							t.Fatal(err)
						}
						drain(resp)
					}
					resp, err := c.Transport.RoundTrip(request(t, method, url, newString("payload")))
					if err == nil {
						err = drain(resp)
					}
					return n.Load(), d.Dials(), err
				}
				wantRuns, wantDials, wantErr := run(bare)
				for _, w := range ours {
					runs, dials, err := run(w)
					if err != nil && wantErr == nil {
						t.Errorf("%s: %v; net/http has no error", w.name, err)
					}
					if method == "POST" || tt.after == 0 {
						if runs != wantRuns || dials != wantDials || Classify(err) != Classify(wantErr) {
							t.Errorf("%s: ran %d times, %d dials, %v; net/http: %d, %d, %v", w.name, runs, dials, err, wantRuns, wantDials, wantErr)
						}
					} else if err != nil || runs > 2 {
						t.Errorf("%s: ran %d times, %v", w.name, runs, err)
					}
				}
			})
		}
	}
}
