package bench

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// A Report is everything that one run of the command found out.
type Report struct {
	Date    string
	Machine string
	Go      string
	Modules map[string]string
	Servers []string `json:",omitempty"` // the real ones
	Runs    int
	Took    string
	LeftOut []string
	Results []Result
	Costs   []Cost
}

// NewReport returns a report without results.
func NewReport(runs int) *Report {
	r := &Report{
		Date:    time.Now().UTC().Format("2006-01-02"),
		Machine: machine(),
		Go:      runtime.Version(),
		Modules: make(map[string]string),
		Servers: serverVersions(),
		Runs:    runs,
		LeftOut: slices.Clone(LeftOut),
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			r.Modules[m.Path] = m.Version
			if m.Replace != nil {
				r.Modules[m.Path] = "this tree"
			}
		}
	}
	return r
}

// ReadReport reads the results.json in dir.
func ReadReport(dir string) (*Report, error) {
	b, err := os.ReadFile(filepath.Join(dir, "results.json"))
	if err != nil {
		return nil, err
	}
	r := new(Report)
	return r, json.Unmarshal(b, r)
}

// Keep takes over from old, an earlier run on the same machine, what r did not
// run itself.
func (r *Report) Keep(old *Report) {
	own := r.Results
	for _, res := range old.Results {
		if !slices.ContainsFunc(own, func(x Result) bool { return x.Row == res.Row && x.Contestant == res.Contestant }) {
			r.Results = append(r.Results, res)
		}
	}
	if r.Costs == nil {
		r.Costs = old.Costs
	}
	r.Took = old.Took
}

// LeaveOut adds a row that could not be run, and why.
func (r *Report) LeaveOut(why string) { r.LeftOut = append(r.LeftOut, why) }

func machine() string {
	s := fmt.Sprintf("%s/%s, %d CPUs", runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	if f, err := os.Open("/proc/cpuinfo"); err == nil {
		defer f.Close()
		for sc := bufio.NewScanner(f); sc.Scan(); {
			if k, v, ok := strings.Cut(sc.Text(), ":"); ok && strings.TrimSpace(k) == "model name" {
				s += ", " + strings.TrimSpace(v)
				break
			}
		}
	}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		s += ", kernel " + strings.TrimSpace(string(b))
	}
	return s
}

// cell has all runs of a contestant in a row.
type cell []Result

func (r *Report) cell(row, who string) (c cell) {
	for _, res := range r.Results {
		if res.Row == row && res.Contestant == who {
			c = append(c, res)
		}
	}
	return c
}

func (c cell) values(f func(Result) float64) []float64 {
	var v []float64
	for _, res := range c {
		v = append(v, f(res))
	}
	slices.Sort(v)
	return v
}

func (c cell) med(f func(Result) float64) float64 { return median(c.values(f)) }
func (c cell) max(f func(Result) float64) float64 { return slices.Max(c.values(f)) }
func (c cell) broken() string {
	for _, r := range c {
		if r.Broken != "" {
			return r.Broken
		}
	}
	return ""
}

func failed(r Result) float64  { return float64(r.Failed) }
func sent(r Result) float64    { return float64(r.Sent) }
func pfailed(r Result) float64 { return float64(r.PostFailed) }
func unrun(r Result) float64   { return float64(r.PostFailedUnrun) }
func psent(r Result) float64   { return float64(r.PostSent) }
func twice(r Result) float64   { return float64(r.Twice) }
func killed(r Result) float64  { return float64(r.Killed) }
func hsent(r Result) float64   { return float64(r.HealthySent) }
func dials(r Result) float64   { return float64(r.Dials) }
func firstOK(r Result) float64 { return never(r.FirstOK) }
func worstOK(r Result) float64 { return never(r.FirstOKWorst) }
func added(r Result) float64   { return never(r.Added) }
func never(v float64) float64 {
	if v < 0 {
		return math.Inf(1)
	}
	return v
}

// number gives the median over the runs, and the spread if there is one.
func (c cell) number(f func(Result) float64, show func(float64) string) string {
	v := c.values(f)
	s := show(median(v))
	if lo, hi := show(v[0]), show(v[len(v)-1]); lo != hi {
		s += " (" + lo + " to " + hi + ")"
	}
	return s
}

// of gives a number and what it is a part of.
func (c cell) of(part, whole func(Result) float64) string {
	if c.max(whole) == 0 {
		return "none sent"
	}
	return c.number(part, count) + " of " + c.number(whole, count)
}

// more is length for what an answered request took longer.
func more(v float64) string {
	if math.IsInf(v, 1) || math.IsNaN(v) {
		return "none answered"
	}
	return length(v)
}

func count(v float64) string { return fmt.Sprintf("%.4g", v) }

func length(v float64) string {
	switch {
	case math.IsInf(v, 1) || math.IsNaN(v):
		return "never"
	case v < 10:
		return fmt.Sprintf("%.1f ms", v)
	case v < 1000:
		return fmt.Sprintf("%.0f ms", v)
	}
	return fmt.Sprintf("%.1f s", v/1000)
}

// verdict says in words what became of the requests of a cell.
func (c cell) verdict() string {
	if len(c) == 0 {
		return "not run"
	}
	if c.broken() != "" {
		return "not run"
	}
	var bad, meh []string
	if c.max(killed) > 0 {
		bad = append(bad, "**killed** "+c.number(killed, count)+" of "+count(c.med(hsent)))
	}
	if c.max(twice) > 0 {
		bad = append(bad, "**ran twice**: "+c.number(twice, count)+" POSTs")
	}
	if c.max(failed) > 0 {
		bad = append(bad, "**lost** "+c.number(failed, count)+" of "+count(c.med(sent)))
	}
	if c.max(unrun) > 0 {
		meh = append(meh, "lost "+c.number(unrun, count)+" unrun POSTs")
	}
	all := strings.Join(append(bad, meh...), ", ")
	switch {
	case len(bad) > 0:
		return "❌ " + all
	case len(meh) > 0:
		return "⚠️ " + all
	case c.med(hsent) > 0 && c.med(sent) == 0:
		return "✅ undisturbed"
	case c.max(pfailed) > 0:
		return "✅ none lost; an error for " + c.number(pfailed, count) + " POSTs that had run"
	}
	return "✅ all answered"
}

func (r *Report) rows() []Row {
	return slices.DeleteFunc(slices.Clone(Rows), func(row Row) bool {
		return !slices.ContainsFunc(r.Results, func(res Result) bool { return res.Row == row.Name })
	})
}

func (r *Report) contestants() []Contestant {
	return slices.DeleteFunc(slices.Clone(Contestants), func(c Contestant) bool {
		return !slices.ContainsFunc(r.Results, func(res Result) bool { return res.Contestant == c.Name })
	})
}

// Write writes results.json, RESULTS.md and the pictures to dir.
func (r *Report) Write(dir string) error {
	for i := range r.Results {
		if r.Results[i].Run != 0 {
			r.Results[i].Requests = nil // the first run is the one drawn
		}
	}
	slices.SortStableFunc(r.Results, func(a, b Result) int {
		return (r.order(a)-r.order(b))*1000 + a.Run - b.Run
	})
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	b = bytes.ReplaceAll(b, []byte(`{"Row":`), []byte("\n{\"Row\":")) // a result a line
	if err := os.WriteFile(filepath.Join(dir, "results.json"), append(b, '\n'), 0o644); err != nil {
		return err
	}
	if err := r.draw(dir); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "RESULTS.md"), []byte(r.markdown()), 0o644)
}

func (r *Report) order(res Result) int {
	return slices.IndexFunc(Rows, func(x Row) bool { return x.Name == res.Row })*100 +
		slices.IndexFunc(Contestants, func(x Contestant) bool { return x.Name == res.Contestant })
}

func (r *Report) markdown() string {
	var b strings.Builder
	p := func(format string, a ...any) { fmt.Fprintf(&b, format+"\n", a...) }
	rows, who := r.rows(), r.contestants()
	p("# The fault matrix\n")
	p("Written by `go run ./cmd/matrix` in `bench/`; do not edit. %s, %s, %s, %d run(s) of each cell, %s in all. Numbers are medians over the runs, with the lowest and highest behind them where they differ. Raw data: [results.json](results.json).\n", r.Date, r.Go, r.Machine, r.Runs, r.Took)
	p("All are HTTP/2 over TLS to a Go server or a scripted peer on the same machine, or to a real server in front of that Go server, each with the same dialer underneath. Deadlines are 10 s unless the row says other. The set-ups are in [contestants.go](contestants.go), the faults in [rows.go](rows.go) and [servers.go](servers.go).\n")
	if len(r.Servers) > 0 {
		p("Real servers: %s.\n", strings.Join(r.Servers, ", "))
	}
	p("| contestant | set-up | version |\n|---|---|---|")
	for _, c := range who {
		v := r.Go
		if c.Module != "" {
			v = r.Modules[c.Module]
		}
		p("| %s | %s | %s |", c.Label(), c.What, v)
	}
	p("\n## The matrix\n")
	p("**lost**: idempotent requests (GET, PUT) that failed. **ran twice**: POSTs that the server acted on more than once. **killed**: requests failed that no fault had touched. **unrun POSTs**: POSTs that failed though the server, as it turned out, had not acted on them; whether the client could know is another matter. The other POSTs that failed had run, and an error is the right answer.\n")
	for _, g := range []string{groupEnd, groupH2, groupReal, groupSilent, groupMany, groupFine} {
		in := slices.DeleteFunc(slices.Clone(rows), func(row Row) bool { return row.Group != g })
		if len(in) == 0 {
			continue
		}
		b.WriteString("| " + g + " |")
		for _, c := range who {
			b.WriteString(" " + c.Label() + " |")
		}
		b.WriteString("\n|---|" + strings.Repeat("---|", len(who)) + "\n")
		for _, row := range in {
			b.WriteString("| " + row.Name + " |")
			for _, c := range who {
				b.WriteString(" " + r.cell(row.Name, c.Name).verdict() + " |")
			}
			b.WriteString("\n")
		}
		b.WriteString("\n")
	}
	p("## Where deadconn is not the best, or not good enough\n")
	p("Found by comparing the numbers below, so that nothing is left out by taste. Two things explain many of them: go-retryablehttp and failsafehttp send every method again, whatever may have run (hence \"ran twice\"), and read every body into memory beforehand, where deadconn replays only what has a GetBody or was not read.\n")
	f := r.Findings()
	for _, s := range f {
		p("- %s", s)
	}
	if len(f) == 0 {
		p("Nowhere.")
	}
	p("\n## Pictures\n")
	for _, pic := range pictures {
		if _, ok := pic.has(r); ok {
			p("![%s](%s)\n", pic.alt, pic.file)
		}
	}
	if len(r.Costs) > 0 {
		p("## Cost on a healthy connection\n")
		p("Requests one after another, %d batches of %d; allocations are those of the whole process, the server and this program included.\n", batches, batchSize)
		p("| contestant | GET | allocations | POST | allocations |\n|---|---|---|---|---|")
		for _, c := range who {
			s := "| " + c.Label() + " |"
			for _, k := range []string{get, post} {
				for _, x := range r.Costs {
					if x.Contestant == c.Name && x.Kind == k {
						s += fmt.Sprintf(" %.0f µs (%.0f to %.0f) | %.0f |", median(x.US), x.US[0], x.US[len(x.US)-1], x.Allocs)
					}
				}
			}
			p("%s", s)
		}
	}
	p("\n## Each row\n")
	p("*first success*: from a fault to the next answered request, median over a row's faults, then the worst of them. *added*: what an answered request that met the fault took longer than others, median. *dials*: after the first fault.\n")
	for _, row := range rows {
		p("### %s\n\n%s.\n", row.Name, strings.ToUpper(row.What[:1])+row.What[1:])
		if row.Healthy {
			p("| | killed | ran twice | dials | slowest answer |\n|---|---|---|---|---|")
		} else {
			p("| | lost | healthy killed | POSTs failed | of them unrun | ran twice | first success | worst | added | dials |\n|---|---|---|---|---|---|---|---|---|---|")
		}
		for _, c := range who {
			x := r.cell(row.Name, c.Name)
			switch {
			case len(x) == 0:
			case x.broken() != "":
				p("| %s | not run: %s |", c.Label(), x.broken())
			case row.Healthy:
				p("| %s | %s | %s | %s | %s |", c.Label(), x.of(killed, hsent), x.number(twice, count), x.number(dials, count),
					x.number(func(r Result) float64 { return r.Worst }, length))
			default:
				p("| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |", c.Label(), x.of(failed, sent), x.of(killed, hsent), x.of(pfailed, psent),
					x.number(unrun, count), x.number(twice, count),
					x.number(firstOK, length), x.number(worstOK, length), x.number(added, more), x.number(dials, count))
			}
		}
		p("")
	}
	p("## Left out\n")
	for _, s := range r.LeftOut {
		p("- %s", s)
	}
	return b.String()
}

// Findings names every cell in which NewTransport misses what is required of
// it or somebody else did better, and in which Wrap did worse than its base.
func (r *Report) Findings() []string {
	var all []string
	add := func(row Row, format string, a ...any) { all = append(all, row.Name+": "+fmt.Sprintf(format, a...)) }
	metrics := []struct {
		what  string
		f     func(Result) float64
		slack float64
		show  func(float64) string
		equal bool // to be compared only with who served as many
	}{
		{"idempotent requests lost", failed, 0, count, false},
		{"POSTs run twice", twice, 0, count, false},
		{"healthy streams killed", killed, 0, count, false},
		{"POSTs lost though they had not run", unrun, 0, count, false},
		{"time to the first success", firstOK, 100, length, true},
		{"dials", dials, 1, count, true},
	}
	served := func(x, as cell) bool { return x.med(failed) <= as.med(failed) && x.med(pfailed) <= as.med(pfailed) }
	for _, row := range r.rows() {
		ours, wrap, base := r.cell(row.Name, Ours), r.cell(row.Name, Wrap), r.cell(row.Name, Base)
		if len(ours) == 0 || ours.broken() != "" {
			continue
		}
		for _, m := range metrics[:3] {
			if v := ours.max(m.f); v > 0 {
				add(row, "**requirement missed**: NewTransport had %s %s in its worst run.", count(v), m.what)
			}
		}
		for _, m := range metrics {
			var better []string
			for _, c := range r.contestants() {
				x := r.cell(row.Name, c.Name)
				if c.Name == Ours || len(x) == 0 || x.broken() != "" {
					continue
				}
				if m.equal && !served(x, ours) {
					continue
				}
				if x.med(m.f)+m.slack < ours.med(m.f) || (m.slack == 0 && x.max(m.f) < ours.max(m.f) && x.med(m.f) <= ours.med(m.f)) {
					better = append(better, fmt.Sprintf("%s %s%s", c.Name, x.number(m.f, m.show), paid(x)))
				}
			}
			if len(better) > 0 {
				add(row, "%s: NewTransport %s, better: %s.", m.what, ours.number(m.f, m.show), strings.Join(better, "; "))
			}
			if len(wrap) > 0 && len(base) > 0 && wrap.broken() == "" && base.broken() == "" {
				if base.med(m.f)+m.slack < wrap.med(m.f) && (!m.equal || served(base, wrap)) {
					add(row, "%s: Wrap %s is **worse than its base** %s.", m.what, wrap.number(m.f, m.show), base.number(m.f, m.show))
				}
			}
		}
	}
	return all
}

// paid names what a contestant gave up in the cell.
func paid(x cell) string {
	var s []string
	if v := x.max(twice); v > 0 {
		s = append(s, count(v)+" ran twice")
	}
	if v := x.max(failed); v > 0 {
		s = append(s, count(v)+" lost")
	}
	if len(s) == 0 {
		return ""
	}
	return " (but " + strings.Join(s, ", ") + ")"
}
