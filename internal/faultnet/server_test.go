package faultnet_test

import (
	"crypto/tls"
	"flag"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/deadconn/deadconn/internal/faultnet"
)

func TestServerProtocols(t *testing.T) {
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	for _, tc := range []struct {
		name   string
		opts   []faultnet.ServerOption
		client *http.Protocols
		want   string
	}{
		{"default", nil, nil, "HTTP/2.0 200 ok"},
		{"HTTP1Only", []faultnet.ServerOption{faultnet.HTTP1Only()}, nil, "HTTP/1.1 200 ok"},
		{"HTTP2Only", []faultnet.ServerOption{faultnet.HTTP2Only()}, nil, "HTTP/2.0 200 ok"},
		{"NoTLS", []faultnet.ServerOption{faultnet.NoTLS()}, nil, "HTTP/1.1 200 ok"},
		{"H2C", []faultnet.ServerOption{faultnet.H2C()}, h2c, "HTTP/2.0 200 ok"},
		{"H2C with an HTTP/1 client", []faultnet.ServerOption{faultnet.H2C()}, nil, "HTTP/1.1 200 ok"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := server(t, ok, tc.opts...)
			var d faultnet.Dialer
			c := client(t, &d, s.ClientTLS())
			c.Transport.(*http.Transport).Protocols = tc.client
			mustGet(t, c, s.URL, tc.want)
			if s.Conns() != 1 || s.OpenConns() != 1 {
				t.Errorf("%d connections, %d open, want 1", s.Conns(), s.OpenConns())
			}
		})
	}
}

func TestServerClientCert(t *testing.T) {
	s := server(t, ok, faultnet.RequireClientCert())
	var without, with faultnet.Dialer
	// With TLS 1.3 the client believes that the handshake is done when the alert
	// comes: what it reports depends on what it does at that moment.
	failGet(t, client(t, &without, s.ClientTLS()), s.URL, bound, "")
	cfg := s.ClientTLS()
	cfg.Certificates = []tls.Certificate{faultnet.ClientCert()}
	mustGet(t, client(t, &with, cfg), s.URL, "HTTP/2.0 200 ok")
}

func TestServerName(t *testing.T) {
	s := server(t, ok)
	var d faultnet.Dialer
	cfg := s.ClientTLS()
	cfg.ServerName = "example.test"
	mustGet(t, client(t, &d, cfg), s.URL, "HTTP/2.0 200 ok")
}

func TestServerKillsConns(t *testing.T) {
	got := make(chan struct{}, 1)
	s := server(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			got <- struct{}{}
			<-r.Context().Done()
		}
		io.WriteString(w, "ok")
	}))
	for _, tc := range []struct {
		kill func()
		want string
	}{
		{s.KillConns, "EOF"},
		{s.ResetConns, "connection reset by peer"},
	} {
		c, d := warm(t, s.URL, s.ClientTLS()) // SETTINGS are done
		res := background(func() error { _, err := get(c, s.URL+"/wait", bound); return err })
		within(t, "request", got)
		tc.kill()
		if err := within(t, "end of the request", res); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("got %v, want %q", err, tc.want)
		}
		mustGet(t, c, s.URL, "HTTP/2.0 200 ok")
		if d.Dials() != 2 {
			t.Errorf("%d dials, want 2", d.Dials())
		}
	}
}

// A handler that waits for its request's context does not hold Close up, even
// if it has not read a body that never ends.
func TestServerCloseEndsHandlers(t *testing.T) {
	for _, o := range []faultnet.ServerOption{faultnet.HTTP1Only(), faultnet.HTTP2Only()} {
		got := make(chan struct{}, 1)
		s := faultnet.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			got <- struct{}{}
			<-r.Context().Done()
		}), o)
		var d faultnet.Dialer
		c := client(t, &d, s.ClientTLS())
		r, w := io.Pipe()
		res := background(func() error { _, err := c.Post(s.URL, "text/plain", r); return err })
		within(t, "request", got)
		s.Close()
		s.Close()
		w.Close()
		if err := within(t, "end of the request", res); err == nil {
			t.Error("the request succeeded")
		}
	}
}

// The demo is a program of its own: the rig must not add flags to it, as
// net/http/httptest and testing would.
func TestNoFlags(t *testing.T) {
	if flag.Lookup("httptest.serve") != nil {
		t.Error("net/http/httptest is linked in")
	}
}
