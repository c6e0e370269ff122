package promdeadconn

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.yaml.in/yaml/v3"
)

// tool returns the path of a program of Debian's package "prometheus".
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not installed (apt-get install prometheus): %v", name, err)
	}
	return path
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if out, err := exec.CommandContext(ctx, tool(t, name), args...).CombinedOutput(); err != nil {
		t.Errorf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

type ruleFile struct {
	Groups []struct {
		Name  string
		Rules []struct {
			Alert, Expr, For    string
			Labels, Annotations map[string]string
		}
	}
}

type dashboard struct {
	Title, UID    string
	SchemaVersion int
	Templating    struct {
		List []struct{ Name, Type, Definition string }
	}
	Panels []struct {
		ID      int
		Title   string
		Type    string
		GridPos struct{ X, Y, W, H int }
		Targets []struct{ Expr, LegendFormat string }
	}
}

func load[T any](t *testing.T, name string, unmarshal func([]byte, any) error) (v T) {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := unmarshal(b, &v); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return v
}

// alerts returns the expressions of the alert rules, by name.
func alerts(t *testing.T) map[string]string {
	t.Helper()
	exprs := make(map[string]string)
	for _, g := range load[ruleFile](t, "alerts.yml", yaml.Unmarshal).Groups {
		for _, r := range g.Rules {
			if r.Alert == "" || r.Expr == "" || r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
				t.Errorf("something is missing: %+v", r)
			}
			exprs[r.Alert] = r.Expr
		}
	}
	return exprs
}

// queries returns the expressions of the dashboard, by panel and number, as
// Grafana would send them.
func queries(t *testing.T) map[string]string {
	t.Helper()
	d := load[dashboard](t, "grafana.json", json.Unmarshal)
	fill := strings.NewReplacer("$__rate_interval", "1m", "$__range", "1h", "$job", ".*", "$instance", ".*")
	exprs := make(map[string]string)
	ids := make(map[int]bool)
	for _, p := range d.Panels {
		if p.Title == "" || p.Type == "" || len(p.Targets) == 0 || ids[p.ID] || p.GridPos.X+p.GridPos.W > 24 || p.GridPos.W*p.GridPos.H == 0 {
			t.Errorf("panel %+v", p)
		}
		ids[p.ID] = true
		for i, q := range p.Targets {
			expr := fill.Replace(q.Expr)
			if strings.Contains(expr, "$") {
				t.Errorf("%s: a variable that is not known: %s", p.Title, q.Expr)
			}
			exprs[fmt.Sprintf("%s %d", p.Title, i)] = expr
		}
	}
	for _, v := range d.Templating.List {
		if v.Type == "query" {
			exprs["variable "+v.Name] = fill.Replace(regexp.MustCompile(`deadconn_\w+({.*?})?`).FindString(v.Definition))
		}
	}
	if d.Title == "" || d.UID == "" || d.SchemaVersion == 0 || len(exprs) < 10 {
		t.Errorf("dashboard %+v", d)
	}
	return exprs
}

// The dashboard and the alerts know no metric and no label value that there is
// not, and together know every metric.
func TestAssetsNames(t *testing.T) {
	known := families(t)
	used := make(map[string]bool)
	for _, exprs := range []map[string]string{alerts(t), queries(t)} {
		for where, expr := range exprs {
			names := regexp.MustCompile(`deadconn_\w+`).FindAllString(expr, -1)
			if len(names) == 0 {
				t.Errorf("%s: no metric in %q", where, expr)
			}
			for _, name := range names {
				used[name] = true
				if !known[name] {
					t.Errorf("%s: there is no metric %s", where, name)
				}
			}
			for _, m := range regexp.MustCompile(`(deadconn_\w+){[^}]*?(cause|outcome)=~?"([^"]*)"`).FindAllStringSubmatch(expr, -1) {
				for value := range strings.SplitSeq(m[3], "|") {
					if sample := fmt.Sprintf("%s{%s=%q}", m[1], m[2], value); zero[sample] == "" {
						t.Errorf("%s: there is no %s", where, sample)
					}
				}
			}
		}
	}
	for name := range known {
		if !used[name] {
			t.Errorf("%s is neither on the dashboard nor in an alert", name)
		}
	}
}

// Prometheus' own tool reads the alert rules, and each of them fires when it
// should and only then.
func TestPromtool(t *testing.T) {
	run(t, "promtool", "check", "rules", "alerts.yml")
	run(t, "promtool", "test", "rules", filepath.Join("testdata", "alerts_test.yml"))

	// It does not read dashboards: give it their queries as rules.
	var rules strings.Builder
	rules.WriteString("groups: [{name: dashboard, rules: [\n")
	n := 0
	for _, expr := range queries(t) {
		fmt.Fprintf(&rules, "{record: 'panel:%d', expr: %q},\n", n, expr)
		n++
	}
	rules.WriteString("]}]\n")
	file := filepath.Join(t.TempDir(), "dashboard.yml")
	if err := os.WriteFile(file, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, "promtool", "check", "rules", file)
}

// A real Prometheus scrapes a Transport whose connections die. The alert for
// lost requests fires, and every panel of the dashboard has data.
func TestPrometheus(t *testing.T) {
	program := tool(t, "prometheus")
	r := newRig(t)
	reg := prometheus.NewRegistry()
	reg.MustRegister(NewCollector(r.transport, prometheus.Labels{"client": "test"}))
	target := httptest.NewServer(promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	defer target.Close()

	dir := t.TempDir()
	rules, err := filepath.Abs("alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "prometheus.yml")
	text := fmt.Sprintf("global: {scrape_interval: 100ms, scrape_timeout: 100ms, evaluation_interval: 100ms}\nrule_files: [%q]\n"+
		"scrape_configs: [{job_name: test, static_configs: [{targets: [%q]}]}]\n", rules, target.Listener.Addr())
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	addr := freeAddr(t)
	ctx, cancel := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, program, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+addr)
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cancel()
		cmd.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	}()

	ask := func(expr string) int { return results("http://"+addr, expr) }
	eventually(t, "a scrape before anything died", func() bool { return ask("deadconn_open_connections") == 1 })
	r.die(t)
	eventually(t, "the alert", func() bool {
		return ask(`ALERTS{alertname="DeadconnRequestsLost",alertstate="firing",client="test"}`) == 1
	})
	for panel, expr := range queries(t) {
		if ask(expr) < 1 {
			t.Errorf("%s: no data: %s", panel, expr)
		}
	}
	if n := ask(`ALERTS{alertname!="DeadconnRequestsLost",alertstate="firing"}`); n != 0 {
		t.Errorf("%d other alerts", n)
	}
}

// results returns how many time series a query gives; -1: none can be had.
func results(prom, expr string) int {
	resp, err := http.Get(prom + "/api/v1/query?query=" + url.QueryEscape(expr))
	if err != nil {
		return -1
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	var answer struct {
		Status string
		Data   struct{ Result []any }
	}
	if err != nil || json.Unmarshal(b, &answer) != nil || answer.Status != "success" {
		return -1
	}
	return len(answer.Data.Result)
}

func freeAddr(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !cond(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
	}
}
