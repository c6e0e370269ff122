//go:build linux

package e2e

import (
	"context"
	"fmt"
	"maps"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A fault is what goes wrong.
type fault struct {
	name string
	full bool // only with -full

	sendBuffer, payload int // of the workload, if the fault needs it

	flow   func(*cluster, *workload) error // what becomes of a workload's connections
	common func(*cluster) error            // what becomes of all; returns when it is over
}

var faults = []fault{
	{name: "socket closed underneath", full: true, flow: func(c *cluster, w *workload) error {
		for _, nc := range w.dialer.live() {
			nc.CloseUnderneath()
		}
		return nil
	}},
	{name: "RST", flow: func(c *cluster, w *workload) error {
		for _, nc := range w.dialer.live() {
			if err := c.lab.RejectRST(nc); err != nil {
				return err
			}
		}
		return nil
	}},
	{name: "black hole of the connection", flow: func(c *cluster, w *workload) error {
		for _, nc := range w.dialer.live() {
			if err := c.lab.Cut(nc); err != nil {
				return err
			}
		}
		return nil
	}},
	{name: "stalled write", full: true, sendBuffer: 4096, payload: 64 << 10, flow: func(c *cluster, w *workload) error {
		for _, nc := range w.dialer.live() {
			if err := c.lab.CutOneWay(nc, true); err != nil {
				return err
			}
		}
		return nil
	}},
	{name: "black hole of everything for 60 s", full: true, common: func(c *cluster) error {
		if err := c.lab.CutPath(); err != nil {
			return err
		}
		time.Sleep(time.Minute)
		return c.lab.HealPath()
	}},
	{name: "kube-apiserver killed and restarted", common: func(c *cluster) error {
		c.kill()
		if err := c.start(); err != nil {
			return err
		}
		for deadline := time.Now().Add(time.Minute); !c.ready(); time.Sleep(50 * time.Millisecond) {
			if time.Now().After(deadline) {
				return errNotReady
			}
		}
		return nil
	}},
	{name: "SIGSTOP for 8 s", full: true, common: func(c *cluster) error {
		if err := c.signal(syscall.SIGSTOP); err != nil {
			return err
		}
		time.Sleep(8 * time.Second)
		return c.signal(syscall.SIGCONT)
	}},
}

// outcome is what a workload has noticed.
type outcome struct {
	gap, staleness        time.Duration
	lost                  int
	failed, failedCreates int
	dials                 int // because of the fault
	missed, duplicates    int
	failures              []error
}

func TestFaults(t *testing.T) {
	c := ready(t)
	results := make(map[string][]outcome)
	if !*plain && ways[0].name == "client-go" {
		ways = ways[1:]
	}
	for i, f := range faults {
		if f.full && !*full || !strings.Contains(f.name, *only) {
			continue
		}
		t.Run(f.name, func(t *testing.T) {
			defer func(was *testing.T) { c.t = was }(c.t)
			c.t = t
			results[f.name] = c.try(f, fmt.Sprintf("run-%d", i))
			if t.Failed() {
				t.Log(c.log())
			}
		})
	}
	text := report(results)
	t.Log("\n" + text)
	if *table != "" && !t.Failed() {
		if err := rewrite(*table, text); err != nil {
			t.Fatal(err)
		}
	}
}

// settled is how long all has to work again before a run ends.
const settled = 3 * time.Second

// longest bounds a run, after the fault is over.
const longest = 100 * time.Second

func (c *cluster) try(f fault, namespace string) []outcome {
	t := c.t
	ctx := context.Background()
	if _, err := c.admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	writer := c.startWriter(namespace)
	var all []*workload
	for _, way := range ways {
		all = append(all, c.startWorkload(way.name, way.protect, namespace, f.sendBuffer, f.payload))
	}
	time.Sleep(3 * time.Second)
	warm := time.Now().Add(-time.Second)
	dials := make([]int, len(all))
	for i, w := range all {
		w.failures, w.failedCreates = nil, 0
		dials[i] = w.dialer.count()
	}

	var flows errgroup.Group
	for _, w := range all {
		if f.flow != nil {
			flows.Go(func() error {
				w.awaitPause()
				return f.flow(c, w)
			})
		}
	}
	if err := flows.Wait(); err != nil {
		t.Fatal(err)
	}
	if f.common != nil {
		if err := f.common(c); err != nil {
			t.Fatal(err)
		}
	}
	over := time.Now()

	recent := func() map[string]time.Time {
		m := writer.times()
		maps.DeleteFunc(m, func(_ string, at time.Time) bool { return at.Before(warm) })
		return m
	}
	calm := func() bool {
		acked := recent()
		maps.DeleteFunc(acked, func(_ string, at time.Time) bool { return time.Since(at) < time.Second })
		for _, w := range all {
			if _, unseen := w.staleness(acked); unseen > 0 || !w.well(time.Now().Add(-2*renewal)) {
				return false
			}
		}
		return true
	}
	// At least until a probe, a retransmission or a PING has had its time.
	time.Sleep(5 * time.Second)
	for since := time.Now(); time.Since(since) < settled && time.Since(over) < longest; time.Sleep(50 * time.Millisecond) {
		if !calm() {
			since = time.Now()
		}
	}

	outcomes := make([]outcome, len(all))
	for i, w := range all {
		outcomes[i] = outcome{gap: w.gap(warm), dials: w.dialer.count() - dials[i]}
	}
	writer.stop()
	for _, w := range all {
		w.stopCreates()
	}
	time.Sleep(2 * time.Second)
	exist, err := c.admin.CoreV1().ConfigMaps(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i, w := range all {
		o := &outcomes[i]
		o.staleness, _ = w.staleness(recent())
		w.mu.Lock()
		o.lost, o.failed, o.failedCreates, o.failures = w.lost, len(w.failures), w.failedCreates, w.failures
		ops := make(map[string]int)
		for _, cm := range exist.Items {
			if _, ok := w.seen[cm.Name]; !ok {
				o.missed++
			}
			if cm.Labels["way"] == id(w.way) {
				if ops[cm.Labels["op"]]++; ops[cm.Labels["op"]] > 1 {
					o.duplicates++
				}
			}
		}
		w.mu.Unlock()
		w.stop()
		o.judge(t, f.name, w.way)
	}
	c.lab.Heal()
	return outcomes
}

// judge asserts what deadconn promises.
func (o *outcome) judge(t *testing.T, fault, way string) {
	t.Logf("%-10s gap %v, stale %v, lost %d, failed %d, failed creates %d, dials %d, missed %d, duplicates %d",
		way, round(o.gap), round(o.staleness), o.lost, o.failed, o.failedCreates, o.dials, o.missed, o.duplicates)
	for _, err := range o.failures {
		t.Logf("           %v", err)
	}
	require := func(ok bool, what string) {
		if !ok {
			t.Errorf("%s, %s: %s", fault, way, what)
		}
	}
	require(o.missed == 0, "events were missed")
	require(o.duplicates == 0, "something was written twice")
	if way == "client-go" {
		return
	}
	protect := way == "Protect"
	switch fault {
	case "socket closed underneath", "RST":
		require(o.failed == 0, "calls failed")
		require(o.lost == 0, "leadership was lost")
	case "black hole of the connection":
		require(o.lost == 0, "leadership was lost")
		require(o.gap < 15*time.Second, "no Lease update for 15 s")
		if protect {
			require(o.gap < 5*time.Second, "no Lease update for 5 s")
			require(o.staleness < 5*time.Second, "the informer was 5 s behind")
		}
	case "SIGSTOP for 8 s":
		require(o.dials == 0, "the connection was given up")
		require(o.lost == 0, "leadership was lost")
	}
}

// report makes the README's table.
func report(results map[string][]outcome) string {
	var b strings.Builder
	b.WriteString("| fault | | longest gap between Lease updates | informer behind by | leadership | failed calls | failed creates | dials | events missed | duplicate writes |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|\n")
	for _, f := range faults {
		for i, o := range results[f.name] {
			name, kept := f.name, "kept"
			if i > 0 {
				name = ""
			}
			if o.lost > 0 {
				kept = "lost"
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %d | %d | %d | %d | %d |\n", name, ways[i].name,
				round(o.gap), round(o.staleness), kept, o.failed, o.failedCreates, o.dials, o.missed, o.duplicates)
		}
	}
	fmt.Fprintf(&b, "\nOne run, %s %s/%s, %d cores, kube-apiserver v1.37.2, client-go v0.37.2.\n", runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	return b.String()
}

func round(d time.Duration) string {
	return fmt.Sprintf("%.1f s", d.Seconds())
}

const (
	begin = "<!-- faults:begin -->\n"
	end   = "<!-- faults:end -->"
)

// rewrite puts text between the marks of a file.
func rewrite(name, text string) error {
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(b), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no marks for the table", name)
	}
	return os.WriteFile(name, []byte(head+begin+text+end+tail), 0o644)
}
