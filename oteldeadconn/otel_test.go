package oteldeadconn

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
)

// A rig is a server, a dialer whose connections die on request, and an SDK.
type rig struct {
	*faultnet.Server
	dialer   faultnet.Dialer
	reader   *metric.ManualReader
	provider *metric.MeterProvider
	spans    *tracetest.SpanRecorder
	tracer   *sdktrace.TracerProvider
}

func newRig(t *testing.T, h http.HandlerFunc, opts ...faultnet.ServerOption) *rig {
	t.Helper()
	r := &rig{Server: faultnet.NewServer(h, opts...), reader: metric.NewManualReader(), spans: tracetest.NewSpanRecorder()}
	r.provider = metric.NewMeterProvider(metric.WithReader(r.reader))
	r.tracer = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(r.spans))
	t.Cleanup(func() {
		r.dialer.CloseAll()
		r.Close()
		if err := r.provider.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return r
}

func ok(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") }

func (r *rig) base() *http.Transport {
	return &http.Transport{DialContext: r.dialer.DialContext, TLSClientConfig: r.ClientTLS(), ForceAttemptHTTP2: true}
}

// transport returns a Transport that is observed, and whose hooks are ours and
// those of others.
func (r *rig) transport(t *testing.T, others ...*deadconn.Hooks) *deadconn.Transport {
	t.Helper()
	hooks := NewHooks(WithMeterProvider(r.provider))
	tr := deadconn.Options{Base: r.base(), Hooks: deadconn.JoinHooks(append(others, hooks)...)}.NewTransport()
	reg, err := Observe(tr, WithMeterProvider(r.provider))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := reg.Unregister(); err != nil {
			t.Error(err)
		}
		tr.CloseConnections()
	})
	return tr
}

// send sends a request inside of a span of its own.
func (r *rig) send(t *testing.T, rt http.RoundTripper, method, url, body string) error {
	t.Helper()
	ctx, span := r.tracer.Tracer("test").Start(t.Context(), method)
	defer span.End()
	var rd io.Reader
	if body != "" {
		rd = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, url, rd)
	if err != nil {
		t.Fatal(err)
	}
	return do(rt, req)
}

func do(rt http.RoundTripper, req *http.Request) error {
	resp, err := rt.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

func (r *rig) get(t *testing.T, rt http.RoundTripper, url string) {
	t.Helper()
	if err := r.send(t, rt, "GET", url, ""); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) collect(t *testing.T) metricdata.ResourceMetrics {
	t.Helper()
	var rm metricdata.ResourceMetrics
	if err := r.reader.Collect(t.Context(), &rm); err != nil {
		t.Fatal(err)
	}
	return rm
}

// metrics returns the values by name and attributes; a histogram's is its
// count. The server's port is left out of the attributes if it is r's.
func (r *rig) metrics(t *testing.T) map[string]int64 {
	t.Helper()
	m := make(map[string]int64)
	add := func(name string, set attribute.Set, n int64) {
		name += "{" + set.Encoded(attribute.DefaultEncoder()) + "}"
		_, port, _ := net.SplitHostPort(r.Addr())
		name = strings.ReplaceAll(name, ",server.port="+port, "")
		m[name] += n
	}
	for _, scope := range r.collect(t).ScopeMetrics {
		if scope.Scope.Name != ScopeName || scope.Scope.SchemaURL != semconv.SchemaURL {
			t.Errorf("scope %+v", scope.Scope)
		}
		for _, x := range scope.Metrics {
			if x.Description == "" {
				t.Errorf("%s has no description", x.Name)
			}
			switch d := x.Data.(type) {
			case metricdata.Sum[int64]:
				if up := x.Name == "http.client.open_connections"; d.IsMonotonic == up {
					t.Errorf("%s: monotonic is %v", x.Name, d.IsMonotonic)
				}
				for _, p := range d.DataPoints {
					add(x.Name, p.Attributes, p.Value)
				}
			case metricdata.Histogram[float64]:
				if x.Unit != "s" {
					t.Errorf("%s: unit %q", x.Name, x.Unit)
				}
				for _, p := range d.DataPoints {
					if p.Sum <= 0 || p.Sum > 60 {
						t.Errorf("%s: sum %v", x.Name, p.Sum)
					}
					add(x.Name, p.Attributes, int64(p.Count))
				}
			default:
				t.Errorf("%s is a %T", x.Name, d)
			}
		}
	}
	return m
}

// eventually waits until the metrics are as wanted; others may be there.
func (r *rig) eventually(t *testing.T, want map[string]int64) {
	t.Helper()
	var got map[string]int64
	for range 500 {
		got = r.metrics(t)
		missing := false
		for name, n := range want {
			missing = missing || got[name] != n
		}
		if !missing {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("got\n%v\nwant\n%v", lines(got), lines(want))
}

func lines(m map[string]int64) string {
	var b strings.Builder
	for name, n := range m {
		fmt.Fprintf(&b, "\t%s %d\n", name, n)
	}
	return b.String()
}

func (r *rig) events(span int) string {
	var all []string
	for _, e := range r.spans.Ended()[span].Events() {
		set := attribute.NewSet(e.Attributes...)
		all = append(all, e.Name+"{"+set.Encoded(attribute.DefaultEncoder())+"}")
	}
	return strings.Join(all, " ")
}

const server = "server.address=127.0.0.1"

// A connection dies, and its request is rescued.
func TestRescued(t *testing.T) {
	r := newRig(t, ok)
	var others atomic.Int64
	tr := r.transport(t, &deadconn.Hooks{ConnEvicted: func(deadconn.ConnEvictedInfo) { others.Add(1) }})
	r.get(t, tr, r.URL)
	r.dialer.Last().FailWrites(syscall.EPIPE)
	r.get(t, tr, r.URL)
	const proto = "network.protocol.version=2,"
	want := map[string]int64{
		"deadconn.evictions{deadconn.cause=reset," + proto + server + "}":                 1,
		"deadconn.retries{deadconn.cause=reset,deadconn.outcome=rescued," + server + "}":  1,
		"http.client.open_connections{http.connection.state=idle," + proto + server + "}": 1,
		"http.client.connection.duration{" + proto + server + "}":                         1,
		"deadconn.hooks.dropped{}": 0,
	}
	r.eventually(t, want)
	for name := range r.metrics(t) {
		if _, ok := want[name]; !ok && !strings.HasPrefix(name, "deadconn.dials.merged{") { // net/http may have dialed twice
			t.Errorf("%s is unexpected", name)
		}
	}
	if others.Load() != 1 {
		t.Error("the other party was not told")
	}
	if got := r.events(0); got != "" {
		t.Errorf("events of a request that met nothing: %s", got)
	}
	if got, want := r.events(1), "deadconn.evicted{deadconn.cause=reset} deadconn.retried{deadconn.cause=reset,deadconn.unsent="; !strings.HasPrefix(got, want) {
		t.Errorf("events %s, want %s", got, want)
	}
	if err := tr.CloseConnections(); err != nil {
		t.Fatal(err)
	}
	r.eventually(t, map[string]int64{
		"http.client.connection.duration{" + proto + server + "}":                         2,
		"http.client.open_connections{http.connection.state=idle," + proto + server + "}": 0,
	})
}

// Both attempts die.
func TestLost(t *testing.T) {
	var r *rig
	r = newRig(t, func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/die" {
			r.KillConns()
			<-req.Context().Done()
		}
	})
	tr := r.transport(t)
	r.get(t, tr, r.URL)
	if err := r.send(t, tr, "GET", r.URL+"/die", ""); err == nil {
		t.Fatal("no error")
	}
	r.eventually(t, map[string]int64{
		"deadconn.retries{deadconn.cause=" + causeOf(r.events(1)) + ",deadconn.outcome=lost," + server + "}": 1,
	})
}

func causeOf(events string) string {
	_, s, _ := strings.Cut(events, "deadconn.cause=")
	return s[:strings.IndexAny(s, ",}")]
}

// A request is under way, and others wait for the dial of the first.
func TestOpenAndMerged(t *testing.T) {
	release := make(chan struct{})
	r := newRig(t, func(http.ResponseWriter, *http.Request) { <-release })
	r.dialer.SetDelay(200 * time.Millisecond)
	tr := r.transport(t)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() { r.send(t, tr, "GET", r.URL, "") })
	}
	r.eventually(t, map[string]int64{
		"http.client.open_connections{http.connection.state=active,network.protocol.version=2," + server + "}": 1,
		"deadconn.dials.merged{" + server + "}": 2,
	})
	close(release)
	wg.Wait()
}

// The path goes silent.
func TestSuspicion(t *testing.T) {
	r := newRig(t, ok)
	tr := r.transport(t)
	r.get(t, tr, r.URL)
	if err := faultnet.BlackholeSocket(r.dialer.Last()); err != nil {
		t.Skip("cannot make a black hole here:", err)
	}
	r.get(t, tr, r.URL)
	r.eventually(t, map[string]int64{
		"deadconn.suspicions{" + server + "}":                                                 1,
		"deadconn.evictions{deadconn.cause=silent,network.protocol.version=2," + server + "}": 1,
		"deadconn.retries{deadconn.cause=silent,deadconn.outcome=rescued," + server + "}":     1,
	})
}

// Of a connection that the base has dialed itself only the peer is known, and
// its protocol, if at all, by httptrace.
func TestWrap(t *testing.T) {
	r := newRig(t, ok)
	tr := deadconn.Options{Hooks: NewHooks(WithMeterProvider(r.provider))}.Wrap(r.base())
	r.get(t, tr, r.URL)
	r.dialer.Last().FailWrites(syscall.EPIPE)
	r.get(t, tr, r.URL)
	for range 500 {
		for name, n := range r.metrics(t) {
			if strings.HasPrefix(name, "deadconn.evictions{deadconn.cause=reset,") && strings.HasSuffix(name, server+"}") && n == 1 {
				return
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("no eviction: %v", lines(r.metrics(t)))
}

// Several Transports add up, until they are not observed any more.
func TestSeveralTransports(t *testing.T) {
	r := newRig(t, ok)
	const name = "http.client.open_connections{http.connection.state=idle,network.protocol.version=2," + server + "}"
	r.get(t, r.transport(t), r.URL)
	tr := deadconn.Options{Base: r.base()}.NewTransport()
	reg, err := Observe(tr, WithMeterProvider(r.provider))
	if err != nil {
		t.Fatal(err)
	}
	r.get(t, tr, r.URL)
	r.eventually(t, map[string]int64{name: 2})
	if err := reg.Unregister(); err != nil {
		t.Fatal(err)
	}
	r.eventually(t, map[string]int64{name: 1})
}

// The first hosts have a name, the others share one.
func TestServerLimit(t *testing.T) {
	const hosts, limit = 10, 3
	r := newRig(t, ok)
	base := r.base()
	base.TLSClientConfig.InsecureSkipVerify = true // the server has not these names
	base.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return r.dialer.DialContext(ctx, network, r.Addr())
	}
	opts := []Option{WithMeterProvider(r.provider), WithServerLimit(limit)}
	tr := deadconn.Options{Base: base, Hooks: NewHooks(opts...)}.NewTransport()
	reg, err := Observe(tr, opts...)
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Unregister()
	for range 2 {
		for i := range hosts {
			r.get(t, tr, fmt.Sprintf("https://host%d.test/", i))
			if i%2 == 0 {
				r.get(t, tr, fmt.Sprintf("https://[2001:db8::%d]:8080/", i))
			}
		}
		for _, c := range r.dialer.Conns() {
			c.FailWrites(syscall.EPIPE)
		}
	}
	const total = hosts + hosts/2
	r.eventually(t, map[string]int64{
		"http.client.open_connections{http.connection.state=idle,network.protocol.version=2,server.address=_other}": total - limit,
	})
	tr.CloseConnections()
	r.eventually(t, map[string]int64{
		"deadconn.retries{deadconn.cause=reset,deadconn.outcome=rescued,server.address=host0.test}":                   1,
		"deadconn.retries{deadconn.cause=reset,deadconn.outcome=rescued,server.address=2001:db8::0,server.port=8080}": 1,
		"deadconn.retries{deadconn.cause=reset,deadconn.outcome=rescued,server.address=_other}":                       total - limit,
		"http.client.connection.duration{network.protocol.version=2,server.address=host0.test,server.port=443}":       2,
		"http.client.connection.duration{network.protocol.version=2,server.address=2001:db8::0,server.port=8080}":     2,
		"http.client.connection.duration{network.protocol.version=2,server.address=_other}":                           2 * (total - limit),
		"deadconn.evictions{deadconn.cause=reset,network.protocol.version=2,server.address=_other}":                   total - limit,
	})
}

// Nothing of a request but its host is told.
func TestNoSecrets(t *testing.T) {
	const secret = "s3cr3t"
	var r *rig
	var kill atomic.Bool
	r = newRig(t, func(w http.ResponseWriter, req *http.Request) {
		io.Copy(io.Discard, req.Body)
		if kill.Load() {
			r.KillConns()
			<-req.Context().Done()
		}
	})
	tr := r.transport(t)
	url := strings.Replace(r.URL, "://", "://"+secret+":"+secret+"@", 1) + "/" + secret + "?q=" + secret + "#" + secret
	send := func(method string) error {
		ctx, span := r.tracer.Tracer("test").Start(t.Context(), method)
		defer span.End()
		req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(secret))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+secret)
		req.Header.Set("X-"+secret, secret)
		req.AddCookie(&http.Cookie{Name: secret, Value: secret})
		return do(tr, req)
	}
	failed := 0
	for _, method := range []string{"GET", "PUT", "POST"} {
		send(method)
		for _, c := range r.dialer.Conns() {
			c.FailWrites(syscall.EPIPE)
		}
		send(method)
		kill.Store(true)
		if send(method) != nil {
			failed++
		}
		kill.Store(false)
	}
	if failed != 3 {
		t.Errorf("%d requests failed, 3 should", failed)
	}
	r.eventually(t, map[string]int64{"deadconn.retries{deadconn.cause=reset,deadconn.outcome=rescued," + server + "}": 3})
	var texts []string
	events := 0
	for _, s := range r.spans.Ended() {
		for _, e := range s.Events() {
			events++
			texts = append(texts, fmt.Sprintf("%+v", e))
		}
		texts = append(texts, fmt.Sprintf("%+v %+v", s.Attributes(), s.Status()))
	}
	if events < 8 {
		t.Errorf("only %d events", events)
	}
	texts = append(texts, fmt.Sprintf("%+v", r.collect(t)), lines(r.metrics(t)))
	for _, text := range texts {
		if strings.Contains(strings.ToLower(text), secret) {
			t.Errorf("a secret is told: %s", text)
		}
	}
}

// Without a span and with the global provider nothing goes wrong.
func TestDefaults(t *testing.T) {
	r := newRig(t, ok)
	tr := deadconn.Options{Base: r.base(), Hooks: NewHooks(WithMeterProvider(nil))}.NewTransport()
	defer tr.CloseConnections()
	reg, err := Observe(tr)
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Unregister()
	for range 2 {
		req, _ := http.NewRequest("GET", r.URL, nil)
		if err := do(tr, req); err != nil {
			t.Fatal(err)
		}
		r.dialer.Last().FailWrites(syscall.EPIPE)
	}
}
