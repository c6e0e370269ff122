package bench

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
	"github.com/deadconn/deadconn/internal/netlab"
)

// A Result is what one contestant did in one row, once.
type Result struct {
	Row, Contestant string
	Run             int

	Sent, Failed          int // idempotent requests, GET and PUT
	PostSent, PostFailed  int
	PostFailedUnrun       int            // those that failed though the server never acted on them
	Twice                 int            // POSTs that the server acted upon more than once
	HealthySent, Killed   int            // requests that no fault touched, and those of them that failed
	Dials                 int            // after the first fault
	FirstOK, FirstOKWorst float64        // ms from a fault to the next success, median and worst over the faults; -1: none came
	Added, Worst          float64        // ms that an answered request which met a fault took more than others: median; and the longest of all
	Errors                map[string]int `json:",omitempty"`
	Requests              []*Request     `json:",omitempty"` // of the rows that are drawn
	Broken                string         `json:",omitempty"` // why the cell could not be run
}

// drawn are the rows whose requests are kept for pictures.
var drawn = map[string]bool{"black hole": true, "socket closed underneath, load": true}

// Run runs one cell.
func Run(row Row, c Contestant, run int, quick bool) (res Result) {
	res = Result{Row: row.Name, Contestant: c.Name, Run: run}
	env := &cellEnv{quick: quick}
	if row.Lab {
		lab, err := netlab.NewWith(row.opts)
		if row.opts == (netlab.Options{}) {
			lab, err = netlab.New()
		}
		if err != nil {
			res.Broken = err.Error()
			return res
		}
		defer lab.Close()
		env.lab = lab
	}
	w, err := row.run(c, env)
	if w != nil {
		defer w.close()
	}
	if err != nil {
		res.Broken = err.Error()
	}
	if w != nil {
		time.Sleep(300 * time.Millisecond) // what runs twice may do so late
		w.sum(&res)
	}
	return res
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (w *world) sum(res *Result) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var calm, met []float64
	res.Errors = make(map[string]int)
	for _, r := range w.requests {
		failed := r.Err != ""
		r.Ran = w.executed[r.id]
		r.At -= w.first.Sub(w.start)
		switch {
		case r.Healthy:
			res.HealthySent++
			if failed {
				res.Killed++
			}
		case idempotent(r.Kind):
			res.Sent++
			if failed {
				res.Failed++
			}
		default:
			res.PostSent++
			if failed {
				res.PostFailed++
				if r.Ran == 0 {
					res.PostFailedUnrun++
				}
			}
		}
		if r.Ran > 1 {
			res.Twice++
		}
		if failed {
			res.Errors[r.Kind+": "+shorten(r.Err)]++
			continue
		}
		took := ms(r.Took - r.wait)
		res.Worst = max(res.Worst, took)
		if r.Victim || r.Healthy {
			met = append(met, took)
		} else {
			calm = append(calm, took)
		}
	}
	if len(met) > 0 {
		res.Added = max(0, median(met)-median(calm))
	} else {
		res.Added = -1
	}
	if w.pending {
		w.firstOK = append(w.firstOK, -1)
	}
	res.FirstOK, res.FirstOKWorst = -1, -1
	if len(w.firstOK) > 0 {
		var all []float64
		for _, d := range w.firstOK {
			if d < 0 {
				all = append(all, math.Inf(1))
			} else {
				all = append(all, ms(d))
			}
		}
		if m := median(all); !math.IsInf(m, 1) {
			res.FirstOK = m
		}
		if m := slices.Max(all); !math.IsInf(m, 1) {
			res.FirstOKWorst = m
		}
	}
	if !w.first.IsZero() {
		res.Dials = w.dialer.Dials() - w.dials0
	}
	if drawn[res.Row] {
		res.Requests = w.requests
	}
}

// shorten takes URLs and addresses out of an error's text, so that equal
// errors are counted together.
func shorten(s string) string {
	if strings.HasPrefix(s, "Get \"") || strings.HasPrefix(s, "Put \"") || strings.HasPrefix(s, "Post \"") {
		if _, rest, ok := strings.Cut(s, "\": "); ok {
			s = rest
		}
	}
	words := strings.Fields(s)
	for i, f := range words {
		if strings.Count(f, ":") > 0 && strings.ContainsAny(f, "0123456789") {
			words[i] = "ADDR"
		}
	}
	s = strings.Join(words, " ")
	if len(s) > 160 {
		s = s[:160] + "..."
	}
	return s
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	if len(v)%2 == 1 {
		return v[len(v)/2]
	}
	return (v[len(v)/2-1] + v[len(v)/2]) / 2
}

// Able reports what this machine cannot run: an error for the rows in
// namespaces, and one for those with a socket filter.
func Able() (lab, filter error) {
	if l, err := netlab.New(); err != nil {
		lab = err
	} else {
		l.Close()
	}
	w, err := newWorld(Contestants[0], nil, nil)
	if err != nil {
		return lab, err
	}
	defer w.close()
	w.do(ask{kind: get})
	if len(w.open()) == 0 {
		return lab, errors.New("no connection to try it on")
	}
	return lab, faultnet.BlackholeSocket(w.open()[0])
}

// RunAll runs each row with each contestant, runs times, and tells progress.
func RunAll(rows []Row, who []Contestant, runs int, quick bool, progress func(Result, string)) []Result {
	var mu sync.Mutex
	var all []Result
	for run := range runs {
		batch := func(workers int, in func(Row) bool) {
			slots := make(chan struct{}, workers)
			var wg sync.WaitGroup
			for _, row := range rows {
				if !in(row) {
					continue
				}
				for i := range who {
					c := who[(i+run)%len(who)] // not always the same one first
					slots <- struct{}{}
					wg.Go(func() {
						defer func() { <-slots }()
						begin := time.Now()
						res := Run(row, c, run, quick)
						mu.Lock()
						all = append(all, res)
						mu.Unlock()
						progress(res, fmt.Sprintf("run %d  %-32s %-16s %5.1f s  lost %d/%d, POST %d/%d, twice %d, killed %d/%d, %d dials %s",
							run+1, row.Name, c.Name, time.Since(begin).Seconds(), res.Failed, res.Sent, res.PostFailed, res.PostSent,
							res.Twice, res.Killed, res.HealthySent, res.Dials, res.Broken))
					})
				}
			}
			wg.Wait()
		}
		batch(1, func(r Row) bool { return r.Alone })
		batch(3, func(r Row) bool { return !r.Alone && !r.Waits && r.Program == "" })
		batch(6, func(r Row) bool { return r.Program != "" }) // they wait, but their starts and reloads are CPU
		batch(36, func(r Row) bool { return r.Waits })
	}
	return all
}
