package promdeadconn_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
	"github.com/deadconn/deadconn/promdeadconn"
)

// A connection in the pool dies, a request is rescued, and Prometheus comes by.
func Example() {
	server := faultnet.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "ok")
	}))
	defer server.Close()
	var dialer faultnet.Dialer // its connections die on request

	transport := deadconn.Options{
		Base: &http.Transport{DialContext: dialer.DialContext, TLSClientConfig: server.ClientTLS(), ForceAttemptHTTP2: true},
	}.NewTransport()
	defer transport.CloseConnections()
	registry := prometheus.NewRegistry()
	registry.MustRegister(promdeadconn.NewCollector(transport, prometheus.Labels{"client": "billing"}))
	metrics := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	defer metrics.Close()

	client := &http.Client{Transport: transport}
	get(client, server.URL)
	dialer.Last().FailWrites(syscall.EPIPE)
	get(client, server.URL)

	for line := range strings.Lines(get(http.DefaultClient, metrics.URL)) {
		if strings.HasPrefix(line, "deadconn_requests") || strings.Contains(line, "reset") {
			fmt.Print(line)
		}
	}
	// Output:
	// deadconn_evictions_total{cause="reset",client="billing"} 1
	// deadconn_requests_not_retried_total{client="billing"} 0
	// deadconn_requests_resent_total{client="billing",outcome="lost"} 0
	// deadconn_requests_resent_total{client="billing",outcome="rescued"} 1
}

func get(c *http.Client, url string) string {
	resp, err := c.Get(url)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err.Error()
	}
	return string(b)
}
