package deadconn

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"go/version"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/net/http2"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// A provocation makes net/http, crypto/tls or the kernel return the error
// that a rule is about. A Go release that changes a text fails here.
type provocation struct {
	name    string
	provoke func(t *testing.T) error // what RoundTrip of a bare http.Transport returned
	want    Kind
	text    string // the end of the error's text
	is      error  // if not nil, errors.Is
}

func (p provocation) run(t *testing.T) {
	t.Run(p.name, func(t *testing.T) {
		err := p.provoke(t)
		if err == nil {
			t.Fatal("no error was provoked")
		}
		if !strings.HasSuffix(err.Error(), p.text) {
			t.Errorf("the error is %q (%T), want it to end in %q", err, err, p.text)
		}
		if p.is != nil && !errors.Is(err, p.is) {
			t.Errorf("the error is %q (%T), want one that is %q", err, err, p.is)
		}
		if got := Classify(err); got != p.want {
			t.Errorf("Classify(%q) = %v, want %v", err, got, p.want)
		}
		if got := Classify(&url.Error{Op: "Get", URL: "https://example.test/", Err: err}); got != p.want {
			t.Errorf("as http.Client returns it: %v, want %v", got, p.want)
		}
	})
}

// A rig is a bare http.Transport over a dialer with faults.
type rig struct {
	*http.Transport
	dialer faultnet.Dialer
	url    string
}

func newRig(t *testing.T, url string, cfg *tls.Config) *rig {
	r := &rig{url: url}
	r.Transport = &http.Transport{DialContext: r.dialer.DialContext, TLSClientConfig: cfg, ForceAttemptHTTP2: true}
	t.Cleanup(func() {
		r.CloseIdleConnections()
		r.dialer.CloseAll()
	})
	return r
}

func (r *rig) do(req *http.Request) error {
	resp, err := r.RoundTrip(req)
	if err != nil {
		return err
	}
	return drain(resp)
}

func (r *rig) get(t *testing.T) error { return r.do(request(t, "GET", r.url, nil)) }

func (r *rig) mustGet(t *testing.T) {
	t.Helper()
	if err := r.get(t); err != nil {
		t.Fatal(err)
	}
}

// scripted answers each request by do, until the connection ends.
func scripted(do func(c *faultnet.PeerConn, r *faultnet.PeerRequest)) func(*faultnet.PeerConn) {
	return func(c *faultnet.PeerConn) {
		for {
			r, err := c.ReadRequest()
			if err != nil {
				return
			}
			do(c, r)
		}
	}
}

func newPeerRig(t *testing.T, do func(c *faultnet.PeerConn, r *faultnet.PeerRequest)) *rig {
	t.Helper()
	p := newPeer(t, scripted(do))
	return newRig(t, p.URL(), p.ClientTLS())
}

// respond answers with a 200.
func respond(c *faultnet.PeerConn, r *faultnet.PeerRequest) { c.Respond(r.StreamID, 200, "ok") }

// answered is a GET that the peer answers by do.
func answered(do func(c *faultnet.PeerConn, id uint32)) func(*testing.T) error {
	return func(t *testing.T) error {
		return newPeerRig(t, func(c *faultnet.PeerConn, r *faultnet.PeerRequest) { do(c, r.StreamID) }).get(t)
	}
}

// upload is the same with a POST whose body cannot be had again. It is read
// before the peer answers.
func upload(do func(c *faultnet.PeerConn, id uint32)) func(*testing.T) error {
	return func(t *testing.T) error {
		r := newPeerRig(t, func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
			if _, err := c.ReadBody(r.StreamID); err == nil {
				do(c, r.StreamID)
			}
		})
		return r.do(request(t, "POST", r.url, onlyReader("payload")))
	}
}

// single is the same as answered on a http.ClientConn, which does not retry.
func single(do func(c *faultnet.PeerConn, id uint32)) func(*testing.T) error {
	return func(t *testing.T) error {
		r := newPeerRig(t, func(c *faultnet.PeerConn, r *faultnet.PeerRequest) { do(c, r.StreamID) })
		cc, err := r.NewClientConn(t.Context(), "https", strings.TrimPrefix(r.url, "https://"))
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		return doOn(t, cc, r.url)
	}
}

func doOn(t *testing.T, rt http.RoundTripper, url string) error {
	resp, err := rt.RoundTrip(request(t, "GET", url, nil))
	if err != nil {
		return err
	}
	return drain(resp)
}

// broken is a GET over HTTP/2, on a connection that was used before and then
// broken by do while it was idle.
func broken(do func(c *faultnet.Conn)) func(*testing.T) error {
	return func(t *testing.T) error {
		r := newPeerRig(t, respond)
		r.mustGet(t)
		do(r.dialer.Last())
		return r.get(t)
	}
}

// inFlight is a GET over HTTP/2, on a connection that is broken by do while
// its answer is awaited.
func inFlight(do func(c *faultnet.Conn)) func(*testing.T) error {
	return func(t *testing.T) error {
		arrived := make(chan struct{}, 1)
		r := newPeerRig(t, func(c *faultnet.PeerConn, r *faultnet.PeerRequest) { arrived <- struct{}{} })
		failed := make(chan error, 1)
		go func() { failed <- r.get(t) }()
		<-arrived
		do(r.dialer.Last())
		return <-failed
	}
}

func goAwayAndFIN(last uint32, code http2.ErrCode, debug string) func(*faultnet.PeerConn, uint32) {
	return func(c *faultnet.PeerConn, id uint32) {
		c.GoAway(last, code, debug)
		c.FIN()
	}
}

func resetBy(code http2.ErrCode) func(*faultnet.PeerConn, uint32) {
	return func(c *faultnet.PeerConn, id uint32) { c.Reset(id, code) }
}

// http1 is a request over HTTP/1.1 to a server that reads it and then lets do
// end the connection. If reused, a request before it was answered well.
func http1(method string, reused bool, do func(net.Conn)) func(*testing.T) error {
	return func(t *testing.T) error {
		ln := listen(t, func(c net.Conn, n int) {
			br := bufio.NewReader(c)
			for i := 0; ; i++ {
				req, err := http.ReadRequest(br)
				if err != nil {
					return
				}
				io.Copy(io.Discard, req.Body)
				if i == 0 && reused {
					io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
					continue
				}
				do(c)
				return
			}
		})
		r := newRig(t, "http://"+ln.Addr().String(), nil)
		if reused {
			r.mustGet(t)
		}
		return r.do(request(t, method, r.url, nil))
	}
}

func closeConn(c net.Conn) { c.Close() }

func resetConn(c net.Conn) {
	c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

// listen serves each connection on a goroutine of its own, and closes it after.
func listen(t *testing.T, serve func(c net.Conn, n int)) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() {
		ln.Close()
		<-done
	})
	go func() {
		defer close(done)
		for n := 0; ; n++ {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c, n)
			}()
		}
	}()
	return ln
}

func TestClassifySocketErrors(t *testing.T) {
	for _, p := range []provocation{
		{"write after close", broken((*faultnet.Conn).CloseUnderneath), KindClosed, ": use of closed network connection", net.ErrClosed},
		{"read after close", inFlight(func(c *faultnet.Conn) { c.NetConn().Close() }), KindClosed, ": use of closed network connection", net.ErrClosed},
		{"closed by net/http's user", inFlight(func(c *faultnet.Conn) { c.Close() }), KindClosed, ": use of closed network connection", net.ErrClosed},
		{"EPIPE", func(t *testing.T) error {
			// The peer takes no notice of our FIN: its own would be read first.
			p := newPeer(t, func(c *faultnet.PeerConn) {
				if r, err := c.ReadRequest(); err == nil {
					respond(c, r)
				}
				<-c.Done()
			})
			r := newRig(t, p.URL(), p.ClientTLS())
			r.mustGet(t)
			r.dialer.Last().NetConn().(*net.TCPConn).CloseWrite()
			return r.get(t)
		}, KindReset, "write: broken pipe", syscall.EPIPE},
		{"ECONNRESET", answered(func(c *faultnet.PeerConn, _ uint32) { c.RST() }), KindReset, "", syscall.ECONNRESET},
		{"ECONNRESET HTTP/1", http1("POST", false, resetConn), KindReset, "", syscall.ECONNRESET},
		{"ECONNRESET HTTP/1 reused", http1("POST", true, resetConn), KindReset, "", syscall.ECONNRESET},
		{"stalled write", func(t *testing.T) error {
			r := newPeerRig(t, respond)
			r.HTTP2 = &http.HTTP2Config{WriteByteTimeout: 20 * time.Millisecond}
			r.mustGet(t)
			r.dialer.Last().HoldWrites()
			return r.get(t)
		}, KindTimedOut, ": i/o timeout", os.ErrDeadlineExceeded},
	} {
		p.run(t)
	}
}

func TestClassifyTLSErrors(t *testing.T) {
	noHTTPS := func(t *testing.T) error {
		ln := listen(t, func(c net.Conn, _ int) {
			io.ReadFull(c, make([]byte, 1))
			io.WriteString(c, "220 mail.example.test ESMTP\r\n")
		})
		return newRig(t, "https://"+ln.Addr().String(), &tls.Config{}).get(t)
	}
	for _, p := range []provocation{
		{"garbage", answered(func(c *faultnet.PeerConn, _ uint32) { c.Garbage() }), KindProtocol, "", nil},
		{"record of junk", answered(func(c *faultnet.PeerConn, _ uint32) {
			record := append([]byte{23, 3, 3, 0, 32}, make([]byte, 32)...)
			c.Conn.(*tls.Conn).NetConn().Write(record)
		}), KindProtocol, "local error: tls: bad record MAC", nil},
		{"handshake: no TLS", noHTTPS, KindUnknown, "tls: first record does not look like a TLS handshake", nil},
		{"handshake: refused", func(t *testing.T) error {
			s := newServer(t, ok)
			cfg := s.ClientTLS()
			cfg.MaxVersion = tls.VersionTLS11
			cfg.MinVersion = tls.VersionTLS10
			return newRig(t, s.URL, cfg).get(t)
		}, KindUnknown, "remote error: tls: protocol version not supported", nil},
		{"x509", func(t *testing.T) error {
			s := newServer(t, ok)
			return newRig(t, s.URL, &tls.Config{RootCAs: x509.NewCertPool()}).get(t)
		}, KindUnknown, "x509: certificate signed by unknown authority", nil},
		{"client certificate, TLS 1.2", func(t *testing.T) error {
			s := newServer(t, ok, faultnet.RequireClientCert())
			cfg := s.ClientTLS()
			cfg.MaxVersion = tls.VersionTLS12
			return newRig(t, s.URL, cfg).get(t)
		}, KindUnknown, "", nil},
		{"handshake timeout", func(t *testing.T) error {
			ln := listen(t, func(c net.Conn, _ int) { io.Copy(io.Discard, c) })
			r := newRig(t, "https://"+ln.Addr().String(), &tls.Config{})
			r.TLSHandshakeTimeout = 20 * time.Millisecond
			return r.get(t)
		}, KindUnknown, handshakeTimeoutError{}.Error(), nil},
	} {
		p.run(t)
	}
}

func TestClassifyEOF(t *testing.T) {
	for _, p := range []provocation{
		{"HTTP/2 FIN", answered(func(c *faultnet.PeerConn, _ uint32) { c.FIN() }), KindEOF, "unexpected EOF", io.ErrUnexpectedEOF},
		{"HTTP/2 FIN below TLS", answered(func(c *faultnet.PeerConn, _ uint32) { c.FINRaw() }), KindEOF, "unexpected EOF", io.ErrUnexpectedEOF},
		{"HTTP/1", http1("GET", false, closeConn), KindEOF, "EOF", io.EOF},
		{"HTTP/1 reused POST", http1("POST", true, closeConn), KindEOF, "EOF", io.EOF},
		{"HTTP/1 in mid-header", http1("GET", false, func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nA: ") }), KindEOF, "unexpected EOF", io.ErrUnexpectedEOF},
		// The connection ends after the request got it and before it is
		// written. A GET would be sent again by net/http.
		{"HTTP/1 server closed idle connection", func(t *testing.T) error {
			s := newServer(t, ok, faultnet.NoTLS())
			r := newRig(t, s.URL, nil)
			r.mustGet(t)
			req := request(t, "POST", s.URL, nil)
			return r.do(req.WithContext(httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
				GotConn: func(httptrace.GotConnInfo) {
					s.KillConns()
					eventually(t, "net/http noticed", r.dialer.Last().Closed)
				},
			})))
		}, KindEOF, "http: server closed idle connection", nil},
	} {
		p.run(t)
	}
}

func TestClassifyGoAway(t *testing.T) {
	const text = "http2: server sent GOAWAY and closed the connection; "
	for _, p := range []provocation{
		{"NO_ERROR", answered(goAwayAndFIN(1, http2.ErrCodeNo, "")), KindGoAway, text + `LastStreamID=1, ErrCode=NO_ERROR, debug=""`, nil},
		{"debug data", answered(goAwayAndFIN(1<<31-1, http2.ErrCodeNo, "max_age, ErrCode=\"\n")), KindGoAway, text + `LastStreamID=2147483647, ErrCode=NO_ERROR, debug="max_age, ErrCode=\"\n"`, nil},
		{"INTERNAL_ERROR", answered(goAwayAndFIN(1, http2.ErrCodeInternal, "oops")), KindGoAway, text + `LastStreamID=1, ErrCode=INTERNAL_ERROR, debug="oops"`, nil},
		{"a code of no RFC", answered(goAwayAndFIN(1, 0xff, "")), KindGoAway, text + `LastStreamID=1, ErrCode=unknown error code 0xff, debug=""`, nil},
		{"ENHANCE_YOUR_CALM", answered(goAwayAndFIN(1, http2.ErrCodeEnhanceYourCalm, "too_many_pings")), KindGoAwayCalm, text + `LastStreamID=1, ErrCode=ENHANCE_YOUR_CALM, debug="too_many_pings"`, nil},
		{"then RST", answered(func(c *faultnet.PeerConn, id uint32) {
			c.GoAway(id, http2.ErrCodeNo, "")
			// Lest the RST overtakes it, the client answers first.
			c.Ping([8]byte{1})
			for {
				f, err := c.Framer.ReadFrame()
				if _, ok := f.(*http2.PingFrame); ok || err != nil {
					break
				}
			}
			c.RST()
		}), KindGoAway, text + `LastStreamID=1, ErrCode=NO_ERROR, debug=""`, nil},

		// With a LastStreamID below the request's own, net/http ends the
		// stream at once and does not wait for the connection. On the first
		// stream an error code is taken for a refusal, which it may be.
		{"last=0, INTERNAL_ERROR on stream 1", answered(goAwayAndFIN(0, http2.ErrCodeInternal, "")), KindUnknown, "http2: Transport received GOAWAY from server ErrCode:INTERNAL_ERROR", nil},
		{"last=0, ENHANCE_YOUR_CALM on stream 1", answered(goAwayAndFIN(0, http2.ErrCodeEnhanceYourCalm, "")), KindUnknown, "http2: Transport received GOAWAY from server ErrCode:ENHANCE_YOUR_CALM", nil},
		{"last=0, NO_ERROR", single(goAwayAndFIN(0, http2.ErrCodeNo, "")), KindDraining, "http2: Transport received Server's graceful shutdown GOAWAY", nil},
		{"last=0, NO_ERROR, body", upload(goAwayAndFIN(0, http2.ErrCodeNo, "")), KindDraining, "http2: Transport: cannot retry err [http2: Transport received Server's graceful shutdown GOAWAY] after Request.Body was written; define Request.GetBody to avoid this error", nil},
	} {
		p.run(t)
	}
}

func TestClassifyStreamErrors(t *testing.T) {
	const text = "stream error: stream ID 1; "
	cannotRetry := func(inner string) string {
		return "http2: Transport: cannot retry err [" + inner + "] after Request.Body was written; define Request.GetBody to avoid this error"
	}
	for _, p := range []provocation{
		{"REFUSED_STREAM", single(resetBy(http2.ErrCodeRefusedStream)), KindRefusedStream, text + "REFUSED_STREAM; received from peer", nil},
		{"REFUSED_STREAM, body", upload(resetBy(http2.ErrCodeRefusedStream)), KindRefusedStream, cannotRetry(text + "REFUSED_STREAM; received from peer"), nil},
		{"CANCEL", answered(resetBy(http2.ErrCodeCancel)), KindUnknown, text + "CANCEL; received from peer", nil},
		{"INTERNAL_ERROR", answered(resetBy(http2.ErrCodeInternal)), KindUnknown, text + "INTERNAL_ERROR; received from peer", nil},
		{"ENHANCE_YOUR_CALM", answered(resetBy(http2.ErrCodeEnhanceYourCalm)), KindUnknown, text + "ENHANCE_YOUR_CALM; received from peer", nil},
		{"HTTP_1_1_REQUIRED", answered(resetBy(http2.ErrCodeHTTP11Required)), KindUnknown, text + "HTTP_1_1_REQUIRED; received from peer", nil},
		{"PROTOCOL_ERROR", single(resetBy(http2.ErrCodeProtocol)), KindUnknown, text + "PROTOCOL_ERROR; received from peer", nil},
		// Go 1.26 would send it again, and says that it cannot; 1.27 would not.
		{"PROTOCOL_ERROR, body", upload(resetBy(http2.ErrCodeProtocol)), KindUnknown, "", nil},
		{"malformed response", answered(func(c *faultnet.PeerConn, id uint32) {
			c.RespondHeaders(id, 100)
			c.Data(id, "", true)
		}), KindUnknown, "", nil},
	} {
		p.run(t)
	}
}

func TestClassifyHTTP2Texts(t *testing.T) {
	clientConn := func(t *testing.T, r *rig) *http.ClientConn {
		cc, err := r.NewClientConn(t.Context(), "https", strings.TrimPrefix(r.url, "https://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cc.Close() })
		return cc
	}
	for _, p := range []provocation{
		{"lost PING", func(t *testing.T) error {
			p := newPeer(t, (*faultnet.PeerConn).Silence)
			r := newRig(t, p.URL(), p.ClientTLS())
			r.HTTP2 = &http.HTTP2Config{SendPingTimeout: 20 * time.Millisecond, PingTimeout: 20 * time.Millisecond}
			return r.get(t)
		}, KindLost, "http2: client connection lost", nil},

		// A request's failed write takes the others down with it.
		{"force closed", func(t *testing.T) error {
			arrived := make(chan struct{}, 1)
			r := newPeerRig(t, func(*faultnet.PeerConn, *faultnet.PeerRequest) { arrived <- struct{}{} })
			failed := make(chan error, 1)
			go func() { failed <- r.get(t) }()
			<-arrived
			r.dialer.Last().FailWrites(syscall.EPIPE)
			if err := r.get(t); !errors.Is(err, syscall.EPIPE) {
				t.Fatal(err)
			}
			return <-failed
		}, KindClosed, "http2: client connection force closed via ClientConn.Close", nil},

		// After a 200, an upload that is held back by flow control learns of
		// the end of the connection, and the response's body gives its error.
		// RoundTrip itself returns the connection's.
		{"conn is closed", func(t *testing.T) error {
			r := newPeerRig(t, func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
				c.KeepWindow(true)
				c.RespondHeaders(r.StreamID, 200)
			})
			tr := &upTo{n: 65535, reached: make(chan struct{})}
			resp, err := r.RoundTrip(request(t, "POST", r.url, tr))
			if err != nil {
				t.Fatal(err)
			}
			<-tr.reached
			time.Sleep(20 * time.Millisecond) // until it waits for flow control
			r.dialer.Last().CloseUnderneath()
			r.dialer.Last().Close()
			return drain(resp)
		}, KindClosed, "http2: client conn is closed", nil},

		{"DATA on stream 0", answered(func(c *faultnet.PeerConn, _ uint32) { c.DataOnStream0() }), KindProtocol, "connection error: PROTOCOL_ERROR", nil},
		{"frame beyond all bounds", answered(func(c *faultnet.PeerConn, _ uint32) { c.GarbageFrame() }), KindProtocol, "http2: frame too large", nil},
		{"HTTP/1.1 response", answered(func(c *faultnet.PeerConn, _ uint32) {
			io.WriteString(c.Conn, "HTTP/1.1 400 Bad Request\r\n\r\n")
		}), KindProtocol, "note that the frame header looked like an HTTP/1.1 header", nil},

		{"not usable", func(t *testing.T) error {
			cc := clientConn(t, newPeerRig(t, respond))
			if err := doOn(t, cc, "https://example.test/"); err != nil {
				t.Fatal(err)
			}
			cc.Close()
			return doOn(t, cc, "https://example.test/")
		}, KindNotSent, "http2: client conn not usable", nil},

		// A connection that was dialed for a request which has ended since,
		// and was closed by the peer, waits for the next one in the pool.
		{"not established", func(t *testing.T) error {
			closed := make(chan struct{})
			p := newPeer(t, func(c *faultnet.PeerConn) { close(closed) })
			r := newRig(t, p.URL(), p.ClientTLS())
			ctx, cancel := context.WithCancel(t.Context())
			dialing := make(chan struct{})
			goOn := make(chan struct{})
			r.dialer.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				select {
				case <-dialing:
				default:
					close(dialing)
				}
				<-goOn
				return new(net.Dialer).DialContext(ctx, network, addr)
			}
			go func() {
				<-dialing
				cancel()
			}()
			if err := r.do(request(t, "GET", r.url, nil).WithContext(ctx)); !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			close(goOn)
			<-closed
			eventually(t, "net/http has closed it", r.dialer.Last().Closed)
			return r.get(t)
		}, KindNotEstablished, "http2: client conn could not be established", nil},

		// net/http keeps this to itself. Who uses the HTTP/2 transport that
		// x/net makes for one of net/http's gets to see it, up to Go 1.26.
		{"no cached connection", func(t *testing.T) error {
			if version.Compare(runtime.Version(), "go1.27") >= 0 {
				t.Skip("x/net's http2.Transport is net/http's own since Go 1.27, and dials")
			}
			tr, err := http2.ConfigureTransports(new(http.Transport))
			if err != nil {
				t.Fatal(err)
			}
			return doOn(t, tr, "https://example.test/")
		}, KindNotSent, "http2: no cached connection was available", nil},
	} {
		p.run(t)
	}
}

// upTo is a body without end. It tells when net/http has read n bytes, and so
// has sent all that it may.
type upTo struct {
	n       int
	reached chan struct{}
}

func (r *upTo) Read(p []byte) (int, error) {
	if r.n -= len(p); r.n < 0 && r.n+len(p) >= 0 {
		close(r.reached)
	}
	return len(p), nil
}

func TestClassifyNoConnection(t *testing.T) {
	refused := func(t *testing.T) string {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		return ln.Addr().String()
	}
	proxied := func(t *testing.T, proxy string) error {
		r := newRig(t, "https://example.test/", &tls.Config{})
		r.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: proxy})
		return r.get(t)
	}
	for _, p := range []provocation{
		{"dial refused", func(t *testing.T) error {
			return newRig(t, "https://"+refused(t), nil).get(t)
		}, KindUnknown, "connect: connection refused", syscall.ECONNREFUSED},
		{"dial failing as a dead connection does", func(t *testing.T) error {
			r := newRig(t, "https://"+refused(t), nil)
			r.dialer.Err = &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ETIMEDOUT)}
			return r.get(t)
		}, KindUnknown, "connect: connection timed out", syscall.ETIMEDOUT},
		{"dial timeout", func(t *testing.T) error {
			r := newRig(t, "https://"+refused(t), nil)
			r.dialer.Dial = (&net.Dialer{Deadline: time.Now()}).DialContext
			return r.get(t)
		}, KindUnknown, ": i/o timeout", nil},
		{"no such host", func(t *testing.T) error {
			r := newRig(t, "https://example.test/", nil)
			r.dialer.Dial = (&net.Dialer{Resolver: &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
				return nil, syscall.ECONNRESET // from the name server, not from the host
			}}}).DialContext
			return r.get(t)
		}, KindUnknown, "", nil},
		{"proxy refused", func(t *testing.T) error { return proxied(t, refused(t)) }, KindUnknown, "connect: connection refused", syscall.ECONNREFUSED},
		{"proxy says 503", func(t *testing.T) error {
			ln := listen(t, func(c net.Conn, _ int) {
				http.ReadRequest(bufio.NewReader(c))
				io.WriteString(c, "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
			})
			return proxied(t, ln.Addr().String())
		}, KindUnknown, "Service Unavailable", nil},
	} {
		p.run(t)
	}
}

func TestClassifyCaller(t *testing.T) {
	// The text, and the very value, of a dead connection.
	cause := &net.OpError{Op: "write", Net: "tcp", Err: errors.New("use of closed network connection")}
	canceled := func(cause error, opts ...faultnet.ServerOption) func(*testing.T) error {
		return func(t *testing.T) error {
			arrived := make(chan struct{}, 1)
			s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
				arrived <- struct{}{}
				hang(w, r)
			}, opts...)
			r := newRig(t, s.URL, s.ClientTLS())
			ctx, cancel := context.WithCancelCause(t.Context())
			go func() {
				<-arrived
				cancel(cause)
			}()
			return r.do(request(t, "GET", s.URL, nil).WithContext(ctx))
		}
	}
	slow := func(set func(*rig), opts ...faultnet.ServerOption) func(*testing.T) error {
		return func(t *testing.T) error {
			s := newServer(t, hang, opts...)
			r := newRig(t, s.URL, s.ClientTLS())
			set(r)
			return r.get(t)
		}
	}
	deadline := func(opts ...faultnet.ServerOption) func(*testing.T) error {
		return func(t *testing.T) error {
			s := newServer(t, hang, opts...)
			r := newRig(t, s.URL, s.ClientTLS())
			return r.do(request(t, "GET", s.URL, nil).WithContext(withTimeout(t, 20*time.Millisecond)))
		}
	}
	headerTimeout := func(r *rig) { r.ResponseHeaderTimeout = 20 * time.Millisecond }
	clientTimeout := func(t *testing.T) error {
		s := newServer(t, hang)
		r := newRig(t, s.URL, s.ClientTLS())
		_, err := (&http.Client{Transport: r, Timeout: 20 * time.Millisecond}).Get(s.URL)
		return err
	}
	for _, p := range []provocation{
		{"deadline HTTP/2", deadline(), KindUnknown, "context deadline exceeded", context.DeadlineExceeded},
		{"deadline HTTP/1", deadline(faultnet.HTTP1Only()), KindUnknown, "context deadline exceeded", context.DeadlineExceeded},
		{"Client.Timeout", clientTimeout, KindUnknown, "", context.DeadlineExceeded},
		{"cancel HTTP/2", canceled(cause), KindUnknown, "context canceled", context.Canceled},
		{"cancel HTTP/1", canceled(context.Canceled, faultnet.HTTP1Only()), KindUnknown, "context canceled", context.Canceled},
		// HTTP/1 returns the cause: DESIGN fact 10.
		{"cancel HTTP/1, cause", canceled(cause, faultnet.HTTP1Only()), KindUnknown, ": use of closed network connection", cause},
		{"response header timeout HTTP/2", slow(headerTimeout), KindUnknown, "http2: timeout awaiting response headers", nil},
		{"response header timeout HTTP/1", slow(headerTimeout, faultnet.HTTP1Only()), KindUnknown, "net/http: timeout awaiting response headers", nil},
		{"body", func(t *testing.T) error {
			s := newServer(t, func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
			return newRig(t, s.URL, s.ClientTLS()).do(request(t, "POST", s.URL, fails{fs.ErrClosed}))
		}, KindUnknown, "file already closed", fs.ErrClosed},
	} {
		p.run(t)
	}
}

// hang never answers, not even a client that is on its way out: net/http may
// return an answer that comes between a cancel and the close.
func hang(_ http.ResponseWriter, r *http.Request) {
	<-r.Context().Done()
	panic(http.ErrAbortHandler)
}

// fails is a body whose reader fails.
type fails struct{ err error }

func (f fails) Read([]byte) (int, error) { return 0, f.err }

// What cannot be provoked here, and what only looks like a dead connection.
func TestClassify(t *testing.T) {
	addr := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1234}
	io := func(op string, err error) error {
		if errno, ok := err.(syscall.Errno); ok {
			err = os.NewSyscallError(op, errno)
		}
		return &net.OpError{Op: op, Net: "tcp", Source: addr, Addr: addr, Err: err}
	}
	text := func(s string) error { return errors.New(s) }
	const goAway = "http2: server sent GOAWAY and closed the connection; "
	for _, tt := range []struct {
		name string
		err  error
		want Kind
	}{
		{"nil", nil, KindUnknown},
		{"any other", text("some error"), KindUnknown},

		// The kernel, on this system and on Windows, by name and by number.
		{"bare errno", syscall.ECONNRESET, KindReset},
		{"ENETRESET", io("read", syscall.ENETRESET), KindReset},
		{"ENOTCONN", io("write", syscall.ENOTCONN), KindReset},
		{"ECONNABORTED", io("read", syscall.ECONNABORTED), KindReset},
		{"ETIMEDOUT", io("read", syscall.ETIMEDOUT), KindTimedOut},
		{"EHOSTUNREACH", io("read", syscall.EHOSTUNREACH), KindTimedOut},
		{"ENETUNREACH", io("write", syscall.ENETUNREACH), KindTimedOut},
		{"ENETDOWN", io("write", syscall.ENETDOWN), KindTimedOut},
		{"WSAENETDOWN", io("write", syscall.Errno(10050)), KindTimedOut},
		{"WSAENETUNREACH", io("write", syscall.Errno(10051)), KindTimedOut},
		{"WSAENETRESET", io("read", syscall.Errno(10052)), KindReset},
		{"WSAECONNABORTED", io("write", syscall.Errno(10053)), KindReset},
		{"WSAECONNRESET", io("read", syscall.Errno(10054)), KindReset},
		{"WSAENOTCONN", io("write", syscall.Errno(10057)), KindReset},
		{"WSAESHUTDOWN", io("write", syscall.Errno(10058)), KindReset},
		{"WSAETIMEDOUT", io("read", syscall.Errno(10060)), KindTimedOut},
		{"WSAEHOSTUNREACH", io("read", syscall.Errno(10065)), KindTimedOut},
		{"sendfile", io("readfrom", syscall.EPIPE), KindReset},
		{"splice", io("writeto", syscall.ECONNRESET), KindReset},
		{"ENOBUFS, of this host", io("write", syscall.ENOBUFS), KindUnknown},
		{"EINTR", io("read", syscall.EINTR), KindUnknown},
		{"dial", io("dial", syscall.ECONNRESET), KindUnknown},
		{"dial on Windows", io("dial", syscall.Errno(10060)), KindUnknown},
		{"proxyconnect", io("proxyconnect", io("dial", syscall.ECONNRESET)), KindUnknown},
		{"proxy's connection", io("proxyconnect", io("read", syscall.ECONNRESET)), KindUnknown},
		{"socks connect", &net.OpError{Op: "socks connect", Err: errEOF}, KindUnknown},
		{"TLS alert", &net.OpError{Op: "remote error", Err: text("tls: bad certificate")}, KindUnknown},
		{"own TLS alert", &net.OpError{Op: "local error", Err: text("tls: bad record MAC")}, KindProtocol},

		// Deadlines.
		{"write deadline", io("write", os.ErrDeadlineExceeded), KindTimedOut},
		{"read deadline", io("read", os.ErrDeadlineExceeded), KindUnknown},
		{"deadline of no connection", os.ErrDeadlineExceeded, KindUnknown},
		{"canceled write", fmt.Errorf("%w: %w", context.Canceled, io("write", net.ErrClosed)), KindUnknown},
		{"the same, other way round", errors.Join(io("write", net.ErrClosed), context.DeadlineExceeded), KindUnknown},

		// All contain "closed".
		{"net.ErrClosed", net.ErrClosed, KindClosed}, // tls.Conn's Write after Close
		{"its text", text(net.ErrClosed.Error()), KindUnknown},
		{"fs.ErrClosed", &fs.PathError{Op: "read", Path: "/x", Err: fs.ErrClosed}, KindUnknown},
		{"io.ErrClosedPipe", errClosedPipe, KindUnknown},
		{"http.ErrServerClosed", http.ErrServerClosed, KindUnknown},
		{"http.ErrBodyReadAfterClose", http.ErrBodyReadAfterClose, KindUnknown},
		{"http2: stream closed", text("http2: stream closed"), KindUnknown},
		{"http2: response body closed", text("http2: response body closed"), KindUnknown},
		{"tls: protocol is shutdown", text("tls: protocol is shutdown"), KindUnknown},
		{"http.ErrHandlerTimeout", http.ErrHandlerTimeout, KindUnknown},
		{"errCannotRewind", text("net/http: cannot rewind body after connection loss"), KindUnknown},
		{"http: idle connection timeout", text("http: idle connection timeout"), KindUnknown},

		// x/net's own types, which its http2.Transport returns up to Go 1.26.
		{"GOAWAY", http2.GoAwayError{LastStreamID: 1999, DebugData: "max_age"}, KindGoAway},
		{"GOAWAY unprocessed", http2.GoAwayError{}, KindGoAwayUnprocessed},
		{"GOAWAY unprocessed, with an error", http2.GoAwayError{ErrCode: http2.ErrCodeInternal}, KindGoAwayUnprocessed},
		{"GOAWAY calm", http2.GoAwayError{ErrCode: http2.ErrCodeEnhanceYourCalm}, KindGoAwayCalm},
		{"stream", http2.StreamError{StreamID: 5, Code: http2.ErrCodeRefusedStream}, KindRefusedStream},
		{"stream cancelled", http2.StreamError{StreamID: 5, Code: http2.ErrCodeCancel}, KindUnknown},
		{"stream ended for a dead connection's sake", http2.StreamError{StreamID: 5, Code: http2.ErrCodeCancel, Cause: net.ErrClosed}, KindUnknown},
		{"connection", http2.ConnectionError(http2.ErrCodeFlowControl), KindProtocol},
		{"connection, a code of no RFC", http2.ConnectionError(99), KindProtocol},

		// Texts that only look like net/http's.
		{"GOAWAY without debug data, as older releases have it", text(goAway + "LastStreamID=199, ErrCode=NO_ERROR"), KindGoAway},
		{"GOAWAY cut short", text(goAway + "LastStreamID=199"), KindUnknown},
		{"GOAWAY without a number", text(goAway + "LastStreamID=, ErrCode=NO_ERROR, debug=\"\""), KindUnknown},
		{"GOAWAY with too large a number", text(goAway + "LastStreamID=2147483648, ErrCode=NO_ERROR, debug=\"\""), KindUnknown},
		{"GOAWAY with another code", text(goAway + "LastStreamID=0, ErrCode=FINE, debug=\"\""), KindUnknown},
		{"GOAWAY with something after it", text(goAway + "LastStreamID=0, ErrCode=NO_ERROR, debug=\"\"; gave up"), KindUnknown},
		{"in a sentence", text("proxy: http2: client connection lost"), KindUnknown},
		{"with something after it", text("http2: client connection lost."), KindUnknown},
		{"connection error of somebody else", text("connection error: desc = \"transport is closing\""), KindUnknown},
		{"text of an error that wraps another", wrapper{text("some error"), "http2: client connection lost"}, KindUnknown},
		{"cannot retry, cut short", text("http2: Transport: cannot retry err [stream error: stream ID 1; REFUSED_STREAM; received from peer]"), KindUnknown},
		{"cannot retry, by ourselves", text("http2: Transport: cannot retry err [stream error: stream ID 1; REFUSED_STREAM] after Request.Body was written; define Request.GetBody to avoid this error"), KindUnknown},

		// Wrappings.
		{"%w", fmt.Errorf("a: %w", fmt.Errorf("b: %w", io("read", syscall.ECONNRESET))), KindReset},
		{"%v", fmt.Errorf("a: %v", io("read", syscall.ECONNRESET)), KindUnknown},
		{"two %w", fmt.Errorf("%w, then %w", text("some error"), errUnexpectedEOF), KindEOF},
		{"errors.Join", errors.Join(text("some error"), errors.Join(nil, text("http2: client connection lost"))), KindLost},
		{"the first of two", errors.Join(text("http2: client connection lost"), text("http2: frame too large")), KindLost},
		{"*url.Error", &url.Error{Op: "Get", URL: "/", Err: errEOF}, KindEOF},
		{"multierror", multierror.Append(nil, text("some error"), io("write", syscall.EPIPE)), KindReset},
		{"multierror with a prefix", multierror.Prefix(multierror.Append(nil, errEOF), "x:"), KindEOF},
		{"RetryError: the last attempt's", newRetryError(text("http2: client connection lost"), text("http2: client conn not usable")), KindNotSent},
		{"an eviction of ours", io("write", &death{kind: KindSilent, err: text("the path is dead")}), KindSilent},
		{"a dial of ours that was not needed", io("dial", &notSentError{"x"}), KindNotSent},
		{"wraps nil", wrapper{nil, "http2: client connection lost"}, KindUnknown},
		{"uncomparable", uncomparable{errEOF}, KindEOF},
		{"cyclic", new(cycle), KindUnknown},
		{"cyclic below an OpError", io("write", new(cycle)), KindUnknown},
		{"cyclic beside another", errors.Join(errEOF, new(cycle)), KindEOF},
		{"deep", deep(100, errEOF), KindEOF},
		{"too deep", deep(10000, errEOF), KindUnknown},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := Classify(tt.err); got != tt.want {
				t.Errorf("Classify(%v) = %v, want %v", tt.err, got, tt.want)
			}
		})
	}
}

var errEOF, errUnexpectedEOF, errClosedPipe = io.EOF, io.ErrUnexpectedEOF, io.ErrClosedPipe

type wrapper struct {
	error
	text string
}

func (w wrapper) Error() string { return w.text }
func (w wrapper) Unwrap() error { return w.error }

type uncomparable []error

func (uncomparable) Error() string     { return "uncomparable" }
func (u uncomparable) Unwrap() []error { return u }

type cycle struct{}

func (*cycle) Error() string   { return "http2: client connection lost" }
func (c *cycle) Unwrap() error { return c }

func deep(n int, err error) error {
	for range n {
		err = wrapper{err, "deep"}
	}
	return err
}

// What a Kind says, and by which name metrics know it.
func TestKinds(t *testing.T) {
	seen := make(map[string]bool)
	for _, tt := range []struct {
		kind              Kind
		name              string
		dead, unprocessed bool
	}{
		{KindUnknown, "unknown", false, false},
		{KindClosed, "closed", true, false},
		{KindReset, "reset", true, false},
		{KindTimedOut, "timed_out", true, false},
		{KindEOF, "eof", true, false},
		{KindLost, "ping_lost", true, false},
		{KindSilent, "silent", true, false},
		{KindGoAway, "goaway", true, false},
		{KindGoAwayUnprocessed, "goaway_unprocessed", true, true},
		{KindGoAwayCalm, "goaway_calm", true, false},
		{KindProtocol, "protocol", true, false},
		{KindDraining, "draining", false, true},
		{KindRefusedStream, "refused_stream", false, true},
		{KindNotSent, "not_sent", false, true},
		{KindNotEstablished, "not_established", true, true},
		{Kind(200), "kind(200)", false, false},
	} {
		if got := tt.kind.String(); got != tt.name {
			t.Errorf("Kind(%d).String() = %q, want %q", tt.kind, got, tt.name)
		}
		if tt.kind.Dead() != tt.dead || tt.kind.Unprocessed() != tt.unprocessed {
			t.Errorf("%v: dead %v, unprocessed %v; want %v, %v", tt.kind, tt.kind.Dead(), tt.kind.Unprocessed(), tt.dead, tt.unprocessed)
		}
		seen[tt.kind.String()] = true
	}
	if len(seen) != kinds+1 {
		t.Errorf("%d names were tested, there are %d kinds and one that is none", len(seen), kinds)
	}
}

// Wrapping an error, however often, does not change what it says, and no text
// makes Classify panic.
func FuzzClassify(f *testing.F) {
	opError := func(op string, err error) error { return &net.OpError{Op: op, Net: "tcp", Err: err} }
	known := []struct {
		err  error
		want Kind
	}{
		{errors.New("some error"), KindUnknown},
		{context.Canceled, KindUnknown},
		{opError("dial", syscall.ECONNREFUSED), KindUnknown},
		{http2.StreamError{StreamID: 1, Code: http2.ErrCodeCancel}, KindUnknown},
		{http2.StreamError{StreamID: 1, Code: http2.ErrCodeRefusedStream}, KindRefusedStream},
		{opError("write", net.ErrClosed), KindClosed},
		{opError("write", os.NewSyscallError("write", syscall.EPIPE)), KindReset},
		{opError("write", os.ErrDeadlineExceeded), KindTimedOut},
		{io.EOF, KindEOF},
		{http2.GoAwayError{LastStreamID: 1}, KindGoAway},
		{http2.GoAwayError{}, KindGoAwayUnprocessed},
		{errors.New("http2: client connection lost"), KindLost},
		{errors.New("connection error: PROTOCOL_ERROR"), KindProtocol},
		{errors.New("http2: client conn not usable"), KindNotSent},
	}
	for i := range known {
		f.Add(uint8(i), []byte{0, 1, 2, 3, 4, 5, 6}, "text")
	}
	for text := range texts {
		f.Add(uint8(0), []byte{1, 2}, text)
	}
	f.Add(uint8(0), []byte{}, goAwayPrefix+"LastStreamID=0, ErrCode=NO_ERROR, debug=\"")
	f.Add(uint8(0), []byte{}, "http2: Transport: cannot retry err [stream error: stream ID ; REFUSED_STREAM")

	f.Fuzz(func(t *testing.T, which uint8, wraps []byte, text string) {
		Classify(errors.New(text))
		if _, ok := textKind(text); ok {
			text = "text" // a second known error: either may win
		}
		k := known[int(which)%len(known)]
		err := k.err
		for _, w := range wraps[:min(len(wraps), maxErrors/4)] {
			switch w % 7 {
			case 0:
				err = fmt.Errorf("%s: %w", text, err)
			case 1:
				err = errors.Join(err, errors.New(text))
			case 2:
				err = errors.Join(errors.New(text), err)
			case 3:
				err = &url.Error{Op: text, URL: text, Err: err}
			case 4:
				err = multierror.Append(nil, err)
			case 5:
				err = wrapper{err, text}
			case 6:
				err = uncomparable{nil, err}
			}
		}
		if got := Classify(err); got != k.want {
			t.Errorf("Classify(%q) = %v, want %v as for %q alone", err, got, k.want, k.err)
		}
		if again := Classify(errors.Join(err)); again != k.want {
			t.Errorf("a second time: %v", again)
		}
	})
}
