package deadconn

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
	"golang.org/x/net/http2"
)

// The tests in this file come from a hostile review. Each failed on the code as it
// was then.

func tlsServer(t *testing.T, h http.HandlerFunc) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	s.EnableHTTP2 = true
	s.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, connKey, rawConn(c))
	}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

func baseOf(s *httptest.Server) *http.Transport {
	return s.Client().Transport.(*http.Transport).Clone()
}

// The caller's own trace has WroteHeaders (as otelhttptrace's).
func TestReviewComposedWroteHeaders(t *testing.T) {
	for _, own := range []bool{false, true} {
		var runs atomic.Int64
		s := tlsServer(t, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			if r.URL.Path == "/die" {
				runs.Add(1)
				hijackClose(w, r)
			}
		})
		tr := Options{Base: h2base(s)}.NewTransport()
		c := &http.Client{Transport: tr}
		mustGet(t, c, s.URL)
		ctx := t.Context()
		if own {
			ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() {}})
		}
		req, _ := http.NewRequestWithContext(ctx, "PUT", s.URL+"/die", strings.NewReader("x"))
		_, err := c.Do(req)
		t.Logf("own trace %v: the server ran the PUT %d times; %v", own, runs.Load(), err)
		if runs.Load() > 2 {
			t.Errorf("own trace %v: the server ran the PUT %d times", own, runs.Load())
		}
		c.CloseIdleConnections()
	}
}

var connKey = &struct{ int }{}

func hijackClose(w http.ResponseWriter, r *http.Request) {
	r.Context().Value(connKey).(net.Conn).Close()
}

func h2base(s *httptest.Server) *http.Transport {
	b := baseOf(s)
	return &http.Transport{TLSClientConfig: b.TLSClientConfig, ForceAttemptHTTP2: true}
}

type closeErr2 struct{ io.Reader }

func TestReviewBodyCloseError(t *testing.T) {
	var runs atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.Method == "PUT" {
			runs.Add(1)
			time.Sleep(50 * time.Millisecond)
		}
	}))
	defer s.Close()
	for _, b := range []func() io.ReadCloser{
		func() io.ReadCloser { return closeErr2{strings.NewReader("hello")} },
	} {
		tr := Options{Base: &http.Transport{}}.NewTransport()
		c := &http.Client{Transport: tr}
		mustGet(t, c, s.URL)
		req, _ := http.NewRequest("PUT", s.URL, b())
		req.ContentLength = 5
		req.GetBody = func() (io.ReadCloser, error) { return b(), nil }
		runs.Store(0)
		resp, err := tr.RoundTrip(req)
		var re *RetryError
		t.Logf("%v, %v, runs %d stats %+v", resp, err, runs.Load(), tr.Stats())
		if errors.As(err, &re) || tr.Stats().Evicted > 0 {
			t.Errorf("the caller's own Close error was taken for a dead connection: %v", err)
		}
		c.CloseIdleConnections()
	}
}

// A nil Header, with Wrap: net/http turns it down.
type fakeRT func(*http.Request) (*http.Response, error)

func (f fakeRT) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestReviewNilHeader(t *testing.T) {
	rt := Wrap(fakeRT(func(r *http.Request) (*http.Response, error) { return nil, io.EOF }))
	req, _ := http.NewRequest("GET", "http://x/", nil)
	req.Header = nil
	defer func() {
		if p := recover(); p != nil {
			t.Errorf("panic: %v", p)
		}
	}()
	rt.RoundTrip(req)
}

// An early answer, then FIN (lingering close, as nginx), while the upload goes on.
func TestReviewEarlyAnswerTruncated(t *testing.T) {
	const size = 2 << 20
	ln, _ := net.Listen("tcp", "127.0.0.1:0")
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				br := bufio.NewReader(c)
				for {
					l, err := br.ReadString('\n')
					if err != nil {
						return
					}
					if l == "\r\n" {
						break
					}
				}
				fmt.Fprintf(c, "HTTP/1.1 413 Too Large\r\nContent-Length: %d\r\n\r\n", size)
				c.Write(make([]byte, size))
				c.(*net.TCPConn).CloseWrite()
				io.Copy(io.Discard, br) // lingering
			}()
		}
	}()
	for _, w := range []way{bare, owned} {
		t.Run(w.name, func(t *testing.T) {
			rt := w.new(&http.Transport{})
			pr, pw := io.Pipe()
			go func() {
				for {
					time.Sleep(10 * time.Millisecond)
					if _, err := pw.Write([]byte("some of the upload")); err != nil {
						return
					}
				}
			}()
			req, _ := http.NewRequest("POST", "http://"+ln.Addr().String(), pr)
			resp, err := rt.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			buf := make([]byte, 64<<10)
			for err == nil {
				var m int
				m, err = resp.Body.Read(buf)
				n += m
				time.Sleep(13 * time.Millisecond)
			}
			resp.Body.Close()
			pr.Close()
			if n != size || err != io.EOF {
				t.Errorf("read %d of %d bytes: %v", n, size, err)
			}
		})
	}
}

// Half-close on an upgraded connection.
func TestReviewUpgradeHalfClose(t *testing.T) {
	got := make(chan string, 1)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, brw, _ := w.(http.Hijacker).Hijack()
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\nbye")
		c.(*net.TCPConn).CloseWrite()
		b, _ := io.ReadAll(brw)
		got <- string(b)
	}))
	defer s.Close()
	for _, w := range []way{bare, owned} {
		t.Run(w.name, func(t *testing.T) {
			rt := w.new(&http.Transport{})
			req, _ := http.NewRequest("POST", s.URL, nil)
			req.Header.Set("Connection", "Upgrade")
			req.Header.Set("Upgrade", "tcp")
			resp, err := rt.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			rwc := resp.Body.(io.ReadWriteCloser)
			b, err := io.ReadAll(rwc)
			if string(b) != "bye" || err != nil {
				t.Fatal(string(b), err)
			}
			time.Sleep(20 * time.Millisecond)
			_, err = io.WriteString(rwc, "answer after the peer's FIN")
			rwc.Close()
			if g := <-got; err != nil || !strings.HasPrefix(g, "answer") {
				t.Errorf("write after the peer's half-close: %v, the peer got %q", err, g)
			}
		})
	}
}

// h2c with WriteByteTimeout: a write that makes progress is no dead connection.
type slowOnce struct {
	net.Conn
	arm atomic.Bool
}

// The send buffer was full for a while: half is written when the deadline comes.
func (c *slowOnce) Write(p []byte) (int, error) {
	if len(p) > 1 && c.arm.CompareAndSwap(true, false) {
		n, _ := c.Conn.Write(p[:len(p)/2])
		return n, &net.OpError{Op: "write", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: errDeadline}
	}
	return c.Conn.Write(p)
}

func TestReviewWriteByteTimeoutH2C(t *testing.T) {
	var runs atomic.Int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/die" {
			runs.Add(1)
			hijackClose(w, r)
		}
	}))
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, connKey, rawConn(c))
	}
	s.Start()
	defer s.Close()
	var last *slowOnce
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	tr := Options{Base: &http.Transport{
		Protocols: p,
		HTTP2:     &http.HTTP2Config{WriteByteTimeout: time.Second},
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := defaultDialer.DialContext(ctx, network, addr)
			last = &slowOnce{Conn: c}
			return last, err
		}}}.NewTransport()
	c := &http.Client{Transport: tr}
	mustGet(t, c, s.URL)
	first := last
	first.arm.Store(true)
	mustGet(t, c, s.URL) // slow, and well
	if last != first {
		t.Fatal("another connection")
	}
	_, err := c.Post(s.URL+"/die", "", strings.NewReader("pay"))
	if runs.Load() > 1 {
		t.Errorf("the POST ran %d times: %v", runs.Load(), err)
	}
	c.CloseIdleConnections()
}

var errDeadline = os.ErrDeadlineExceeded

// A base that hedges.
func TestReviewHedgingBase(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(ok))
	defer s.Close()
	var dn atomic.Int64
	b := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		if dn.Add(1)%2 == 0 {
			time.Sleep(10 * time.Millisecond)
		}
		return defaultDialer.DialContext(ctx, network, addr)
	}}
	rt := Wrap(fakeRT(func(r *http.Request) (*http.Response, error) {
		ch := make(chan *http.Response, 2)
		for range 2 {
			go func() {
				resp, _ := b.RoundTrip(r)
				ch <- resp
			}()
		}
		resp := <-ch
		go func() {
			if r := <-ch; r != nil {
				drain(r)
			}
		}()
		return resp, nil
	}))
	c := &http.Client{Transport: rt}
	for range 10 {
		get(c, s.URL)
	}
	time.Sleep(50 * time.Millisecond)
	b.CloseIdleConnections()
}

// GetBody's own error, after REFUSED_STREAM.
func TestReviewGetBodyError(t *testing.T) {
	p := newPeer(t, func(c *faultnet.PeerConn) {
		a, _ := c.ReadRequest()
		c.RespondHeaders(a.StreamID, 200)
		b, err := c.ReadRequest()
		if err != nil {
			return
		}
		c.ReadBody(b.StreamID)
		c.Reset(b.StreamID, http2.ErrCodeRefusedStream)
		time.Sleep(100 * time.Millisecond)
		c.Data(a.StreamID, "fine", true)
		c.Silence()
	})
	tr := Options{Base: &http.Transport{TLSClientConfig: p.ClientTLS(), ForceAttemptHTTP2: true}}.NewTransport()
	resp, err := (&http.Client{Transport: tr}).Get(p.URL())
	if err != nil {
		t.Fatal(err)
	}
	req, _ := http.NewRequest("PUT", p.URL(), strings.NewReader("x"))
	mine := &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET} // the body comes from elsewhere
	req.GetBody = func() (io.ReadCloser, error) { return nil, mine }
	_, err = tr.RoundTrip(req)
	t.Logf("PUT: %v, %+v", err, tr.Stats())
	b, err2 := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err2 != nil || tr.Stats().Evicted > 0 {
		t.Errorf("evicted %d for the caller's own GetBody; a sibling's body: %q, %v", tr.Stats().Evicted, b, err2)
	}
	tr.CloseConnections()
}

var _ = errors.New

var _ = errors.New

var _ = errors.New

// The context ends while rescue waits for the HTTP layer to let go (awaitRelease).
func TestReviewCtxEndsInAwaitRelease(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	var done []bool
	reg := new(Registry)
	cli, srv := net.Pipe()
	defer srv.Close()
	c := reg.track(cli, "x:80", nil)
	rt := Options{Registry: reg}.Wrap(fakeRT(func(r *http.Request) (*http.Response, error) {
		traceGot(r, c)
		mu.Lock()
		defer mu.Unlock()
		done = append(done, r.Context().Err() != nil)
		return nil, &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}
	}))
	time.AfterFunc(50*time.Millisecond, cancel)
	req, _ := http.NewRequestWithContext(ctx, "PUT", "http://x/", strings.NewReader("x"))
	_, err := rt.RoundTrip(req)
	if len(done) > 1 {
		t.Errorf("attempts with a context that was done: %v; %v", done, err)
	}
	var re *RetryError
	_ = errors.As(err, &re)
}

func traceGot(r *http.Request, c net.Conn) {
	tr := httptrace.ContextClientTrace(r.Context())
	tr.GetConn("x:80")
	tr.GotConn(httptrace.GotConnInfo{Conn: c, Reused: true})
}

func (closeErr2) Close() error { return net.ErrClosed }

// Who evicts a connection marks it dead before its socket is closed. A request
// that gets it in between may go out, and is not to be taken for unsent.
func TestReviewLandedOnlyOnceShut(t *testing.T) {
	tr := NewTransport()
	for _, foreign := range []bool{false, true} {
		var raw net.Conn = new(restConn)
		c := tr.reg.adopt(raw, &attempt{t: tr, req: request(t, "GET", "http://example.test/", nil)})
		if !foreign {
			c = tr.reg.track(new(restConn), "example.test:443", tr)
			raw = c
		}
		c.evicted.Store(true) // somebody else is at it
		c.doom(KindReset, net.ErrClosed)
		a := tr.newAttempt(request(t, "POST", "https://example.test/", nil), nil)
		a.start = c.born + 1
		a.gotConn(httptrace.GotConnInfo{Conn: raw})
		if a.landed {
			t.Errorf("foreign %v: landed, though the socket is open", foreign)
		}
		c.fate.Load().shut.Store(true)
		if a.gotConn(httptrace.GotConnInfo{Conn: raw}); !a.landed {
			t.Errorf("foreign %v: not landed, though the socket is closed", foreign)
		}
		if !foreign {
			c.Close()
		}
	}
}
