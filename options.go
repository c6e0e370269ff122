package deadconn

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// Options configure a [Transport]. The zero value is what [NewTransport] and
// [Wrap] use. Options are copied when used and never changed; use one value
// for as many Transports as you like. Options that contradict each other make
// the constructor panic, with the field's name and value.
type Options struct {
	// Base has the settings that Options.NewTransport starts from: proxies,
	// TLS, limits, timeouts, dialers. It is cloned and never changed. Nil
	// means those of net/http's default transport. Its own dialers are
	// honoured. What DialContext and Dial return is tracked; with a
	// DialTLSContext or DialTLS, net/http wants the *tls.Conn as it is, so
	// that its connections are known as Wrap knows them, and not counted by
	// the Registry. Options.Wrap refuses Base.
	Base *http.Transport

	// Registry tracks the connections. Nil means one of its own. Set it to
	// share one, or to wrap a base whose dialer is a Registry's.
	Registry *Registry

	// Retryable reports whether a request that the server may have
	// processed may be sent again. Nil means [IsIdempotent]. It is asked
	// after a failure only, on RoundTrip's goroutine, and must not change
	// the request or read its body. A request that was provably not
	// processed is sent again without asking.
	Retryable func(*http.Request) bool

	// DisableRetry turns retries off: dead connections are evicted, and the
	// first failure goes to the caller. A request that our own dialer sent
	// back, since another dial has brought up a connection, was not sent and
	// goes on all the same.
	DisableRetry bool

	// Health says how silent death is detected.
	Health Health

	// Hooks are called on what happens. Nil means none.
	Hooks *Hooks

	// Logger gets a line for each eviction (Warn) and each request that was
	// sent again (Debug), at most 5 a second for each host and level and then
	// one with the number of the others. It is called like Hooks.ConnEvicted,
	// so that a slow one holds up no request. Nil means none.
	Logger *slog.Logger
}

// Health says how connections are found dead that say nothing. The zero value
// means the defaults.
//
// On Linux the kernel's account of the path (TCP_INFO) finds a dead one, of
// either protocol and also under Wrap, 2.6 seconds after a request was written
// into it (or 4 round trips, if that is longer), and makes NewTransport send
// new requests elsewhere after half a second; those thresholds are no
// settings, since they follow from how TCP retransmits. Before either, another
// connection to the same address is opened by the same dialer, whose context
// has no values of a request then: while that fails for the path's sake, as when
// the client's own link is down, nothing of it is done.
//
// The fields are for what the kernel cannot see, and for other systems: they
// apply to HTTP/2 connections of NewTransport. Wrap leaves its base as it is. A
// ping setting in Options.Base.HTTP2 is left.
//
// TCP_USER_TIMEOUT is not used: it also ends a connection whose peer merely
// holds its window shut, and one whose keep-alive probe was lost.
type Health struct {
	// Disable turns the whole detection off: no watch, no pings of ours, and
	// under Wrap no question to the socket before a request is sent.
	Disable bool

	// PingInterval is how long nothing may have been read before a PING
	// (RFC 9113 section 6.7) asks whether the peer is there. Zero means 15
	// seconds: half of client-go's, and above the 10 seconds of Azure's SDK,
	// both of which servers have long been used to. gRPC servers by default
	// close a connection on its third ping within 5 minutes without DATA or
	// HEADERS in between (too_many_pings): against such a server with quiet
	// streams set it to more than 5 minutes.
	PingInterval time.Duration

	// PingTimeout is how long the answer may take before the connection is
	// dead. Zero means 7 seconds: three retransmissions on a path of 1
	// second, and with PingInterval less than the 25 to 30 seconds after
	// which load balancers and leases give up.
	PingTimeout time.Duration

	// WriteTimeout is how long a write may make no progress before the
	// connection is dead. Zero means 22 seconds, PingInterval and
	// PingTimeout together: a peer that merely holds its TCP window shut for
	// a while is alive.
	WriteTimeout time.Duration
}

const (
	defaultPingInterval = 15 * time.Second
	defaultPingTimeout  = 7 * time.Second
	defaultWriteTimeout = defaultPingInterval + defaultPingTimeout
)

// NewTransport returns a Transport with connections of its own, set up like
// net/http's default transport. It is Options{}.NewTransport().
func NewTransport() *Transport { return Options{}.NewTransport() }

// Wrap protects a transport that somebody else built and may share: nothing
// in base is changed. A nil base means http.DefaultTransport. It learns which
// connection carries a request by httptrace; from a base that tells nothing
// only CloseIdleConnections is asked, if it has one. The result is a
// *[Transport]. It is Options{}.Wrap(base), with the signature of client-go's
// transport.WrapperFunc: cfg.Wrap(deadconn.Wrap).
func Wrap(base http.RoundTripper) http.RoundTripper { return Options{}.Wrap(base) }

// Wrap is [Wrap] with options. Base must be nil.
func (o Options) Wrap(base http.RoundTripper) http.RoundTripper {
	if o.Base != nil {
		panic("deadconn: Options.Base is set, but Options.Wrap was given its base as an argument")
	}
	if base == nil {
		base = http.DefaultTransport
	}
	return o.transport(base)
}

// transport checks o and makes a Transport of it.
func (o Options) transport(base http.RoundTripper) *Transport {
	o.check()
	t := &Transport{
		base:      base,
		reg:       o.Registry,
		retryable: o.Retryable,
		noRetry:   o.DisableRetry,
		health:    o.Health.withDefaults(),
		log:       o.Logger,
	}
	if t.reg == nil {
		t.reg = new(Registry)
	}
	if t.retryable == nil {
		t.retryable = IsIdempotent
	}
	if o.Hooks != nil {
		t.hooks = *o.Hooks
	}
	t.events = &events{t: t}
	return t
}

func (o Options) check() {
	if o.DisableRetry && o.Retryable != nil {
		panic("deadconn: Options.DisableRetry is true, but Options.Retryable is set")
	}
	for _, f := range []struct {
		name  string
		value time.Duration
	}{
		{"PingInterval", o.Health.PingInterval},
		{"PingTimeout", o.Health.PingTimeout},
		{"WriteTimeout", o.Health.WriteTimeout},
	} {
		switch {
		case f.value < 0:
			panic(fmt.Sprintf("deadconn: Options.Health.%s is negative: %v", f.name, f.value))
		case f.value != 0 && o.Health.Disable:
			panic(fmt.Sprintf("deadconn: Options.Health.Disable is true, but Options.Health.%s is set: %v", f.name, f.value))
		}
	}
}

// NewTransport is [NewTransport] with options.
func (o Options) NewTransport() *Transport {
	base := o.Base
	if base == nil {
		base = defaultBase()
	}
	own := base.Clone()
	keepHTTP2(own, base)
	o.Health.apply(own)

	t := o.transport(own)
	t.own = own
	if o.Base == nil && t.reg.Dial != nil {
		own.DialContext = nil // the default's; the Registry's is meant
	}
	switch r := t.reg; {
	case r.Dial != nil && (own.DialContext != nil || own.Dial != nil):
		panic("deadconn: Options.Registry.Dial is set, but Options.Base has a dialer too")
	case r.TLSClientConfig != nil:
		panic("deadconn: Options.Registry.TLSClientConfig is set, but NewTransport takes it from Options.Base")
	case r.TLSHandshakeTimeout != 0:
		panic(fmt.Sprintf("deadconn: Options.Registry.TLSHandshakeTimeout is %v, but NewTransport takes it from Options.Base", r.TLSHandshakeTimeout))
	}

	t.trials.under = underlying(own, t.reg)
	t.lean = own.DialTLSContext == nil && own.DialTLS == nil
	t.spare.make = func() *http.Transport {
		rt := own.Clone()
		t.dialOwn(rt)
		return rt
	}
	t.dialOwn(own)
	return t
}

// dialOwn makes rt dial through t's Registry.
func (t *Transport) dialOwn(rt *http.Transport) {
	d := &dialer{reg: t.reg, owner: t, transport: rt, under: t.trials.dial}
	rt.DialContext, rt.Dial = d.dialContext, nil
	if t.lean {
		rt.DialTLSContext = d.dialTLSContext
	}
}

// defaultBase returns net/http's default transport, or its documented
// settings if a program has put something else in its place.
func defaultBase() *http.Transport {
	if t, ok := http.DefaultTransport.(*http.Transport); ok {
		return t
	}
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           defaultDialer.DialContext,
		ForceAttemptHTTP2:     true,
		MaxIdleConns:          100,
		IdleConnTimeout:       90 * time.Second,
		TLSHandshakeTimeout:   10 * time.Second,
		ExpectContinueTimeout: time.Second,
	}
}

// underlying returns the dialer that t had.
func underlying(t *http.Transport, r *Registry) dialFunc {
	switch dial := t.Dial; {
	case t.DialContext != nil:
		return t.DialContext
	case dial != nil:
		return func(_ context.Context, network, addr string) (net.Conn, error) { return dial(network, addr) }
	case r.Dial != nil:
		return r.Dial
	}
	return new(net.Dialer).DialContext // as net/http does
}

// keepHTTP2 lets own, a clone of base that is about to get dialers, speak
// HTTP/2 if base does, by a pool of its own. A dialer turns it off unless it
// is asked for, and a clone of a transport that x/net's ConfigureTransports
// touched would use base's pool (golang/go#39302, DESIGN fact 7). That one's
// health check stays behind; Health takes its place.
func keepHTTP2(own, base *http.Transport) {
	// Clone has made net/http fill this in on base, if it had not yet.
	if base.TLSNextProto["h2"] == nil {
		return
	}
	delete(own.TLSNextProto, "h2")
	delete(own.TLSNextProto, "unencrypted_http2")
	if len(own.TLSNextProto) == 0 {
		own.TLSNextProto = nil
	}
	if own.Protocols == nil {
		own.Protocols = new(http.Protocols)
		own.Protocols.SetHTTP1(true)
		own.Protocols.SetHTTP2(true)
	}
}

// apply sets up net/http's own health check of HTTP/2 connections.
func (h Health) apply(t *http.Transport) {
	if h.Disable {
		return
	}
	if t.HTTP2 == nil {
		t.HTTP2 = new(http.HTTP2Config)
	}
	h = h.withDefaults()
	for _, f := range []struct {
		dst   *time.Duration
		value time.Duration
	}{
		{&t.HTTP2.SendPingTimeout, h.PingInterval},
		{&t.HTTP2.PingTimeout, h.PingTimeout},
	} {
		*f.dst = cmp.Or(*f.dst, f.value)
	}
}

func (h Health) withDefaults() Health {
	h.PingInterval = cmp.Or(h.PingInterval, defaultPingInterval)
	h.PingTimeout = cmp.Or(h.PingTimeout, defaultPingTimeout)
	h.WriteTimeout = cmp.Or(h.WriteTimeout, defaultWriteTimeout)
	return h
}
