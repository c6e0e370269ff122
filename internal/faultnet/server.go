package faultnet

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
)

// A Server is a net/http server on loopback, by default with TLS, HTTP/2 and
// HTTP/1.1. It is what httptest.Server would be if that did not register a
// command line flag.
type Server struct {
	URL      string       // https://127.0.0.1:port, or http
	Listener net.Listener // for its address

	srv    *http.Server
	cancel context.CancelFunc // ends the contexts of the requests
	served chan struct{}      // closed when Serve has returned
	conns  connSet

	mu       sync.Mutex
	closing  bool
	handlers sync.WaitGroup // handlers under way; Add only under mu and before closing
}

// A ServerOption changes what [NewServer] makes.
type ServerOption func(*serverConfig)

type serverConfig struct {
	http1, http2, cleartext, clientCert bool
	configure                           []func(*http.Server)
}

// HTTP1Only turns HTTP/2 off.
func HTTP1Only() ServerOption {
	return func(c *serverConfig) { c.http1, c.http2 = true, false }
}

// HTTP2Only turns HTTP/1 off.
func HTTP2Only() ServerOption {
	return func(c *serverConfig) { c.http1, c.http2 = false, true }
}

// NoTLS serves HTTP/1.1 without TLS.
func NoTLS() ServerOption {
	return func(c *serverConfig) { c.cleartext, c.http1, c.http2 = true, true, false }
}

// H2C serves without TLS: HTTP/2 with prior knowledge, and HTTP/1.1.
func H2C() ServerOption {
	return func(c *serverConfig) { c.cleartext, c.http1, c.http2 = true, true, true }
}

// RequireClientCert makes the server refuse clients that do not show
// [ClientCert].
func RequireClientCert() ServerOption {
	return func(c *serverConfig) { c.clientCert = true }
}

// Configure lets f change the http.Server before it starts.
func Configure(f func(*http.Server)) ServerOption {
	return func(c *serverConfig) { c.configure = append(c.configure, f) }
}

// ClientCert returns the certificate that a [Server] with [RequireClientCert]
// accepts from a client.
func ClientCert() tls.Certificate { return certificate() }

// NewServer starts a server for h. Like httptest.NewServer it panics if it
// cannot listen.
func NewServer(h http.Handler, opts ...ServerOption) *Server {
	cfg := serverConfig{http1: true, http2: true}
	for _, o := range opts {
		o(&cfg)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic("faultnet: " + err.Error())
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{Listener: ln, cancel: cancel, served: make(chan struct{})}
	if h == nil {
		h = http.DefaultServeMux
	}

	protocols := new(http.Protocols)
	protocols.SetHTTP1(cfg.http1)
	protocols.SetHTTP2(cfg.http2 && !cfg.cleartext)
	protocols.SetUnencryptedHTTP2(cfg.http2 && cfg.cleartext)
	s.srv = &http.Server{
		Handler:     s.counted(h),
		Protocols:   protocols,
		TLSConfig:   &tls.Config{Certificates: []tls.Certificate{certificate()}},
		ErrorLog:    log.New(io.Discard, "", 0), // broken connections are the point here
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	if cfg.clientCert {
		s.srv.TLSConfig.ClientAuth = tls.RequireAndVerifyClientCert
		s.srv.TLSConfig.ClientCAs = certPool()
	}
	for _, f := range cfg.configure {
		f(s.srv)
	}

	tracked := trackingListener{Listener: ln, conns: &s.conns}
	serve := func() error { return s.srv.ServeTLS(tracked, "", "") }
	s.URL = "https://" + ln.Addr().String()
	if cfg.cleartext {
		serve = func() error { return s.srv.Serve(tracked) }
		s.URL = "http://" + ln.Addr().String()
	}
	go func() {
		defer close(s.served)
		serve()
	}()
	return s
}

// counted keeps count of the handlers under way, for Close to wait for.
func (s *Server) counted(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		if s.closing {
			s.mu.Unlock()
			panic(http.ErrAbortHandler)
		}
		s.handlers.Add(1)
		s.mu.Unlock()
		defer s.handlers.Done()
		h.ServeHTTP(w, r)
	})
}

// Addr returns the address the server listens on, as host:port.
func (s *Server) Addr() string { return s.Listener.Addr().String() }

// CertPool returns a pool with which clients verify the server.
func (s *Server) CertPool() *x509.CertPool { return certPool() }

// ClientTLS returns a new configuration for clients of the server, without a
// client certificate.
func (s *Server) ClientTLS() *tls.Config { return &tls.Config{RootCAs: certPool()} }

// Conns returns how many connections were accepted so far.
func (s *Server) Conns() int { return s.conns.count() }

// OpenConns returns how many of the accepted connections are still open here.
func (s *Server) OpenConns() int { return s.conns.open() }

// KillConns closes every open connection below TLS: clients get a FIN or, where
// something they sent was not read yet, an RST. The server goes on accepting.
func (s *Server) KillConns() { s.conns.closeAll(net.Conn.Close) }

// ResetConns closes every open connection so that clients get an RST. A client
// that writes at that moment may learn of it there, and then read EOF.
func (s *Server) ResetConns() { s.conns.closeAll(closeWithRST) }

// Close stops the server, closes its connections, cancels the contexts of its
// requests and waits for the handlers to return.
func (s *Server) Close() {
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	s.srv.Close()
	<-s.served
	// Those that http.Server forgot about: hijacked ones.
	s.conns.closeAll(net.Conn.Close)
	// Only now, lest a handler that ends by this still gets its response out.
	s.cancel()
	s.handlers.Wait()
}

// A trackingListener enters what it accepts into conns.
type trackingListener struct {
	net.Listener
	conns *connSet
}

func (l trackingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.conns.add(c), nil
}

// A connSet counts accepted connections and knows the open ones.
type connSet struct {
	mu       sync.Mutex
	accepted int
	live     map[*trackedConn]struct{}
}

func (s *connSet) add(c net.Conn) *trackedConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live == nil {
		s.live = make(map[*trackedConn]struct{})
	}
	t := &trackedConn{Conn: c, set: s}
	s.accepted++
	s.live[t] = struct{}{}
	return t
}

func (s *connSet) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.accepted
}

func (s *connSet) open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.live)
}

func (s *connSet) closeAll(closeConn func(net.Conn) error) {
	s.mu.Lock()
	live := s.live
	s.live = nil
	s.mu.Unlock()
	for t := range live {
		closeConn(t.Conn)
	}
}

// A trackedConn leaves its set when it is closed.
type trackedConn struct {
	net.Conn
	set *connSet
}

func (t *trackedConn) Close() error {
	t.set.mu.Lock()
	delete(t.set.live, t)
	t.set.mu.Unlock()
	return t.Conn.Close()
}

// NetConn returns the connection below t.
func (t *trackedConn) NetConn() net.Conn { return t.Conn }

// CloseWrite is what http.Server uses to let a client read the last response.
func (t *trackedConn) CloseWrite() error { return t.Conn.(*net.TCPConn).CloseWrite() }
