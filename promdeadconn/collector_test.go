package promdeadconn

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
)

// A rig is a server, a Transport, and a dialer whose connections die on
// request.
type rig struct {
	*faultnet.Server
	dialer    faultnet.Dialer
	transport *deadconn.Transport
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := new(rig)
	r.Server = faultnet.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/die" {
			r.KillConns()
			<-req.Context().Done()
		}
	}))
	r.transport = deadconn.Options{Base: &http.Transport{
		DialContext: r.dialer.DialContext, TLSClientConfig: r.ClientTLS(), ForceAttemptHTTP2: true,
	}}.NewTransport()
	t.Cleanup(func() {
		r.transport.CloseConnections()
		r.dialer.CloseAll()
		r.Close()
	})
	return r
}

func (r *rig) get(path string) error {
	req, err := http.NewRequest("GET", r.URL+path, nil)
	if err != nil {
		return err
	}
	resp, err := r.transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// die rescues one request and loses another, at three connections' cost.
func (r *rig) die(t *testing.T) {
	t.Helper()
	for range 2 {
		if err := r.get("/s3cr3t?q=s3cr3t"); err != nil {
			t.Fatal(err)
		}
		r.dialer.Last().FailWrites(syscall.EPIPE)
	}
	r.dialer.Last().Heal()
	if err := r.get("/die"); err == nil {
		t.Fatal("no error")
	}
}

// scrape gets what a Prometheus server would get, by the sample's name and
// labels.
func scrape(t *testing.T, reg *prometheus.Registry) map[string]string {
	t.Helper()
	s := httptest.NewServer(promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}))
	defer s.Close()
	resp, err := http.Get(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%s, %v: %s", resp.Status, err, body)
	}
	samples := make(map[string]string)
	for line := range strings.Lines(string(body)) {
		if i := strings.LastIndexByte(line, ' '); line[0] != '#' {
			samples[line[:i]] = strings.TrimSpace(line[i:])
		}
	}
	return samples
}

var zero = map[string]string{
	`deadconn_open_connections`:                            "0",
	`deadconn_dials_total`:                                 "0",
	`deadconn_dials_merged_total`:                          "0",
	`deadconn_suspicions_total`:                            "0",
	`deadconn_evictions_total{cause="closed"}`:             "0",
	`deadconn_evictions_total{cause="eof"}`:                "0",
	`deadconn_evictions_total{cause="goaway"}`:             "0",
	`deadconn_evictions_total{cause="goaway_calm"}`:        "0",
	`deadconn_evictions_total{cause="goaway_unprocessed"}`: "0",
	`deadconn_evictions_total{cause="not_established"}`:    "0",
	`deadconn_evictions_total{cause="ping_lost"}`:          "0",
	`deadconn_evictions_total{cause="protocol"}`:           "0",
	`deadconn_evictions_total{cause="reset"}`:              "0",
	`deadconn_evictions_total{cause="silent"}`:             "0",
	`deadconn_evictions_total{cause="timed_out"}`:          "0",
	`deadconn_requests_not_retried_total`:                  "0",
	`deadconn_retries_total`:                               "0",
	`deadconn_requests_resent_total{outcome="rescued"}`:    "0",
	`deadconn_requests_resent_total{outcome="lost"}`:       "0",
	`deadconn_hooks_dropped_total`:                         "0",
}

// What is scraped before and after connections have died.
func TestScrape(t *testing.T) {
	r := newRig(t)
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(NewCollector(r.transport, nil))
	if got := scrape(t, reg); !maps.Equal(got, zero) {
		t.Errorf("at first: %v", got)
	}
	r.die(t)
	got := scrape(t, reg)
	stats := r.transport.Stats()
	for name, want := range map[string]string{
		`deadconn_dials_total`:                              fmt.Sprint(stats.Dialed),
		`deadconn_dials_merged_total`:                       fmt.Sprint(stats.DialsMerged),
		`deadconn_requests_resent_total{outcome="rescued"}`: "1",
		`deadconn_requests_resent_total{outcome="lost"}`:    "1",
		`deadconn_retries_total`:                            "2",
	} {
		if got[name] != want {
			t.Errorf("%s is %s, want %s", name, got[name], want)
		}
	}
	for name, v := range got {
		if _, ok := zero[name]; !ok || strings.Contains(name, "s3cr3t") {
			t.Errorf("%s %s is unexpected", name, v)
		}
	}
	for k, n := range stats.EvictedBy {
		if name := fmt.Sprintf("deadconn_evictions_total{cause=%q}", deadconn.Kind(k)); n > 0 && got[name] != fmt.Sprint(n) {
			t.Errorf("%s is %s, want %d", name, got[name], n)
		}
	}
	if got[`deadconn_evictions_total{cause="reset"}`] == "0" {
		t.Error("nothing was evicted")
	}
}

// The names are by Prometheus' conventions.
func TestLint(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(NewCollector(deadconn.NewTransport(), prometheus.Labels{"client": "a"}))
	problems, err := testutil.GatherAndLint(reg)
	if err != nil || len(problems) != 0 {
		t.Errorf("%v, %v", problems, err)
	}
	s := httptest.NewServer(promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	defer s.Close()
	resp, err := http.Get(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if problems, err := promlint.New(resp.Body).Lint(); err != nil || len(problems) != 0 {
		t.Errorf("%v, %v", problems, err)
	}
}

// The same labels twice are refused, as usual; others are not.
func TestRegister(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	one := NewCollector(deadconn.NewTransport(), prometheus.Labels{"client": "a"})
	if err := reg.Register(one); err != nil {
		t.Fatal(err)
	}
	err := reg.Register(NewCollector(deadconn.NewTransport(), prometheus.Labels{"client": "a"}))
	var already prometheus.AlreadyRegisteredError
	if !errors.As(err, &already) || already.ExistingCollector != one {
		t.Errorf("%v", err)
	}
	if err := reg.Register(NewCollector(deadconn.NewTransport(), prometheus.Labels{"client": "b"})); err != nil {
		t.Error(err)
	}
	got := scrape(t, reg)
	if len(got) != 2*len(zero) || got[`deadconn_dials_total{client="b"}`] != "0" {
		t.Errorf("%v", got)
	}
	if err := reg.Register(NewCollector(deadconn.NewTransport(), prometheus.Labels{"cause": "a"})); err == nil {
		t.Error("a label that is in use is not refused")
	}
	if !reg.Unregister(one) {
		t.Error("cannot be unregistered")
	}
}

// families returns the names of the metrics that are collected.
func families(t *testing.T) map[string]bool {
	t.Helper()
	names := make(map[string]bool)
	for sample := range zero {
		names[regexp.MustCompile(`\w+`).FindString(sample)] = true
	}
	return names
}
