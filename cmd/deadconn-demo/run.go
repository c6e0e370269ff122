package main

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"
)

// A report is the outcome of the demo, and its JSON document.
type report struct {
	Go        string    `json:"go"`
	Platform  string    `json:"platform"`
	Seconds   float64   `json:"seconds"`
	Scenarios []outcome `json:"scenarios"`
	Totals    []total   `json:"totals"`
	OK        bool      `json:"ok"` // deadconn lost nothing that it promises to save
}

// An outcome is that of one scenario.
type outcome struct {
	Name  string   `json:"name"`
	Title string   `json:"title"`
	What  string   `json:"what"`
	Runs  []result `json:"runs"`
}

// A result is what one client made of one scenario.
type result struct {
	Client    string   `json:"client"`
	Requests  int      `json:"requests"`
	Failed    int      `json:"failed"`
	Breaks    int      `json:"breaks"`
	Dials     int      `json:"dials"`
	Recovered *float64 `json:"recovered_ms"` // null: nothing was broken, or it never did
	Promised  bool     `json:"promised"`     // deadconn promises to lose none
	Verdict   string   `json:"verdict"`
	Why       string   `json:"why,omitempty"`   // deadconn promises nothing
	Error     string   `json:"error,omitempty"` // the first, verbatim

	Counters *counters `json:"counters,omitempty"` // deadconn's own

	stuck, kept bool
}

// A total is that of one client over all scenarios.
type total struct {
	Client   string `json:"client"`
	Requests int    `json:"requests"`
	Failed   int    `json:"failed"`
	Dials    int    `json:"dials"`
	Stuck    int    `json:"stuck"` // scenarios in which it never recovered

	Counters *counters `json:"counters,omitempty"` // deadconn's own
}

// A display shows what run does.
type display interface {
	begin()
	scenario(i, n int, s scenario)
	running(client string)
	result(result)
	end(outcome)
	finish(report) error
}

// run plays the scenarios in turn, until ctx ends.
func run(ctx context.Context, list []scenario, ways []way, show display) (report, error) {
	began := time.Now()
	rep := report{Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH, OK: true}
	for _, w := range ways {
		rep.Totals = append(rep.Totals, total{Client: w.name})
	}
	show.begin()
	for i, s := range list {
		if err := ctx.Err(); err != nil {
			return rep, err
		}
		show.scenario(i, len(list), s)
		o := outcome{Name: s.name, Title: s.title, What: s.what}
		for j, wait := range start(s, ways) {
			show.running(ways[j].name)
			res, err := wait()
			if err != nil {
				return rep, fmt.Errorf("%s, %s: %w", s.name, ways[j].name, err)
			}
			show.result(res)
			o.Runs = append(o.Runs, res)
			rep.Totals[j].add(res)
			rep.OK = rep.OK && res.kept
		}
		show.end(o)
		rep.Scenarios = append(rep.Scenarios, o)
	}
	rep.Seconds = time.Since(began).Round(time.Millisecond).Seconds()
	return rep, show.finish(rep)
}

func (t *total) add(r result) {
	t.Requests += r.Requests
	t.Failed += r.Failed
	t.Dials += r.Dials
	if r.stuck {
		t.Stuck++
	}
	if r.Counters != nil {
		if t.Counters == nil {
			t.Counters = new(counters)
		}
		t.Counters.add(r.Counters, 1)
	}
}

// start returns for each way a function that waits for its result: all are
// under way at once if s mostly waits, else each begins when it is asked for.
func start(s scenario, ways []way) []func() (result, error) {
	var wg sync.WaitGroup
	waits := make([]func() (result, error), len(ways))
	for i, w := range ways {
		waits[i] = sync.OnceValues(func() (result, error) { return play(s, w) })
		if s.waits {
			wg.Go(func() { waits[i]() })
		}
	}
	return waits
}

// play runs one scenario with one client.
func play(s scenario, w way) (result, error) {
	r, err := newRig(s, w)
	if err != nil {
		return result{}, err
	}
	defer r.close()
	dials, before := r.dialer.Dials(), r.counters()
	s.do(r)
	res := r.rec.result(s, w, r.dialer.Dials()-dials)
	if res.Counters = r.counters(); before != nil {
		res.Counters.add(before, -1)
	}
	return res, nil
}

func (rec record) result(s scenario, w way, dials int) result {
	why := s.unpromised[w.name]
	res := result{
		Client:   w.name,
		Requests: rec.requests,
		Failed:   rec.failed,
		Breaks:   rec.breaks,
		Dials:    dials,
		Promised: w.name != plain && why == "",
		Why:      why,
		stuck:    rec.breaks > 0 && !rec.back,
	}
	if rec.breaks > 0 && rec.back {
		ms := float64(rec.recovered.Microseconds()) / 1000
		res.Recovered = &ms
	}
	if rec.first != nil {
		res.Error = rec.first.Error()
	}
	// The counter-check asks for more: nothing may be done at all. And
	// whatever is promised, no POST may run twice.
	res.kept = rec.twice == 0 || w.name == plain
	if res.Promised {
		res.kept = res.kept && rec.failed == 0 && (rec.breaks > 0 || dials == 0)
	}
	res.Verdict = verdict(rec, res)
	return res
}

// verdict says it in words.
func verdict(rec record, res result) string {
	var v string
	switch {
	case rec.twice > 0:
		v = fmt.Sprintf("WRONG: %d POSTs ran twice", rec.twice)
	case rec.breaks == 0 && rec.failed == 0 && res.Dials == 0:
		v = "left alone, as it should be"
	case rec.breaks == 0:
		v = "WRONG: a sound connection was given up"
	case rec.failed == 0:
		v = "all rescued"
	case res.stuck:
		v = "stuck: nothing gets through"
	case rec.failed == rec.breaks:
		v = "each break costs a request"
	case rec.failed == rec.requests:
		v = "all lost"
	default:
		v = fmt.Sprintf("%d lost", rec.failed)
	}
	if rec.failed > 0 && res.Dials > 10*rec.breaks {
		v += ", a storm of dials"
	}
	return v
}
