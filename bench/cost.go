package bench

import (
	"runtime"
	"slices"
	"time"
)

// A Cost is what requests on a healthy connection cost.
type Cost struct {
	Contestant string
	Kind       string
	US         []float64 // microseconds a request, one value a batch
	Allocs     float64   // allocations a request in this process, the server's included; median
}

const (
	batches   = 15
	batchSize = 200
)

// MeasureCosts sends GETs and POSTs one after another on loopback, in batches
// that take turns between the contestants, so that the machine's moods meet
// all of them.
func MeasureCosts(who []Contestant) []Cost {
	var costs []Cost
	for _, kind := range []string{get, post} {
		worlds := make([]*world, len(who))
		own := make([]Cost, len(who))
		allocs := make([][]float64, len(who))
		for i, c := range who {
			w, err := newWorld(c, nil, nil)
			if err != nil {
				return costs
			}
			worlds[i], own[i] = w, Cost{Contestant: c.Name, Kind: kind}
			for range 100 {
				w.do(ask{kind: kind})
			}
		}
		for b := range batches {
			for j := range who {
				i := (j + b) % len(who)
				w := worlds[i]
				runtime.GC()
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				begin := time.Now()
				for range batchSize {
					w.do(ask{kind: kind})
				}
				took := time.Since(begin)
				runtime.ReadMemStats(&after)
				own[i].US = append(own[i].US, float64(took.Nanoseconds())/1000/batchSize)
				allocs[i] = append(allocs[i], float64(after.Mallocs-before.Mallocs)/batchSize)
			}
		}
		for i := range own {
			own[i].Allocs = median(allocs[i])
			slices.Sort(own[i].US)
			worlds[i].close()
		}
		costs = append(costs, own...)
	}
	return costs
}
