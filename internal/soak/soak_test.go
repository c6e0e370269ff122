package soak

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/deadconn/deadconn"
)

var (
	soakFlag = flag.Duration("soak", 0, "how long the soak takes; 0: $DEADCONN_SOAK, or else no soak")
	seedFlag = flag.Int64("seed", 0, "what the traffic and the faults are made from; 0: the time")
)

func soakTime() (time.Duration, error) {
	if *soakFlag > 0 {
		return *soakFlag, nil
	}
	if s := os.Getenv("DEADCONN_SOAK"); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil || d <= 0 {
			return 0, fmt.Errorf("DEADCONN_SOAK=%q is no duration", s)
		}
		return d, nil
	}
	return 0, nil
}

// windDown is what a soak takes after its time: the last requests run into
// deadlines, bodies are closed late, things settle.
const windDown = 45 * time.Second

func TestMain(m *testing.M) {
	flag.Parse()
	// -soak=10m is meant to do without -timeout, whose default is 10m. (The go
	// command kills a test a minute after that.)
	if d, err := soakTime(); err == nil && d+windDown > 10*time.Minute {
		if f := flag.Lookup("test.timeout"); f.Value.String() == (10 * time.Minute).String() {
			f.Value.Set((d + 2*windDown).String())
		}
	}
	os.Exit(m.Run())
}

func TestSoak(t *testing.T) {
	d, err := soakTime()
	if err != nil {
		t.Fatal(err)
	}
	if d == 0 {
		t.Skip("a soak takes as long as -soak or DEADCONN_SOAK says, and nothing says so")
	}
	seed := *seedFlag
	if seed == 0 {
		seed = time.Now().UnixNano()
	}
	t.Logf("seed %d, %v: to repeat, go test ./internal/soak -soak=%v -seed=%d", seed, d, d, seed)

	goroutines, before := goroutineStacks(), heap()
	w := newWorld(seed)
	w.addClient("new", newTransport)
	w.addClient("registry", registryAndWrap)
	w.addClient("wrap", wrap)
	w.run(d, makePlan(seed, d, len(w.clients)))
	w.settle()
	w.close()
	w.report(t)
	clear(w.records)
	clear(w.byAddr)
	clear(w.pending)
	after := heap()
	t.Logf("heap: %d KiB before, %d KiB after", before>>10, after>>10)
	if after > before+maxGrowth {
		t.Errorf("seed %d: the heap has grown from %d to %d KiB", seed, before>>10, after>>10)
	}
	runtime.KeepAlive(w)
	if n := w.counters.succeeded.Load(); n < 100 {
		t.Errorf("seed %d: %d requests succeeded: the soak tells nothing", seed, n)
	}
	if n := w.counters.faults.Load(); n < 10 {
		t.Errorf("seed %d: %d faults: the soak tells nothing", seed, n)
	}

	for end := time.Now().Add(15 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		left := newGoroutines(goroutines)
		if len(left) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Errorf("seed %d: %d goroutines left behind:\n\n%s", seed, len(left), strings.Join(left, "\n\n"))
			break
		}
	}
}

// TestRulesBite proves that the soak can fail: each of these transports breaks
// one rule, and the soak must say so.
func TestRulesBite(t *testing.T) {
	// Each runs until the rule has spoken, or this long.
	const limit = 20 * time.Second
	for _, tt := range []struct {
		name   string
		client makeClient
		rule   rule
	}{
		{"bare net/http", bare, ruleRescued},
		{"a retry of everything", naive, ruleOnce},
		{"a body closed twice", sabotage(closesTwice), ruleBody},
		{"a body never closed", sabotage(neverCloses), ruleBody},
		{"a response cut short", sabotage(truncates), ruleAnswer},
		{"somebody else's response", sabotage(swaps), ruleAnswer},
		{"an error out of the blue", sabotage(fails), ruleUntouched},
		{"a healthy connection evicted", sabotage(evicts), ruleEviction},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(1)
			w.addClient("control", tt.client)
			w.until, w.late = tt.rule, time.Second
			w.run(limit, makePlan(1, limit, 1))
			w.settle()
			w.close()
			if w.violated(tt.rule) == 0 {
				t.Errorf("the soak has not noticed: no violation of %q in %d requests and %d faults",
					tt.rule, w.counters.sent.Load(), w.counters.faults.Load())
			}
			if tt.rule != ruleRescued && tt.rule != ruleOnce {
				return
			}
			for r := range rules {
				// net/http by itself may lose a request. It also forgets to
				// close a body that it got from GetBody, when the pool has no
				// HTTP/2 connection for it any more, and gets another.
				if r := rule(r); r == ruleAnswer || r == ruleEviction {
					if n := w.violated(r); n > 0 {
						t.Errorf("%d violations of %q by net/http: the soak cries wolf\n%s", n, r, w.text())
					}
				}
			}
		})
	}
}

func heap() uint64 {
	var m runtime.MemStats
	for range 3 {
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// goroutineStacks returns the goroutines by their id.
func goroutineStacks() map[string]string {
	buf := make([]byte, 8<<20)
	buf = buf[:runtime.Stack(buf, true)]
	all := make(map[string]string)
	for g := range strings.SplitSeq(string(buf), "\n\n") {
		id, _, _ := strings.Cut(g, " [")
		all[id] = g
	}
	return all
}

func newGoroutines(old map[string]string) (left []string) {
	for id, stack := range goroutineStacks() {
		if _, ok := old[id]; !ok {
			left = append(left, stack)
		}
	}
	return left
}

// transportSettings are those of all clients here. Silence is given up sooner
// than by default, or no run of a minute would see it.
func transportSettings(c *client) *http.Transport {
	return &http.Transport{
		DialContext:         c.dial,
		TLSClientConfig:     c.w.clientTLS(),
		ForceAttemptHTTP2:   true,
		MaxIdleConnsPerHost: 8,
		TLSHandshakeTimeout: 10 * time.Second,
		HTTP2: &http.HTTP2Config{
			SendPingTimeout:  pingInterval,
			PingTimeout:      pingTimeout,
			WriteByteTimeout: writeTimeout,
		},
	}
}

const (
	pingInterval = 2 * time.Second
	pingTimeout  = 4 * time.Second // of a busy machine's scheduler, with -race
	writeTimeout = 4 * time.Second
)

type makeClient func(c *client)

func newTransport(c *client) {
	base := transportSettings(c)
	base.HTTP2 = nil
	c.reg = new(deadconn.Registry)
	t := deadconn.Options{
		Base:     base,
		Registry: c.reg,
		Hooks:    c.hooks(),
		Health:   deadconn.Health{PingInterval: pingInterval, PingTimeout: pingTimeout, WriteTimeout: writeTimeout},
	}.NewTransport()
	c.rt, c.deadconn, c.owns = t, t, true
}

func registryAndWrap(c *client) {
	base := transportSettings(c)
	c.reg = &deadconn.Registry{Dial: c.dial}
	base.DialContext = c.reg.DialContext
	rt := deadconn.Options{Registry: c.reg, Hooks: c.hooks()}.Wrap(base)
	c.rt, c.deadconn = rt, rt.(*deadconn.Transport)
}

func wrap(c *client) {
	c.foreign = true
	rt := deadconn.Options{Hooks: c.hooks()}.Wrap(transportSettings(c))
	c.rt, c.deadconn = rt, rt.(*deadconn.Transport)
}

func bare(c *client) { c.rt = transportSettings(c) }
