package deadconn

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// The clauses of the http.RoundTripper contract, and of RoundTrip's own
// comment, one small test each.

var protocols = []struct {
	name string
	opts []faultnet.ServerOption
}{
	{"HTTP/2", nil},
	{"HTTP/1.1", []faultnet.ServerOption{faultnet.HTTP1Only()}},
}

// everyWay runs f for both ways, over both protocols.
func everyWay(t *testing.T, f func(t *testing.T, w way, opts []faultnet.ServerOption)) {
	for _, w := range ours {
		for _, p := range protocols {
			t.Run(w.name+"/"+p.name, func(t *testing.T) { f(t, w, p.opts) })
		}
	}
}

// stats are those of the Transport in c.
func stats(c *http.Client) Stats { return c.Transport.(*Transport).Stats() }

// A countedBody counts how often it is closed.
type countedBody struct {
	io.Reader
	closed atomic.Int32
}

func (b *countedBody) Close() error {
	b.closed.Add(1)
	return nil
}

// A fakeBase is a base without connections, such as other people's tests have.
type fakeBase struct {
	answer func(n int, req *http.Request) (*http.Response, error) // n counts from 1

	mu    sync.Mutex
	calls int
	idle  int // calls of CloseIdleConnections
}

func (f *fakeBase) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body != nil {
		io.Copy(io.Discard, req.Body)
		req.Body.Close()
	}
	f.mu.Lock()
	f.calls++
	n := f.calls
	f.mu.Unlock()
	return f.answer(n, req)
}

func (f *fakeBase) CloseIdleConnections() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.idle++
}

func alwaysFails(err error) *fakeBase {
	return &fakeBase{answer: func(int, *http.Request) (*http.Response, error) { return nil, err }}
}

// failsOnce answers the second call.
func failsOnce(err error) *fakeBase {
	return &fakeBase{answer: func(n int, req *http.Request) (*http.Response, error) {
		if n == 1 {
			return nil, err
		}
		return &http.Response{StatusCode: 200, Body: http.NoBody, Request: req}, nil
	}}
}

// RoundTrip does not change the request, whatever becomes of it.
func TestRequestUnchanged(t *testing.T) {
	everyWay(t, func(t *testing.T, w way, opts []faultnet.ServerOption) {
		s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			w.WriteHeader(http.StatusTeapot)
		}, opts...)
		d := new(faultnet.Dialer)
		c := w.client(t, d, s.ClientTLS())
		for _, tt := range []struct {
			name  string
			fault func()
		}{
			{"success", func() {}},
			{"retry", func() { failWrites(d, net.ErrClosed) }},
			{"failure", func() {
				failWrites(d, net.ErrClosed)
				d.SetErr(errors.New("no route"))
			}},
		} {
			for _, body := range []func() io.Reader{
				func() io.Reader { return nil },
				func() io.Reader { return http.NoBody },
				func() io.Reader { return newString("payload") },
				func() io.Reader { return onlyReader("payload") },
			} {
				req := request(t, "PUT", s.URL, body())
				req.Header.Set("Accept", "*/*")
				if hasBody(req) { // without, net/http hangs over HTTP/2
					req.Trailer = http.Header{"X-Sum": nil}
				}
				before := *req
				header, trailer, u := req.Header.Clone(), req.Trailer.Clone(), *req.URL
				tt.fault()
				resp, err := c.Transport.RoundTrip(req)
				if err == nil {
					if resp.Request != req {
						t.Errorf("%s: Response.Request is not the caller's", tt.name)
					}
					drain(resp)
				}
				after := *req
				if reflect.ValueOf(before.GetBody).Pointer() != reflect.ValueOf(after.GetBody).Pointer() {
					t.Errorf("%s: GetBody has changed", tt.name)
				}
				before.GetBody, after.GetBody = nil, nil // not comparable
				if before.Body != after.Body || before.Context() != after.Context() || !reflect.DeepEqual(before, after) {
					t.Errorf("%s: the request has changed: %+v, was %+v", tt.name, after, before)
				}
				if !reflect.DeepEqual(header, req.Header) || !reflect.DeepEqual(trailer, req.Trailer) || u != *req.URL {
					t.Errorf("%s: the request has changed deep inside: %+v", tt.name, after)
				}
			}
			d.SetErr(nil)
			mustGet(t, c, s.URL)
		}
	})
}

// The body is closed exactly once, on every way out.
func TestBodyClosedOnce(t *testing.T) {
	plain := func(t *testing.T, url string, b io.ReadCloser) *http.Request {
		req := request(t, "POST", url, nil)
		req.Body, req.ContentLength = b, -1
		return req
	}
	kill := func(d *faultnet.Dialer) { failWrites(d, syscall.EPIPE) }
	for _, tt := range []struct {
		name    string
		path    string
		request func(req *http.Request) *http.Request // changes it
		rewind  bool                                  // there is a GetBody
		fault   func(d *faultnet.Dialer)
		fails   bool
	}{
		{name: "success"},
		{name: "an answer before the body was read", path: "/early"},
		{name: "the server gives up", path: "/kill", fails: true},
		{name: "retry of an unread body", fault: kill},
		{name: "retry by GetBody", path: "/kill-once", rewind: true, request: func(r *http.Request) *http.Request {
			r.Method = "PUT"
			return r
		}},
		{name: "retry fails", path: "/kill", rewind: true, fails: true, request: func(r *http.Request) *http.Request {
			r.Method = "PUT"
			return r
		}},
		{name: "retry cannot dial", rewind: true, fails: true, fault: func(d *faultnet.Dialer) {
			kill(d)
			d.SetErr(errors.New("no route"))
		}},
		{name: "GetBody fails", path: "/kill", fails: true, request: func(r *http.Request) *http.Request {
			r.Method = "PUT"
			r.GetBody = func() (io.ReadCloser, error) { return nil, errors.New("cannot be had again") }
			return r
		}},
		{name: "the caller's context has ended", fails: true, request: func(r *http.Request) *http.Request {
			ctx, cancel := context.WithCancel(r.Context())
			cancel()
			return r.WithContext(ctx)
		}},
		{name: "the caller's reader fails", fails: true, request: func(r *http.Request) *http.Request {
			r.Body.(*countedBody).Reader = fails{net.ErrClosed}
			return r
		}},
		{name: "no URL", fails: true, request: func(r *http.Request) *http.Request {
			r.URL = nil
			return r
		}},
		{name: "no header", fails: true, request: func(r *http.Request) *http.Request {
			r.Header = nil
			return r
		}},
		{name: "no host", fails: true, request: func(r *http.Request) *http.Request {
			r.URL = &url.URL{Scheme: "https"}
			return r
		}},
		{name: "bad scheme", fails: true, request: func(r *http.Request) *http.Request {
			r.URL.Scheme = "gopher"
			return r
		}},
		{name: "bad header", fails: true, request: func(r *http.Request) *http.Request {
			r.Header["X"] = []string{"\n"}
			return r
		}},
		{name: "no dial", fails: true, request: func(r *http.Request) *http.Request {
			r.URL.Host = "127.0.0.1:1" // reserved, and nothing else is needed
			return r
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			everyWay(t, func(t *testing.T, w way, opts []faultnet.ServerOption) {
				var killed atomic.Bool
				var s *faultnet.Server
				s = newServer(t, func(w http.ResponseWriter, r *http.Request) {
					switch {
					case r.URL.Path == "/early":
						w.WriteHeader(http.StatusForbidden)
						return
					case r.URL.Path == "/kill", r.URL.Path == "/kill-once" && killed.CompareAndSwap(false, true):
						io.Copy(io.Discard, r.Body)
						s.KillConns()
						hang(w, r)
					}
					io.Copy(io.Discard, r.Body)
				}, opts...)
				d := new(faultnet.Dialer)
				c := w.client(t, d, s.ClientTLS())
				mustGet(t, c, s.URL)

				var bodies []*countedBody
				body := func() *countedBody {
					bodies = append(bodies, &countedBody{Reader: onlyReader("payload")})
					return bodies[len(bodies)-1]
				}
				req := plain(t, s.URL+tt.path, body())
				if tt.rewind {
					req.GetBody = func() (io.ReadCloser, error) { return body(), nil }
				}
				if tt.request != nil {
					req = tt.request(req)
				}
				if tt.fault != nil {
					tt.fault(d)
				}
				resp, err := c.Transport.RoundTrip(req)
				// Without the bytes that left, a wrapper cannot know that a
				// POST was not sent.
				mayFail := tt.fails || w.name == wrapped.name && tt.fault != nil
				if err != nil && !mayFail {
					t.Error(err)
				}
				if err == nil {
					drain(resp)
					if tt.fails {
						t.Error("no error")
					}
				}
				for i, b := range bodies {
					eventually(t, "the body is closed", func() bool { return b.closed.Load() > 0 })
					defer func() { // once all is over
						if n := b.closed.Load(); n != 1 {
							t.Errorf("body %d was closed %d times", i, n)
						}
					}()
				}
				d.CloseAll()
				c.CloseIdleConnections()
				eventually(t, "nothing is open", func() bool { return d.Open() == 0 })
			})
		})
	}
}

// A response's body arrives as it is sent, and its trailers after it.
func TestResponseStreaming(t *testing.T) {
	everyWay(t, func(t *testing.T, w way, opts []faultnet.ServerOption) {
		next := make(chan struct{})
		s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Trailer", "X-Sum")
			for _, part := range []string{"one ", "two ", "three"} {
				io.WriteString(w, part)
				w.(http.Flusher).Flush()
				select {
				case <-next:
				case <-r.Context().Done():
				}
			}
			w.Header().Set("X-Sum", "3")
		}, opts...)
		c := w.client(t, new(faultnet.Dialer), s.ClientTLS())
		resp, err := c.Get(s.URL)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		for _, part := range []string{"one ", "two ", "three"} {
			p := make([]byte, len(part))
			if _, err := io.ReadFull(resp.Body, p); err != nil || string(p) != part {
				t.Fatalf("read %q, %v; want %q", p, err, part)
			}
			next <- struct{}{}
		}
		if n, err := resp.Body.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("after the end: %d, %v", n, err)
		}
		if got := resp.Trailer.Get("X-Sum"); got != "3" {
			t.Errorf("the trailer is %q, want 3", got)
		}
	})
}

// What the caller's trace is told, and how often, is what net/http tells.
func TestCallersTrace(t *testing.T) {
	for _, p := range protocols {
		run := func(t *testing.T, w way) (first, second map[string]int) {
			s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Link", "</style.css>")
				w.WriteHeader(http.StatusEarlyHints)
				io.Copy(io.Discard, r.Body)
				io.WriteString(w, "ok")
			}, p.opts...)
			c := w.client(t, new(faultnet.Dialer), s.ClientTLS())
			for _, events := range []*map[string]int{&first, &second} {
				var mu sync.Mutex
				*events = make(map[string]int)
				count := func(what string) {
					mu.Lock()
					defer mu.Unlock()
					(*events)[what]++
				}
				req := request(t, "POST", s.URL, newString("payload"))
				req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
					GetConn:              func(hostPort string) { count("GetConn " + hostPort[:3]) },
					GotConn:              func(i httptrace.GotConnInfo) { count(fmt.Sprintf("GotConn %T reused=%v", i.Conn, i.Reused)) },
					GotFirstResponseByte: func() { count("GotFirstResponseByte") },
					Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
						count(fmt.Sprint("Got1xxResponse ", code, h))
						return nil
					},
					ConnectStart:      func(network, addr string) { count("ConnectStart") },
					ConnectDone:       func(network, addr string, err error) { count(fmt.Sprint("ConnectDone ", err)) },
					TLSHandshakeStart: func() { count("TLSHandshakeStart") },
					TLSHandshakeDone: func(cs tls.ConnectionState, err error) {
						count(fmt.Sprint("TLSHandshakeDone ", cs.NegotiatedProtocol, err))
					},
					WroteHeaders:     func() { count("WroteHeaders") },
					WroteHeaderField: func(key string, value []string) { count("WroteHeaderField " + key) },
					WroteRequest:     func(i httptrace.WroteRequestInfo) { count(fmt.Sprint("WroteRequest ", i.Err)) },
				}))
				resp, err := c.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				drain(resp)
				mu.Lock()
				*events = maps.Clone(*events)
				mu.Unlock()
			}
			return first, second
		}
		t.Run(p.name, func(t *testing.T) {
			want1, want2 := run(t, bare)
			if len(want1) < 10 {
				t.Fatalf("net/http tells only %v", want1)
			}
			for _, w := range ours {
				got1, got2 := run(t, w)
				if !maps.Equal(got1, want1) {
					t.Errorf("%s: on a new connection:\n%v, want\n%v", w.name, got1, want1)
				}
				if !maps.Equal(got2, want2) {
					t.Errorf("%s: on a used connection:\n%v, want\n%v", w.name, got2, want2)
				}
			}
		})
	}
}

// An answer of 101 hands over the connection, both ways and half-closed.
func TestUpgrade(t *testing.T) {
	for _, p := range protocols {
		for _, w := range ours {
			for _, token := range []string{"websocket", "echo"} {
				if token != "websocket" && p.name == "HTTP/2" {
					continue // net/http sends it over HTTP/2, where it means nothing
				}
				t.Run(p.name+"/"+w.name+"/"+token, func(t *testing.T) {
					s := newServer(t, upgrade, p.opts...)
					d := new(faultnet.Dialer)
					c := w.client(t, d, s.ClientTLS())
					req := request(t, "GET", s.URL, nil)
					req.Header.Set("Connection", "Upgrade")
					req.Header.Set("Upgrade", token)
					resp, err := c.Do(req)
					if err != nil {
						t.Fatal(err)
					}
					rwc, ok := resp.Body.(io.ReadWriteCloser)
					if resp.StatusCode != http.StatusSwitchingProtocols || !ok {
						t.Fatalf("%s, body %T", resp.Status, resp.Body)
					}
					defer rwc.Close()
					io.WriteString(rwc, "hello")
					if err := rwc.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
						t.Fatal(err)
					}
					if b, err := io.ReadAll(rwc); err != nil || string(b) != "hello" {
						t.Errorf("echo: %q, %v", b, err)
					}
				})
			}
		}
	}
}

// upgrade echoes what comes over an upgraded connection until its end.
func upgrade(w http.ResponseWriter, r *http.Request) {
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer c.Close()
	fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", r.Header.Get("Upgrade"))
	io.Copy(c, rw)
}

// A request to leave HTTP is sent once, whatever comes of it.
func TestUpgradeIsNotRetried(t *testing.T) {
	for _, err := range []error{errDead, errors.New("http2: client conn could not be established")} {
		upgrade := request(t, "GET", "https://example.test/", nil)
		upgrade.Header.Set("Connection", "keep-alive, Upgrade")
		upgrade.Header.Set("Upgrade", "websocket")
		for _, req := range []*http.Request{upgrade, request(t, "CONNECT", "https://example.test/", nil)} {
			base := failsOnce(err)
			if _, got := Wrap(base).RoundTrip(req); got != err || base.calls != 1 {
				t.Errorf("%s: %d attempts, %v", req.Method, base.calls, got)
			}
		}
	}
}

// A timeout of http.Client's is what it is without us.
func TestClientTimeout(t *testing.T) {
	everyWay(t, func(t *testing.T, w way, opts []faultnet.ServerOption) {
		s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/slow" {
				hang(w, r)
			}
		}, opts...)
		c := w.client(t, new(faultnet.Dialer), s.ClientTLS())
		mustGet(t, c, s.URL)
		c.Timeout = 20 * time.Millisecond
		err := get(c, s.URL+"/slow")
		var ne net.Error
		if !errors.As(err, &ne) || !ne.Timeout() || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("err = %v, want a timeout", err)
		}
		if st := stats(c); st.Evicted+st.Rescued+st.Lost != 0 {
			t.Errorf("a slow server cost something: %+v", st)
		}
	})
}

// The end of a request by its caller comes back as it does without us, even
// if its cause reads like, or is, the error of a dead connection.
func TestCallerCancels(t *testing.T) {
	dead := &net.OpError{Op: "write", Net: "tcp", Err: net.ErrClosed}
	for _, p := range protocols {
		for _, tt := range []struct {
			name   string
			cancel func(req *http.Request, arrived <-chan struct{}) *http.Request
		}{
			{"before", func(req *http.Request, _ <-chan struct{}) *http.Request {
				ctx, cancel := context.WithCancel(req.Context())
				cancel()
				return req.WithContext(ctx)
			}},
			{"before, cause", func(req *http.Request, _ <-chan struct{}) *http.Request {
				ctx, cancel := context.WithCancelCause(req.Context())
				cancel(dead)
				return req.WithContext(ctx)
			}},
			{"in flight", func(req *http.Request, arrived <-chan struct{}) *http.Request {
				ctx, cancel := context.WithCancel(req.Context())
				go func() {
					<-arrived
					cancel()
				}()
				return req.WithContext(ctx)
			}},
			{"in flight, cause", func(req *http.Request, arrived <-chan struct{}) *http.Request {
				ctx, cancel := context.WithCancelCause(req.Context())
				go func() {
					<-arrived
					cancel(dead)
				}()
				return req.WithContext(ctx)
			}},
			{"Request.Cancel before", func(req *http.Request, _ <-chan struct{}) *http.Request {
				ch := make(chan struct{})
				close(ch)
				req.Cancel = ch
				return req
			}},
			{"Request.Cancel in flight", func(req *http.Request, arrived <-chan struct{}) *http.Request {
				ch := make(chan struct{})
				req.Cancel = ch
				go func() {
					<-arrived
					close(ch)
				}()
				return req
			}},
		} {
			t.Run(p.name+"/"+tt.name, func(t *testing.T) {
				run := func(w way) (err error, runs int32, c *http.Client) {
					var n atomic.Int32
					arrived := make(chan struct{}, 8)
					s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
						if r.Method == "GET" && r.URL.Path == "/slow" {
							n.Add(1)
							arrived <- struct{}{}
							hang(w, r)
						}
					}, p.opts...)
					c = w.client(t, new(faultnet.Dialer), s.ClientTLS())
					mustGet(t, c, s.URL)
					resp, err := c.Transport.RoundTrip(tt.cancel(request(t, "GET", s.URL+"/slow", nil), arrived))
					if err == nil {
						drain(resp)
					}
					return err, n.Load(), c
				}
				want, _, _ := run(bare)
				if want == nil {
					t.Fatal("no error from net/http")
				}
				// Which of two texts net/http has is a race in it.
				text := func(err error) string {
					return strings.TrimSuffix(err.Error(), " while waiting for connection")
				}
				for _, w := range ours {
					got, runs, c := run(w)
					if got == nil || text(got) != text(want) || reflect.TypeOf(got) != reflect.TypeOf(want) || (got == dead) != (want == dead) {
						t.Errorf("%s: %v (%T), want %v (%T)", w.name, got, got, want, want)
					}
					if st := stats(c); st.Evicted+st.Rescued+st.Lost != 0 || runs > 1 {
						t.Errorf("%s: %d runs; %+v", w.name, runs, st)
					}
				}
			})
		}
	}
}

// A body that reads from a dead connection of its own fails as that
// connection does. The error is the caller's (DESIGN fact 10).
func TestCallersBodyFails(t *testing.T) {
	for _, p := range protocols {
		for _, cause := range []error{
			errors.New("some error"),
			net.ErrClosed,
			&net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET},
			io.ErrUnexpectedEOF,
			errors.New("http2: client connection lost"),
		} {
			t.Run(p.name+"/"+cause.Error(), func(t *testing.T) {
				run := func(w way) (err error, runs int32, dials int, c *http.Client) {
					var n atomic.Int32
					s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
						if r.Method == "PUT" {
							n.Add(1)
							io.Copy(io.Discard, r.Body)
							hang(w, r)
						}
					}, p.opts...)
					d := new(faultnet.Dialer)
					c = w.client(t, d, s.ClientTLS())
					mustGet(t, c, s.URL)
					// One byte first, so that the request has begun.
					req := request(t, "PUT", s.URL, io.MultiReader(strings.NewReader("x"), fails{cause}))
					req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(newString("again")), nil }
					resp, err := c.Transport.RoundTrip(req)
					if err == nil {
						drain(resp)
					}
					return err, n.Load(), d.Dials(), c
				}
				want, _, wantDials, _ := run(bare)
				if !errors.Is(want, cause) {
					t.Fatalf("net/http returned %v", want)
				}
				for _, w := range ours {
					got, runs, dials, c := run(w)
					if !errors.Is(got, cause) || reflect.TypeOf(got) != reflect.TypeOf(want) {
						t.Errorf("%s: %v (%T), want %v (%T)", w.name, got, got, want, want)
					}
					if st := stats(c); st.Evicted+st.Rescued+st.Lost != 0 || runs > 1 || dials != wantDials {
						t.Errorf("%s: %d runs, %d dials, want %d; %+v", w.name, runs, dials, wantDials, st)
					}
				}
			})
		}
	}
}

// With Expect: 100-continue the body goes when the server asks for it.
func TestExpectContinue(t *testing.T) {
	for _, w := range []way{
		bare,
		{"Wrap", func(b *http.Transport) http.RoundTripper { return Wrap(b) }},
		owned,
	} {
		for _, p := range protocols {
			for _, path := range []string{"/wanted", "/refused"} {
				t.Run(w.name+"/"+p.name+path, func(t *testing.T) {
					s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
						if r.URL.Path == "/refused" {
							w.WriteHeader(http.StatusExpectationFailed)
							return
						}
						io.Copy(w, r.Body)
					}, p.opts...)
					d := new(faultnet.Dialer)
					rt := w.new(&http.Transport{DialContext: d.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true, ExpectContinueTimeout: time.Minute})
					c := &http.Client{Transport: rt}
					t.Cleanup(func() {
						c.CloseIdleConnections()
						d.CloseAll()
					})
					var read atomic.Bool
					body := &countedBody{Reader: io.MultiReader(readFunc(func([]byte) (int, error) {
						read.Store(true)
						return 0, io.EOF
					}), newString("payload"))}
					req := request(t, "POST", s.URL+path, nil)
					req.Body, req.ContentLength = body, 7
					req.Header.Set("Expect", "100-continue")
					resp, err := rt.RoundTrip(req)
					if err != nil {
						t.Fatal(err)
					}
					got, _ := io.ReadAll(resp.Body)
					resp.Body.Close()
					wanted := path == "/wanted"
					if wanted && string(got) != "payload" || wanted != read.Load() {
						t.Errorf("%s, %q, the body was read: %v", resp.Status, got, read.Load())
					}
					eventually(t, "the body is closed", func() bool { return body.closed.Load() == 1 })
				})
			}
		}
	}
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// An error of which nothing is known comes back as the same value, and costs
// nothing.
func TestUnknownErrorIsReturnedAsItIs(t *testing.T) {
	sentinel := errors.New("some error")
	for _, method := range []string{"GET", "POST"} {
		base := alwaysFails(sentinel)
		tr := Options{}.Wrap(base).(*Transport)
		if _, err := tr.RoundTrip(request(t, method, "https://example.test/", newString("payload"))); err != sentinel {
			t.Errorf("%s: err = %#v, want the base's own value", method, err)
		}
		if base.calls != 1 || base.idle != 0 || tr.Stats() != (Stats{}) {
			t.Errorf("%s: %d attempts, %d closings, %+v", method, base.calls, base.idle, tr.Stats())
		}
	}
}

var errDead = &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}

// A base that shows no connections, such as a test double, is asked to close
// the idle ones, and a request that may be is sent once more.
func TestBaseWithoutConnections(t *testing.T) {
	for _, tt := range []struct {
		method string
		key    string
		again  bool
	}{
		{"GET", "", true},
		{"PUT", "", true},
		{"POST", "", false},
		{"POST", "Idempotency-Key", true},
		{"PATCH", "", false},
	} {
		base := failsOnce(errDead)
		var evicted int
		tr := Options{Hooks: &Hooks{ConnEvicted: func(ConnEvictedInfo) { evicted++ }}}.Wrap(base)
		req := request(t, tt.method, "https://example.test/", newString("payload"))
		if tt.key != "" {
			req.Header.Set(tt.key, "1")
		}
		resp, err := tr.RoundTrip(req)
		if tt.again && (err != nil || resp.Request != req || base.calls != 2) {
			t.Errorf("%s: %d attempts, %v", tt.method, base.calls, err)
		}
		if !tt.again && (err != errDead || base.calls != 1) {
			t.Errorf("%s: %d attempts, %v; want one, and its own error", tt.method, base.calls, err)
		}
		if base.idle != 1 || evicted != 0 {
			t.Errorf("%s: closed idle connections %d times, want once; evicted %d", tt.method, base.idle, evicted)
		}
	}
}

// Whatever the error says, there is no third attempt.
func TestNoThirdAttempt(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  error
		max  int // with what is not counted, since nothing was sent
	}{
		{"dead", errDead, 2},
		{"goaway unprocessed", errors.New(goAwayPrefix + `LastStreamID=0, ErrCode=NO_ERROR, debug=""`), 2},
		{"draining", errors.New("http2: Transport received Server's graceful shutdown GOAWAY"), 2},
		{"refused stream", errors.New("stream error: stream ID 1; REFUSED_STREAM"), 1},
		{"calm", errors.New(goAwayPrefix + `LastStreamID=1, ErrCode=ENHANCE_YOUR_CALM, debug=""`), 1},
		{"not sent", errors.New("http2: client conn not usable"), maxStuck + 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				base := alwaysFails(tt.err)
				_, err := Wrap(base).RoundTrip(request(t, "GET", "https://example.test/", nil))
				if !errors.Is(err, tt.err) {
					t.Errorf("err = %v", err)
				}
				if base.calls > tt.max {
					t.Errorf("%d attempts, want at most %d", base.calls, tt.max)
				}
				if re := new(RetryError); errors.As(err, &re) != (base.calls == 2) && tt.max <= 2 {
					t.Errorf("%d attempts gave a %T", base.calls, err)
				}
			})
		})
	}
}

// What comes back when both attempts have failed.
func TestRetryError(t *testing.T) {
	second := &net.DNSError{Err: "no such\nhost", Name: "example.test", IsTimeout: true, IsTemporary: true}
	base := &fakeBase{answer: func(n int, _ *http.Request) (*http.Response, error) {
		if n == 1 {
			return nil, errDead
		}
		return nil, second
	}}
	_, err := Wrap(base).RoundTrip(request(t, "GET", "https://example.test/", nil))
	var re *RetryError
	if !errors.As(err, &re) || re.First() != errDead || re.Last() != second {
		t.Fatalf("err = %#v", err)
	}
	if !errors.Is(err, syscall.ECONNRESET) || !errors.Is(err, second) {
		t.Error("errors.Is does not reach both attempts")
	}
	var dns *net.DNSError
	var op *net.OpError
	if !errors.As(err, &dns) || dns != second || !errors.As(err, &op) || op != errDead {
		t.Error("errors.As does not reach both attempts")
	}
	text := err.Error()
	if !strings.Contains(text, errDead.Error()) || !strings.Contains(text, "lookup example.test: no such host") || strings.ContainsAny(text, "\r\n") {
		t.Errorf("the text is %q, want both on one line", text)
	}
	ue := &url.Error{Op: "Get", URL: "/", Err: err}
	if !ue.Timeout() || !ue.Temporary() {
		t.Error("Timeout and Temporary are not the last attempt's")
	}
	ue.Err = newRetryError(second, errDead)
	if ue.Timeout() || ue.Temporary() {
		t.Error("Timeout and Temporary are the first attempt's")
	}
	// The zero value and nil are of no use, and do no harm.
	for _, re := range []*RetryError{nil, new(RetryError)} {
		if re.Error() == "" || re.First() != nil || re.Last() != nil || re.Unwrap() != nil || re.Timeout() || re.Temporary() {
			t.Errorf("%#v", re)
		}
	}
}

// Wrapped twice makes no more attempts than wrapped once.
func TestWrappedTwice(t *testing.T) {
	t.Run("base without connections", func(t *testing.T) {
		base := alwaysFails(errDead)
		_, err := Wrap(Wrap(base)).RoundTrip(request(t, "GET", "https://example.test/", nil))
		if base.calls > 2 || err == nil {
			t.Errorf("%d attempts, want at most 2: %v", base.calls, err)
		}
	})
	everyWay(t, func(t *testing.T, w way, opts []faultnet.ServerOption) {
		var runs atomic.Int32
		var s *faultnet.Server
		s = newServer(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == "PUT" {
				runs.Add(1)
				io.Copy(io.Discard, r.Body)
				s.KillConns()
				hang(w, r)
			}
		}, opts...)
		c := w.client(t, new(faultnet.Dialer), s.ClientTLS())
		mustGet(t, c, s.URL)
		rt := Wrap(c.Transport)
		if resp, err := rt.RoundTrip(request(t, "PUT", s.URL, newString("payload"))); err == nil {
			drain(resp)
			t.Error("no error")
		}
		if n := runs.Load(); n > 2 {
			t.Errorf("the request ran %d times, want at most 2", n)
		}
	})
}

// Who may say that a request is not sent again.
func TestRetryOptions(t *testing.T) {
	unsent := errors.New("http2: client conn could not be established")
	never := func(*http.Request) bool { return false }
	for _, tt := range []struct {
		name  string
		opts  Options
		err   error
		calls int
	}{
		{"default", Options{}, errDead, 2},
		{"DisableRetry", Options{DisableRetry: true}, errDead, 1},
		{"DisableRetry, not processed", Options{DisableRetry: true}, unsent, 1},
		{"Retryable", Options{Retryable: never}, errDead, 1},
		{"Retryable, not processed", Options{Retryable: never}, unsent, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			base := failsOnce(tt.err)
			_, err := tt.opts.Wrap(base).RoundTrip(request(t, "GET", "https://example.test/", nil))
			if base.calls != tt.calls || (err != nil) != (tt.calls == 1) {
				t.Errorf("%d attempts, %v; want %d", base.calls, err, tt.calls)
			}
			if base.idle != 1 {
				t.Errorf("closed idle connections %d times, want once", base.idle)
			}
		})
	}
	// It may also widen: the caller knows what its requests do.
	base := failsOnce(errDead)
	var asked *http.Request
	req := request(t, "POST", "https://example.test/", newString("payload"))
	o := Options{Retryable: func(r *http.Request) bool { asked = r; return true }}
	if _, err := o.Wrap(base).RoundTrip(req); err != nil || asked != req {
		t.Errorf("err = %v, asked of the caller's request: %v", err, asked == req)
	}
}

// Once the context has ended nothing is sent again.
func TestNoRetryAfterContextEnded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	base := &fakeBase{answer: func(int, *http.Request) (*http.Response, error) {
		cancel()
		return nil, errDead
	}}
	_, err := Wrap(base).RoundTrip(request(t, "GET", "https://example.test/", nil).WithContext(ctx))
	if err != errDead || base.calls != 1 || base.idle != 0 {
		t.Errorf("%d attempts, %d closings, err = %v", base.calls, base.idle, err)
	}
}

// A nil base is http.DefaultTransport, whatever that is at the time.
func TestNilBase(t *testing.T) {
	if got := Wrap(nil).(*Transport).WrappedRoundTripper(); got != http.DefaultTransport {
		t.Errorf("the base is %T", got)
	}
}

// The second attempt has the whole body.
func TestRetrySendsTheWholeBody(t *testing.T) {
	var got []string
	rt := Wrap(roundTripFunc(func(req *http.Request) (*http.Response, error) {
		var b bytes.Buffer
		if len(got) == 0 {
			io.CopyN(&b, bufio.NewReader(req.Body), 3) // not to its end
		} else {
			io.Copy(&b, req.Body)
		}
		req.Body.Close()
		got = append(got, b.String())
		return failsOnce(errDead).answer(len(got), req)
	}))
	if _, err := rt.RoundTrip(request(t, "PUT", "https://example.test/", newString("payload"))); err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[1] != "payload" {
		t.Errorf("sent %q", got)
	}
}

type roundTripFunc func(*http.Request) (*http.Response, error)

func (f roundTripFunc) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }
