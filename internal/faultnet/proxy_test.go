package faultnet_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

func proxy(t *testing.T, target string, opts ...faultnet.ProxyOption) *faultnet.Proxy {
	t.Helper()
	p, err := faultnet.NewProxy(target, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func TestProxyModes(t *testing.T) {
	s := server(t, ok)
	p := proxy(t, s.Addr())
	url := "https://" + p.Addr()
	c, d := warm(t, url, s.ClientTLS())
	accepted := p.Conns()
	p.Stall()
	failGet(t, c, url, 30*time.Millisecond, "context deadline exceeded")
	p.Pass() // nothing is missing
	mustGet(t, c, url, "HTTP/2.0 200 ok")
	p.Discard()
	failGet(t, c, url, 30*time.Millisecond, "context deadline exceeded")
	if d.Dials() != 1 || p.Conns() != accepted {
		t.Fatalf("%d dials, want 1; %d accepted, want %d", d.Dials(), p.Conns(), accepted)
	}

	d.CloseAll()
	eventually(t, "Close of the connection by the transport", func() bool {
		_, err := get(c, url, bound) // a new connection passes
		return err == nil
	})
	p.RST()
	eventually(t, "end of the new connection", func() bool { return d.Open() == 0 })
	mustGet(t, c, url, "HTTP/2.0 200 ok")
	p.FIN()
	eventually(t, "end of the newest connection", func() bool { return d.Open() == 0 })

	p.AllConns(true)
	p.Discard()
	failGet(t, c, url, 50*time.Millisecond, "context deadline exceeded")
}

func TestProxyEndsInFlight(t *testing.T) {
	got := make(chan struct{}, 1)
	s := server(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			got <- struct{}{}
			<-r.Context().Done()
		}
		io.WriteString(w, "ok")
	}))
	p := proxy(t, s.Addr())
	for _, tc := range []struct {
		do   func()
		want string
	}{
		{p.RST, "connection reset by peer"},
		{p.FIN, "EOF"},
	} {
		c, _ := warm(t, "https://"+p.Addr(), s.ClientTLS()) // SETTINGS are done
		res := background(func() error { _, err := get(c, "https://"+p.Addr()+"/wait", bound); return err })
		within(t, "request", got)
		tc.do()
		if err := within(t, "end of the request", res); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("got %v, want %q", err, tc.want)
		}
		eventually(t, "end of the connection", func() bool { return p.Live() == 0 })
	}
}

func TestProxyDelay(t *testing.T) {
	s := server(t, ok, faultnet.NoTLS())
	p := proxy(t, s.Addr())
	var d faultnet.Dialer
	c := client(t, &d, nil)
	mustGet(t, c, "http://"+p.Addr(), "HTTP/1.1 200 ok")
	const delay = 30 * time.Millisecond
	p.Delay(delay)
	begin := time.Now()
	mustGet(t, c, "http://"+p.Addr(), "HTTP/1.1 200 ok")
	if took := time.Since(begin); took < 2*delay {
		t.Errorf("took %v, want at least %v each way", took, delay)
	}
}

func TestProxyStallShutsWindow(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	p := proxy(t, ln.Addr().String(), faultnet.SmallBuffers())
	c, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.SetDeadline(time.Now().Add(bound))
	eventually(t, "the connection is live", func() bool { return p.Live() == 1 })
	p.Stall()
	c.(*net.TCPConn).SetWriteBuffer(4 << 10)
	c.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	n, err := c.Write(make([]byte, 1<<20))
	if err == nil || n > 128<<10 {
		t.Fatalf("wrote %d bytes, %v: the window has not shut", n, err)
	}
	p.Pass()
	if _, err := io.ReadFull(s, make([]byte, n)); err != nil {
		t.Errorf("after Pass: %v", err)
	}
}

func TestProxyWithoutTarget(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	p := proxy(t, ln.Addr().String())
	c, err := net.Dial("tcp", p.Addr())
	if err == nil { // else the RST was there first
		defer c.Close()
		c.SetDeadline(time.Now().Add(bound))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want ECONNRESET", err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if err := p.Close(); err == nil {
		t.Error("a second Close of a listener gives an error")
	}
}

// Everything at once, for the race detector.
func TestProxyUnderLoad(t *testing.T) {
	s := server(t, ok)
	p := proxy(t, s.Addr())
	done := background(func() error {
		for i := range 200 {
			[]func(){p.Pass, p.Stall, p.Discard, p.FIN, p.RST, p.Pass}[i%6]()
			p.Delay(time.Duration(i%2) * time.Millisecond)
			p.AllConns(i%3 == 0)
			p.Live()
		}
		return nil
	})
	var clients []<-chan error
	for range 4 {
		var d faultnet.Dialer
		c := client(t, &d, s.ClientTLS())
		clients = append(clients, background(func() error {
			for range 20 {
				get(c, "https://"+p.Addr(), 20*time.Millisecond)
			}
			return nil
		}))
	}
	within(t, "end of the modes", done)
	for i, c := range clients {
		within(t, fmt.Sprint("end of client ", i), c)
	}
}
