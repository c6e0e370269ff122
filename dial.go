package deadconn

import (
	"context"
	"crypto/tls"
	"math"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/net/http2"
)

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// defaultDialer has the settings of net/http's default transport.
var defaultDialer = net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}

// DialContext dials by r.Dial and returns a connection that r tracks until it
// is closed, by whoever got it. Errors are those of the underlying dialer. It
// fits http.Transport.DialContext and client-go's rest.Config.Dial.
func (r *Registry) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := r.dial(ctx, network, addr, r.Dial, nil)
	if c == nil {
		return nil, err
	}
	return c, err
}

// dial dials by under, nil meaning the default. Like under, it may return
// (nil, nil), which net/http reports.
func (r *Registry) dial(ctx context.Context, network, addr string, under dialFunc, owner *Transport) (*conn, error) {
	if under == nil {
		under = defaultDialer.DialContext
	}
	raw, err := under(ctx, network, addr)
	if err != nil || raw == nil {
		return nil, err
	}
	return r.track(raw, addr, owner), nil
}

// DialTLSContext dials as [Registry.DialContext] does and sets up TLS by
// r.TLSClientConfig and r.TLSHandshakeTimeout, with the ServerName of addr if
// the config has none. It returns a *tls.Conn past its handshake: net/http
// speaks HTTP/2 over no other type. For HTTP/2, r.TLSClientConfig.NextProtos
// must offer "h2" and the http.Transport must have ForceAttemptHTTP2 set.
func (r *Registry) DialTLSContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := r.dial(ctx, network, addr, r.Dial, nil)
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
	c.tls.Store(true)
	if timeout > 0 {
		// The handshake may also be run by net/http. It ends either way
		// when c does, and c's reads then give the timeout. What the
		// user's dialer returned is closed too: it may not notice the end
		// of the socket below it. Nobody has used c yet, so this is a dial
		// that failed and no eviction to tell of.
		t := time.AfterFunc(timeout, func() {
			c.shut(KindTimedOut, handshakeTimeoutError{})
			c.Conn.Close()
		})
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

// dialer is what a transport of ours dials with. It merges dials: while one
// to an address is under way that may turn out to speak HTTP/2, the others
// wait for its outcome. net/http dials once for each request that finds no
// connection, and throws all but one away (golang/go#13957).
type dialer struct {
	reg       *Registry
	owner     *Transport
	under     dialFunc        // the user's own
	transport *http.Transport // for its settings

	mu       sync.Mutex
	calls    map[string]*call    // guarded by mu; by address
	settling map[string]*call    // guarded by mu; done, and not yet settled
	http1    map[string]struct{} // guarded by mu; addresses known not to speak HTTP/2
}

// maxHTTP1 bounds what a dialer remembers. When it is full it starts again:
// forgetting an address costs its next burst one handshake of waiting.
const maxHTTP1 = 4096

// call is a dial that others may wait for. Its outcome is written before done
// is closed and read after.
type call struct {
	done    chan struct{}
	conn    *conn // guarded by dialer.mu; nil: not dialed yet
	waiters int   // guarded by dialer.mu
	outcome outcome
	err     error         // if failed
	ended   int64         // if failed: its progress then
	settled chan struct{} // closed when its connection has settled, if isHTTP2
}

// progress tells how far cl has come. It grows, to endOfConn at most.
func (cl *call) progress() int64 {
	switch c := cl.conn; {
	case c == nil:
		return -1
	case c.dead():
		return endOfConn
	default:
		return c.read.Load()
	}
}

const endOfConn = math.MaxInt64

type outcome uint8

const (
	failed outcome = iota + 1
	gaveUp
	isHTTP1
	isHTTP2
	hasLeft // HTTP, after an upgrade
)

// supersededWait is how long a dial that is not needed any more takes to end.
// net/http gives its request the new HTTP/2 connection meanwhile, so that
// nobody sees the end. It may be long: only a request that lost its
// connection again at once waits for it.
const supersededWait = 20 * time.Millisecond

// errSuperseded is what RoundTrip sees otherwise: nothing was sent.
var errSuperseded = &notSentError{"another dial has brought up an HTTP/2 connection"}

// dialContext dials for what is not HTTPS to the server itself: plain HTTP, and
// proxies, inside of which net/http sets up TLS.
func (d *dialer) dialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := d.reg.dial(ctx, network, addr, d.under, d.owner)
	if c == nil {
		return nil, err
	}
	if d.transport.Proxy == nil {
		c.proto.Store(uint32(cleartext(d.transport)))
		c.shaken()
	}
	return c, err
}

// cleartext returns what t speaks without TLS: HTTP/2 only if it cannot speak
// HTTP/1.
func cleartext(t *http.Transport) outcome {
	if p := t.Protocols; p != nil && p.UnencryptedHTTP2() && !p.HTTP1() {
		return isHTTP2
	}
	return isHTTP1
}

// dialTLSContext returns before the handshake is done: net/http runs it, or
// waits for ours, between its own trace hooks, so that those fire once each
// and measure what they say. TLSHandshakeTimeout, which net/http does not
// apply to a custom dialer, is applied here.
func (d *dialer) dialTLSContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if dialsAlone(ctx) || d.transport.DisableKeepAlives || d.transport.MaxIdleConnsPerHost < 0 {
		return d.start(ctx, network, addr, nil) // its connection is for it alone
	}
	for {
		own, other, joined := d.join(addr)
		if other == nil {
			d.awaitSettled(ctx, addr)
			return d.start(ctx, network, addr, own)
		}
		stalled := time.NewTimer(stalledDial)
		defer stalled.Stop()
		select {
		case <-other.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-stalled.C:
			d.abandon(addr, other)
			continue
		}
		switch other.outcome {
		case failed:
			// net/http may have told its request of the end before we
			// could. Whoever has come since has not seen it fail.
			if joined < other.ended {
				return nil, other.err
			}
		case isHTTP2:
			t := time.NewTimer(supersededWait)
			defer t.Stop()
			select {
			case <-t.C:
			case <-ctx.Done():
			}
			return nil, errSuperseded
		}
	}
}

// stalledDial is how long a dial may keep others waiting. net/http does not end
// a dial with its request, so that one into a black hole lasts for 30 seconds,
// and one to a server that says nothing for as long as TLSHandshakeTimeout, or
// for ever. On a path of more than 100 ms round trip time a burst makes a few
// dials for it.
const stalledDial = 300 * time.Millisecond

// abandon lets another dial be made beside cl.
func (d *dialer) abandon(addr string, cl *call) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.calls[addr] == cl {
		delete(d.calls, addr)
	}
}

// join returns the call to addr that is under way and its progress, or else
// one to make: nil, if addr is known not to speak HTTP/2.
func (d *dialer) join(addr string) (own, other *call, progress int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.calls[addr]; c != nil && (c.conn == nil || !c.conn.dead()) {
		c.waiters++
		return nil, c, c.progress()
	}
	if _, ok := d.http1[addr]; ok {
		return nil, nil, 0
	}
	own = &call{done: make(chan struct{}), settled: make(chan struct{})}
	if d.calls == nil {
		d.calls = make(map[string]*call)
	}
	d.calls[addr] = own
	return own, nil, 0
}

// start dials addr and starts the TLS handshake. If others can wait for it
// cl is not nil.
func (d *dialer) start(ctx context.Context, network, addr string, cl *call) (net.Conn, error) {
	o, err := gaveUp, error(nil) // if the user's dialer panics, or exits
	dialed := false
	defer func() {
		if !dialed {
			d.end(addr, cl, o, err)
		}
	}()
	c, err := d.reg.dial(ctx, network, addr, d.under, d.owner)
	if c == nil {
		o = failure(ctx, err)
		return nil, err
	}
	dialed = true
	// net/http has completed its TLSClientConfig (NextProtos for HTTP/2)
	// before it dials for the first time.
	cfg := tlsConfig(d.transport.TLSClientConfig, addr)
	if requiresHTTP1(ctx) {
		cfg.NextProtos = nil // as addTLS does
	}
	tc := tls.Client(c, cfg)
	if cl != nil {
		d.mu.Lock()
		cl.conn = c
		d.mu.Unlock()
	}
	go func() {
		// net/http ends its handshake, and so ours, when ctx ends. Ours must
		// not: it may return last, and c be in use by then.
		if err := c.handshake(context.WithoutCancel(ctx), tc, d.transport.TLSHandshakeTimeout); err != nil {
			d.end(addr, cl, failure(ctx, err), err)
			return
		}
		o := isHTTP1
		if tc.ConnectionState().NegotiatedProtocol == http2.NextProtoTLS {
			o = isHTTP2
		}
		c.proto.Store(uint32(o))
		if o == isHTTP2 {
			c.awaitPooled()
		}
		if !requiresHTTP1(ctx) {
			d.learn(addr, o)
		}
		d.end(addr, cl, o, nil)
		if cl != nil && o == isHTTP2 {
			d.settle(addr, cl, c, now()+int64(settleWait))
		}
	}()
	return tc, nil
}

// settleWait bounds settle. A server sends its SETTINGS after the handshake.
const settleWait = 50 * time.Millisecond

// settleMore is for what comes with the first bytes: TLS 1.3 has its session
// tickets before the SETTINGS.
const settleMore = 2 * time.Millisecond

// settle waits until c's peer has sent its SETTINGS. Before, net/http takes
// 100 for the number of streams that c may have, and a burst would dial again
// for what c can take.
func (d *dialer) settle(addr string, cl *call, c *conn, until int64) {
	if !c.proven() && !c.closed.Load() && now() < until {
		time.AfterFunc(time.Millisecond, func() { d.settle(addr, cl, c, until) })
		return
	}
	time.AfterFunc(settleMore, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.settling[addr] == cl {
			delete(d.settling, addr)
		}
		close(cl.settled)
	})
}

// awaitSettled waits for a connection to addr that has just been made.
func (d *dialer) awaitSettled(ctx context.Context, addr string) {
	d.mu.Lock()
	cl := d.settling[addr]
	d.mu.Unlock()
	if cl == nil {
		return
	}
	select {
	case <-cl.settled:
	case <-ctx.Done():
	}
}

// failure is how others are to take the end of a dial with ctx.
func failure(ctx context.Context, err error) outcome {
	if err == nil || ctx.Err() != nil {
		return gaveUp // its own affair: another takes over
	}
	return failed
}

// learn remembers which protocol addr speaks.
func (d *dialer) learn(addr string, o outcome) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if o == isHTTP2 {
		delete(d.http1, addr)
		return
	}
	if d.http1 == nil || len(d.http1) >= maxHTTP1 {
		d.http1 = make(map[string]struct{})
	}
	d.http1[addr] = struct{}{}
}

// end tells the outcome of a dial to those who wait for it, if cl is not nil.
func (d *dialer) end(addr string, cl *call, o outcome, err error) {
	if cl == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	cl.outcome, cl.err, cl.ended = o, err, endOfConn
	if c := cl.conn; c != nil {
		// Not its own I/O has failed but what was made of it, such as the
		// certificate: after the last bytes. net/http may have closed it.
		if death := c.fate.Load(); death == nil || death.kind == KindNotEstablished {
			cl.ended = c.read.Load()
		}
	}
	if d.calls[addr] == cl {
		delete(d.calls, addr)
	}
	if o == isHTTP2 {
		if d.settling == nil {
			d.settling = make(map[string]*call)
		}
		d.settling[addr] = cl
	}
	close(cl.done)
	if d.owner != nil && cl.waiters > 0 && o != isHTTP1 {
		d.owner.merged(DialMergedInfo{Addr: addr, Waiters: cl.waiters, Err: err})
	}
}

// A dialNeed is in the context of a request whose connection is not any one.
// net/http tells a custom DialTLSContext nothing of it, but hands it the
// values of the request's context.
type dialNeed uint8

const (
	needsHTTP1 dialNeed = iota + 1 // a WebSocket: no HTTP/2
	needsOwn                       // Request.Close: nobody else will have it
)

type dialNeedKey struct{}

// needOf returns what req needs, 0 if nothing.
func needOf(req *http.Request) dialNeed {
	switch {
	case isWebSocket(req):
		return needsHTTP1
	case req.Close:
		return needsOwn
	}
	return 0
}

func requiresHTTP1(ctx context.Context) bool { return ctx.Value(dialNeedKey{}) == needsHTTP1 }

func dialsAlone(ctx context.Context) bool { return ctx.Value(dialNeedKey{}) != nil }
