package deadconn

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"time"
)

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// defaultDialer has the settings of net/http's default transport.
var defaultDialer = net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}

// DialContext dials by r.Dial and returns a connection that r tracks until it
// is closed, by whoever got it. Errors are those of the underlying dialer. It
// fits http.Transport.DialContext and client-go's rest.Config.Dial.
func (r *Registry) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := r.dial(ctx, network, addr, r.Dial)
	if c == nil {
		return nil, err
	}
	return c, err
}

// dial dials by under, nil meaning the default. Like under, it may return
// (nil, nil), which net/http reports.
func (r *Registry) dial(ctx context.Context, network, addr string, under dialFunc) (*conn, error) {
	if under == nil {
		under = defaultDialer.DialContext
	}
	raw, err := under(ctx, network, addr)
	if err != nil || raw == nil {
		return nil, err
	}
	return r.track(raw, addr), nil
}

// DialTLSContext dials as [Registry.DialContext] does and sets up TLS by
// r.TLSClientConfig and r.TLSHandshakeTimeout, with the ServerName of addr if
// the config has none. It returns a *tls.Conn past its handshake: net/http
// speaks HTTP/2 over no other type. For HTTP/2, r.TLSClientConfig.NextProtos
// must offer "h2" and the http.Transport must have ForceAttemptHTTP2 set.
func (r *Registry) DialTLSContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := r.dial(ctx, network, addr, r.Dial)
	if c == nil {
		return nil, err
	}
	tc := tls.Client(c, tlsConfig(r.TLSClientConfig, addr))
	if err := c.handshake(ctx, tc, r.TLSHandshakeTimeout); err != nil {
		return nil, err
	}
	return tc, nil
}

// tlsConfig returns a copy of base for addr, as net/http's addTLS makes it.
func tlsConfig(base *tls.Config, addr string) *tls.Config {
	cfg := &tls.Config{}
	if base != nil {
		cfg = base.Clone()
	}
	if cfg.ServerName == "" {
		// net/http has made addr from the URL: punycode, with a port.
		if host, _, err := net.SplitHostPort(addr); err == nil {
			cfg.ServerName = host
		}
	}
	return cfg
}

// handshake runs tc's handshake over c, within timeout if there is one, and
// closes c if it fails.
func (c *conn) handshake(ctx context.Context, tc *tls.Conn, timeout time.Duration) error {
	if timeout > 0 {
		// The handshake may also be run by net/http. It ends either way
		// when c does, and c's reads then give the timeout.
		t := time.AfterFunc(timeout, func() { c.evict(KindTimedOut, handshakeTimeoutError{}) })
		defer t.Stop()
	}
	err := tc.HandshakeContext(ctx)
	if err != nil {
		c.Close()
		return err
	}
	c.shaken()
	return nil
}

// dialer is what a transport of ours dials with.
type dialer struct {
	reg       *Registry
	under     dialFunc        // the user's own, or nil
	transport *http.Transport // for its TLS settings
}

func (d *dialer) dialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := d.reg.dial(ctx, network, addr, d.under)
	if c == nil {
		return nil, err
	}
	return c, err
}

// dialTLSContext returns before the handshake is done: net/http runs it, or
// waits for ours, between its own trace hooks, so that those fire once each
// and measure what they say. TLSHandshakeTimeout, which net/http does not
// apply to a custom dialer, is applied here.
func (d *dialer) dialTLSContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := d.reg.dial(ctx, network, addr, d.under)
	if c == nil {
		return nil, err
	}
	// net/http has completed its TLSClientConfig (NextProtos for HTTP/2)
	// before it dials for the first time.
	cfg := tlsConfig(d.transport.TLSClientConfig, addr)
	if requiresHTTP1(ctx) {
		cfg.NextProtos = nil // as addTLS does
	}
	tc := tls.Client(c, cfg)
	go c.handshake(ctx, tc, d.transport.TLSHandshakeTimeout)
	return tc, nil
}

// http1Key marks the context of a request that only HTTP/1 can carry. net/http
// tells a custom DialTLSContext nothing of it, but hands it the values of the
// request's context.
type http1Key struct{}

func requiresHTTP1(ctx context.Context) bool { return ctx.Value(http1Key{}) != nil }
