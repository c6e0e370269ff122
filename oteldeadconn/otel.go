package oteldeadconn

import (
	"context"
	"net"
	"strconv"
	"sync"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/semconv/v1.43.0/httpconv"
	"go.opentelemetry.io/otel/trace"

	"github.com/deadconn/deadconn"
)

// ScopeName is the instrumentation scope name.
const ScopeName = "github.com/deadconn/deadconn/oteldeadconn"

// An Option changes what [NewHooks] and [Observe] do.
type Option interface{ apply(*config) }

type config struct {
	provider metric.MeterProvider
	limit    int
}

type optionFunc func(*config)

func (f optionFunc) apply(c *config) { f(c) }

// WithMeterProvider says where the metrics go. Nil, or without this option,
// means the global provider.
func WithMeterProvider(p metric.MeterProvider) Option {
	return optionFunc(func(c *config) {
		if p != nil {
			c.provider = p
		}
	})
}

// WithServerLimit says how many different servers, as pairs of server.address
// and server.port, a metric has attributes for; the first n get them. Without
// this option it is 100. NewHooks and each Observe count for themselves.
func WithServerLimit(n int) Option {
	return optionFunc(func(c *config) { c.limit = n })
}

func newConfig(opts []Option) config {
	c := config{provider: otel.GetMeterProvider(), limit: 100}
	for _, o := range opts {
		o.apply(&c)
	}
	return c
}

func (c config) meter() metric.Meter {
	return c.provider.Meter(ScopeName, metric.WithSchemaURL(semconv.SchemaURL))
}

// NewHooks returns hooks that record metrics and add events to the requests'
// spans. Use them for as many Transports as you like, beside hooks of your own
// by [deadconn.JoinHooks]. An error in creating an instrument goes to
// [otel.Handle].
func NewHooks(opts ...Option) *deadconn.Hooks {
	c := newConfig(opts)
	meter := c.meter()
	dialed, asked := &servers{limit: c.limit}, &servers{limit: c.limit}
	duration, err := httpconv.NewClientConnectionDuration(meter, lifetimes)
	if err != nil {
		otel.Handle(err)
	}
	counter := func(name, unit, description string) metric.Int64Counter {
		c, err := meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
		if err != nil {
			otel.Handle(err)
		}
		return c
	}
	evictions := counter("deadconn.evictions", "{connection}", "Connections that were found dead and closed.")
	suspicions := counter("deadconn.suspicions", "{connection}", "Connections that fell under suspicion, so that new requests went elsewhere.")
	retries := counter("deadconn.retries", "{request}", "Requests that were sent again.")
	merged := counter("deadconn.dials.merged", "{dial}", "Dials that waited for another and were not made.")

	// Most hooks run apart from any request.
	ctx := context.Background()
	add := func(ctx context.Context, c metric.Int64Counter, n int64, attrs []attribute.KeyValue) {
		c.Add(ctx, n, metric.WithAttributeSet(attribute.NewSet(attrs...)))
	}
	return &deadconn.Hooks{
		ConnSuspected: func(i deadconn.ConnSuspectedInfo) {
			add(ctx, suspicions, 1, dialed.attrs(address(i.Addr, i.RemoteAddr)))
		},
		ConnEvicted: func(i deadconn.ConnEvictedInfo) {
			add(ctx, evictions, 1, append(dialed.conn(address(i.Addr, i.RemoteAddr), i.Protocol), causeKey.String(i.Cause.String())))
		},
		ConnClosed: func(i deadconn.ConnClosedInfo) {
			duration.RecordSet(ctx, i.Age.Seconds(), attribute.NewSet(dialed.conn(address(i.Addr, i.RemoteAddr), i.Protocol)...))
		},
		DialMerged: func(i deadconn.DialMergedInfo) {
			add(ctx, merged, int64(i.Waiters), dialed.attrs(i.Addr))
		},
		RequestRetried: func(i deadconn.RequestRetriedInfo) {
			span := trace.SpanFromContext(i.Context)
			if !span.IsRecording() {
				return
			}
			cause := causeKey.String(i.Kind.String())
			if i.Evicted {
				span.AddEvent("deadconn.evicted", trace.WithAttributes(cause))
			}
			span.AddEvent("deadconn.retried", trace.WithAttributes(cause, unsentKey.Bool(i.Unsent)))
		},
		RequestDone: func(i deadconn.RequestDoneInfo) {
			outcome := "rescued"
			switch {
			case i.Err != nil && i.Retried:
				outcome = "lost"
			case i.Err != nil:
				outcome = "not_retried"
			}
			add(i.Context, retries, 1, append(asked.attrs(i.Host),
				causeKey.String(deadconn.Classify(i.First).String()), outcomeKey.String(outcome)))
		},
	}
}

const (
	causeKey   = attribute.Key("deadconn.cause")
	outcomeKey = attribute.Key("deadconn.outcome")
	unsentKey  = attribute.Key("deadconn.unsent")
)

// lifetimes are the histogram's bounds in seconds: the conventions give none,
// and the SDK's are meant for milliseconds. 90 is net/http's IdleConnTimeout.
var lifetimes = metric.WithExplicitBucketBoundaries(0.1, 1, 5, 10, 30, 60, 90, 120, 300, 600, 1800, 3600, 14400, 86400)

// Observe makes the metrics tell of t's open connections and of hooks that
// were dropped, until the registration's Unregister is called; as long, it
// keeps t. Several Transports add up. It asks t when metrics are collected,
// which takes a microsecond or so for each connection.
func Observe(t *deadconn.Transport, opts ...Option) (metric.Registration, error) {
	c := newConfig(opts)
	meter := c.meter()
	dialed := &servers{limit: c.limit}
	open, err := httpconv.NewClientOpenConnectionsObservable(meter)
	if err != nil {
		return nil, err
	}
	dropped, err := meter.Int64ObservableCounter("deadconn.hooks.dropped", metric.WithUnit("{call}"),
		metric.WithDescription("Hook calls and log lines that were dropped, since a hook was slow."))
	if err != nil {
		return nil, err
	}
	return meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(dropped, t.Stats().HooksDropped)
		for g, n := range groups(t.Connections(0)) {
			o.ObserveInt64(open.Inst(), n, metric.WithAttributeSet(attribute.NewSet(
				append(dialed.conn(g.addr, g.protocol), attribute.String("http.connection.state", string(g.state)))...)))
		}
		return nil
	}, open.Inst(), dropped)
}

type group struct {
	addr, protocol string
	state          httpconv.ConnectionStateAttr
}

// groups counts connections that look alike.
func groups(conns []deadconn.ConnInfo) map[group]int64 {
	n := make(map[group]int64)
	for _, c := range conns {
		g := group{c.Addr, c.Protocol, httpconv.ConnectionStateActive}
		switch c.State {
		case deadconn.ConnDead:
			continue
		case deadconn.ConnIdle:
			g.state = httpconv.ConnectionStateIdle
		}
		n[g]++
	}
	return n
}

// address returns what was dialed, or the peer's address if that is not dialed.
func address(addr string, remote net.Addr) string {
	if addr == "" && remote != nil {
		return remote.String()
	}
	return addr
}

// servers bounds how many servers there are attributes for.
type servers struct {
	limit int

	mu   sync.Mutex
	seen map[string]struct{} // guarded by mu; at most limit
}

// attrs returns the attributes of a server: host:port, or a host alone, as a
// URL has it.
func (s *servers) attrs(addr string) []attribute.KeyValue {
	const room = 5 // for what the callers append
	if !s.admit(addr) {
		return append(make([]attribute.KeyValue, 0, room), semconv.ServerAddress("_other"))
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		host = unbracket(addr)
	}
	attrs := append(make([]attribute.KeyValue, 0, room), semconv.ServerAddress(host))
	if n, err := strconv.ParseUint(port, 10, 16); err == nil {
		attrs = append(attrs, semconv.ServerPort(int(n)))
	}
	return attrs
}

// unbracket takes the brackets off an IPv6 address.
func unbracket(host string) string {
	if n := len(host); n > 1 && host[0] == '[' && host[n-1] == ']' {
		return host[1 : n-1]
	}
	return host
}

// conn returns the attributes of a connection.
func (s *servers) conn(addr, protocol string) []attribute.KeyValue {
	attrs := s.attrs(addr)
	switch protocol {
	case "h2":
		attrs = append(attrs, semconv.NetworkProtocolVersion("2"))
	case "http/1.1":
		attrs = append(attrs, semconv.NetworkProtocolVersion("1.1"))
	}
	return attrs
}

func (s *servers) admit(addr string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.seen[addr]; ok {
		return true
	}
	if len(s.seen) >= s.limit {
		return false
	}
	if s.seen == nil {
		s.seen = make(map[string]struct{})
	}
	s.seen[addr] = struct{}{}
	return true
}
