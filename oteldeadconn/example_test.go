package oteldeadconn_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"syscall"
	"time"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
	"github.com/deadconn/deadconn/oteldeadconn"
)

// A connection in the pool dies. The request that meets it is rescued; its
// span and the metrics tell of it.
func Example() {
	server := faultnet.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "ok")
	}))
	defer server.Close()
	var dialer faultnet.Dialer // its connections die on request

	// The SDK, with an exporter of your own.
	reader := metric.NewManualReader()
	meters := metric.NewMeterProvider(metric.WithReader(reader))
	spans := tracetest.NewSpanRecorder()
	tracer := trace.NewTracerProvider(trace.WithSpanProcessor(spans)).Tracer("example")

	transport := deadconn.Options{
		Base:  &http.Transport{DialContext: dialer.DialContext, TLSClientConfig: server.ClientTLS(), ForceAttemptHTTP2: true},
		Hooks: oteldeadconn.NewHooks(oteldeadconn.WithMeterProvider(meters)),
	}.NewTransport()
	observed, err := oteldeadconn.Observe(transport, oteldeadconn.WithMeterProvider(meters))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer observed.Unregister()
	client := &http.Client{Transport: transport}

	// otelhttp.NewTransport(transport) would make the span by itself.
	get := func() {
		ctx, span := tracer.Start(context.Background(), "GET")
		defer span.End()
		req, _ := http.NewRequestWithContext(ctx, "GET", server.URL, nil)
		resp, err := client.Do(req)
		if err != nil {
			fmt.Println(err)
			return
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	get()
	dialer.Last().FailWrites(syscall.EPIPE)
	get()

	for _, span := range spans.Ended() {
		fmt.Println("span", span.Name())
		for _, e := range span.Events() {
			fmt.Println("  event", e.Name, e.Attributes[0].Value.AsString())
		}
	}
	// Evictions are told of 100 ms later.
	counts := make(map[string]int64)
	for len(counts) < 2 {
		time.Sleep(10 * time.Millisecond)
		var rm metricdata.ResourceMetrics
		if err := reader.Collect(context.Background(), &rm); err != nil {
			fmt.Println(err)
			return
		}
		for _, scope := range rm.ScopeMetrics {
			for _, m := range scope.Metrics {
				if m.Name == "deadconn.evictions" || m.Name == "deadconn.retries" {
					counts[m.Name] = m.Data.(metricdata.Sum[int64]).DataPoints[0].Value
				}
			}
		}
	}
	fmt.Println("deadconn.evictions", counts["deadconn.evictions"])
	fmt.Println("deadconn.retries", counts["deadconn.retries"])
	// Output:
	// span GET
	// span GET
	//   event deadconn.evicted reset
	//   event deadconn.retried reset
	// deadconn.evictions 1
	// deadconn.retries 1
}
