// Command costtable measures what deadconn costs and writes the figures into
// README.md, between <!-- cost:begin --> and <!-- cost:end -->:
//
//	go run ./internal/costtable
//
// It runs the benchmarks in bench_test.go five times, which takes about a
// minute and a half, and takes the median of each figure. Keep the machine
// quiet meanwhile.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

const (
	begin = "<!-- cost:begin -->"
	end   = "<!-- cost:end -->"
)

const benchmarks = "^Benchmark(WrapNoBase|GET|GETParallel|Track|Evict|Checkout)$"

func main() {
	file := flag.String("file", "README.md", "the file to write to; - prints the block")
	count := flag.Int("count", 5, "how often each benchmark runs")
	flag.Parse()
	if err := run(*file, *count); err != nil {
		fmt.Fprintln(os.Stderr, "costtable:", err)
		os.Exit(1)
	}
}

func run(file string, count int) error {
	cmd := exec.Command("go", "test", "-run", "^$", "-bench", benchmarks, "-count", strconv.Itoa(count), ".")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%v: %w\n%s", cmd, err, out)
	}
	block, err := table(parse(string(out)), count)
	if err != nil {
		return err
	}
	if file == "-" {
		fmt.Print(block)
		return nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	text, err = replace(text, block)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return os.WriteFile(file, text, 0o644)
}

// results are the figures of all runs, by benchmark and unit, and the name of
// the processor.
type results struct {
	figures map[string][]float64 // the key is "GET/Wrap ratio"
	cpu     string
}

// parse reads what go test -bench prints.
func parse(out string) results {
	r := results{figures: make(map[string][]float64)}
	for line := range strings.Lines(out) {
		if cpu, ok := strings.CutPrefix(line, "cpu: "); ok {
			r.cpu = strings.TrimSpace(cpu)
		}
		f := strings.Fields(line)
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		name := strings.TrimPrefix(f[0], "Benchmark")
		name = strings.TrimSuffix(name, "-"+strconv.Itoa(runtime.GOMAXPROCS(0)))
		for i := 2; i+1 < len(f); i += 2 {
			if v, err := strconv.ParseFloat(f[i], 64); err == nil {
				key := name + " " + f[i+1]
				r.figures[key] = append(r.figures[key], v)
			}
		}
	}
	return r
}

// table returns the block for the README. It fails if a figure is missing.
func table(r results, count int) (string, error) {
	var missing []string
	m := func(key string) float64 {
		v := slices.Clone(r.figures[key])
		if len(v) == 0 {
			missing = append(missing, key)
			return 0
		}
		slices.Sort(v)
		return v[len(v)/2]
	}
	us := func(key string) string { return fmt.Sprintf("%.1f µs", m(key)/1000) }
	ns := func(key string) string { return fmt.Sprintf("%.0f ns", m(key)) }

	var b bytes.Buffer
	row := func(what, ours, bare string) { fmt.Fprintf(&b, "| %s | %s | %s |\n", what, ours, bare) }
	b.WriteString("| | deadconn | without |\n|---|---|---|\n")
	row("a GET over HTTP/2, loopback, NewTransport", fmt.Sprintf("%s (ratio %.3f)", us("GET/NewTransport ours-ns/op"), m("GET/NewTransport ratio")), us("GET/NewTransport bare-ns/op"))
	row("the same, Wrap", fmt.Sprintf("%s (ratio %.3f)", us("GET/Wrap ours-ns/op"), m("GET/Wrap ratio")), us("GET/Wrap bare-ns/op"))
	row("its allocations, NewTransport, server's included", fmt.Sprintf("%.0f", m("GETParallel/NewTransport allocs/op")), fmt.Sprintf("%.0f", m("GETParallel/net/http allocs/op")))
	row("64 goroutines on one Transport, time per GET (not paired)", us("GETParallel/NewTransport ns/op"), us("GETParallel/net/http ns/op"))
	row("Wrap over a base that does nothing", fmt.Sprintf("%s, %.0f allocations, %.0f B", ns("WrapNoBase/Wrap ns/op"), m("WrapNoBase/Wrap allocs/op"), m("WrapNoBase/Wrap B/op")), ns("WrapNoBase/bare ns/op"))
	row("a tracked connection, memory", fmt.Sprintf("%.0f B", m("Track B/op")), "-")
	row("track and untrack it, beside 100,000", ns("Track ns/op"), "-")
	row("evict one of 100,000 (without the kernel's close)", ns("Evict ns/op"), "-")
	row("ask a socket whether the peer has closed it", ns("Checkout ns/op"), "-")
	if len(missing) > 0 {
		return "", fmt.Errorf("go test -bench printed no %s", strings.Join(missing, ", no "))
	}
	fmt.Fprintf(&b, "\nMedians of %d runs, %s %s/%s, %d cores (%s).\n",
		count, runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), r.cpu)
	return b.String(), nil
}

// replace puts block between the marks in text.
func replace(text []byte, block string) ([]byte, error) {
	before, rest, ok := bytes.Cut(text, []byte(begin))
	_, after, ok2 := bytes.Cut(rest, []byte(end))
	if !ok || !ok2 {
		return nil, fmt.Errorf("no %s and %s", begin, end)
	}
	return slices.Concat(before, []byte(begin+"\n"+block+end), after), nil
}
