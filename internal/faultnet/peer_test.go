package faultnet_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/deadconn/deadconn/internal/faultnet"
)

func peer(t *testing.T, script func(*faultnet.PeerConn), opts ...faultnet.PeerOption) *faultnet.Peer {
	t.Helper()
	p, err := faultnet.NewPeer(script, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// serveOK answers every request.
func serveOK(c *faultnet.PeerConn) {
	for {
		r, err := c.ReadRequest()
		if err != nil {
			return
		}
		c.Respond(r.StreamID, 200, "ok")
	}
}

// What a client sees of each fault while its request is in flight. A second
// connection, where there is one, answers.
func TestPeerFaults(t *testing.T) {
	for _, tc := range []struct {
		name  string
		fault func(c *faultnet.PeerConn, r *faultnet.PeerRequest)
		want  string // in the error; "" is success
		dials int
	}{
		{"Respond", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) { c.Respond(r.StreamID, 200, "ok") }, "", 1},
		{"Data", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
			c.RespondHeaders(r.StreamID, 200)
			c.Data(r.StreamID, "o", false)
			c.Data(r.StreamID, "k", true)
		}, "", 1},
		{"Reset", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
			c.Reset(r.StreamID, http2.ErrCodeInternal)
			c.Silence()
		}, "stream error: stream ID 1; INTERNAL_ERROR; received from peer", 1},
		{"GoAway before the stream", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
			c.GoAway(0, http2.ErrCodeNo, "")
			c.Silence()
		}, "", 2},
		{"GoAway after the stream, then FIN", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
			c.GoAway(r.StreamID, http2.ErrCodeInternal, "tired")
			c.FIN()
		}, `http2: server sent GOAWAY and closed the connection; LastStreamID=1, ErrCode=INTERNAL_ERROR, debug="tired"`, 1},
		{"DataOnStream0", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
			c.DataOnStream0()
			c.Silence()
		}, "connection error: PROTOCOL_ERROR", 1},
		{"Garbage", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
			c.Garbage()
			c.Silence()
		}, "tls: received record with version", 1},
		{"GarbageFrame", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
			c.GarbageFrame()
			c.Silence()
		}, "http2: frame too large", 1},
		{"FIN", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
			c.FIN()
			c.Silence()
		}, "unexpected EOF", 1},
		{"FINRaw", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {
			c.FINRaw()
			c.Silence()
		}, "unexpected EOF", 1},
		{"RST", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) { c.RST() }, "connection reset by peer", 1},
		{"Silence", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) { c.Silence() }, "http2: client connection lost", 1},
		{"PingsOnly", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) { c.PingsOnly() }, "context deadline exceeded", 1},
		{"return", func(c *faultnet.PeerConn, r *faultnet.PeerRequest) {}, "unexpected EOF", 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := peer(t, func(c *faultnet.PeerConn) {
				if c.N > 0 {
					serveOK(c)
					return
				}
				if r, err := c.ReadRequest(); err == nil {
					tc.fault(c, r)
				}
			})
			var d faultnet.Dialer
			c := client(t, &d, p.ClientTLS())
			c.Transport.(*http.Transport).HTTP2 = &http.HTTP2Config{SendPingTimeout: 50 * time.Millisecond, PingTimeout: 200 * time.Millisecond}
			if tc.want == "" {
				mustGet(t, c, p.URL(), "HTTP/2.0 200 ok")
			} else {
				timeout := bound
				if tc.name == "PingsOnly" {
					timeout = 500 * time.Millisecond
				}
				failGet(t, c, p.URL(), timeout, tc.want)
			}
			if d.Dials() != tc.dials || p.Conns() != tc.dials {
				t.Errorf("%d dials, %d accepted, want %d", d.Dials(), p.Conns(), tc.dials)
			}
		})
	}
}

func TestPeerReadRequest(t *testing.T) {
	type seen struct {
		r    *faultnet.PeerRequest
		body string
		err  error
	}
	got := make(chan seen, 1)
	p := peer(t, func(c *faultnet.PeerConn) {
		for {
			r, err := c.ReadRequest()
			if err != nil {
				return
			}
			body, err := c.ReadBody(r.StreamID)
			got <- seen{r, body, err}
			c.Respond(r.StreamID, 204, "")
		}
	})
	var d faultnet.Dialer
	c := client(t, &d, p.ClientTLS())
	body := strings.Repeat("0123456789", 20_000) // needs the window given back
	for range 10 {
		req, err := http.NewRequest("POST", p.URL()+"/path?q=1", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Test", "yes")
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		s := within(t, "request", got)
		r := s.r
		if s.err != nil || s.body != body {
			t.Errorf("got a body of %d bytes, %v", len(s.body), s.err)
		}
		if r.Method != "POST" || r.Path != "/path?q=1" || r.Scheme != "https" || r.Authority != p.Addr() ||
			r.Header.Get("X-Test") != "yes" || r.EndStream {
			t.Errorf("got %+v", r)
		}
		if resp.StatusCode != 204 {
			t.Errorf("got status %d", resp.StatusCode)
		}
	}
}

func TestPeerKeepWindow(t *testing.T) {
	reset := make(chan error, 1)
	p := peer(t, func(c *faultnet.PeerConn) {
		c.KeepWindow(true)
		if r, err := c.ReadRequest(); err == nil {
			_, err := c.ReadBody(r.StreamID)
			reset <- err
		}
	})
	var d faultnet.Dialer
	c := client(t, &d, p.ClientTLS())
	c.Timeout = 50 * time.Millisecond
	_, err := c.Post(p.URL(), "text/plain", strings.NewReader(strings.Repeat("x", 1<<20)))
	if err == nil {
		t.Error("the upload went through")
	}
	var se http2.StreamError
	if err := within(t, "RST_STREAM", reset); !errors.As(err, &se) || se.Code != http2.ErrCodeCancel {
		t.Errorf("ReadBody gave %v, want CANCEL", err)
	}
	if n := d.Last().BytesWritten(); n < 64<<10-1 {
		t.Errorf("%d bytes written, want all that the window allows", n)
	}
}

func TestPeerIgnorePings(t *testing.T) {
	p := peer(t, func(c *faultnet.PeerConn) {
		c.IgnorePings(true)
		c.ReadRequest()
		c.ReadRequest()
	})
	var d faultnet.Dialer
	c := client(t, &d, p.ClientTLS())
	c.Transport.(*http.Transport).HTTP2 = &http.HTTP2Config{SendPingTimeout: 20 * time.Millisecond, PingTimeout: 50 * time.Millisecond}
	failGet(t, c, p.URL(), bound, "http2: client connection lost")
}

func TestPeerNoTLSAndSettings(t *testing.T) {
	p := peer(t, serveOK, faultnet.PeerNoTLS(),
		faultnet.PeerSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 7}))
	var d faultnet.Dialer
	c := client(t, &d, nil)
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	c.Transport.(*http.Transport).Protocols = protocols
	mustGet(t, c, p.URL(), "HTTP/2.0 200 ok")
}

// Close ends scripts that wait for nothing but their client, and connections
// that never spoke.
func TestPeerClose(t *testing.T) {
	began := make(chan struct{}, 1)
	p, err := faultnet.NewPeer(func(c *faultnet.PeerConn) {
		began <- struct{}{}
		<-c.Done()
	})
	if err != nil {
		t.Fatal(err)
	}
	var d faultnet.Dialer
	silent, err := d.DialContext(t.Context(), "tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	c := client(t, &d, p.ClientTLS())
	res := background(func() error { _, err := get(c, p.URL(), bound); return err })
	within(t, "start of the script", began)
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	p.Close()
	if err := within(t, "end of the request", res); err == nil {
		t.Error("the request succeeded")
	}
	silent.SetReadDeadline(time.Now().Add(bound))
	if _, err := silent.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the silent connection got %v, want EOF", err)
	}
}
