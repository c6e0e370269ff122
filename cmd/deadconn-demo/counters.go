package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/deadconn/deadconn"
)

// counters are those of deadconn.Stats, by the same names, that tell what it
// did.
type counters struct {
	DialsMerged int64            `json:"dials_merged"`
	Suspected   int64            `json:"suspected"`
	Evicted     int64            `json:"evicted"`
	EvictedBy   map[string]int64 `json:"evicted_by,omitempty"`
	Retried     int64            `json:"retried"`
	Rescued     int64            `json:"rescued"`
	Lost        int64            `json:"lost"`
}

func count(s deadconn.Stats) *counters {
	c := &counters{
		DialsMerged: s.DialsMerged, Suspected: s.Suspected, Evicted: s.Evicted,
		Retried: s.Retried, Rescued: s.Rescued, Lost: s.Lost,
	}
	for k, n := range s.EvictedBy {
		c.addCause(deadconn.Kind(k).String(), n)
	}
	return c
}

// add adds o to c, sign times.
func (c *counters) add(o *counters, sign int64) {
	c.DialsMerged += sign * o.DialsMerged
	c.Suspected += sign * o.Suspected
	c.Evicted += sign * o.Evicted
	c.Retried += sign * o.Retried
	c.Rescued += sign * o.Rescued
	c.Lost += sign * o.Lost
	for cause, n := range o.EvictedBy {
		c.addCause(cause, sign*n)
	}
}

func (c *counters) addCause(cause string, n int64) {
	if c.EvictedBy == nil {
		c.EvictedBy = make(map[string]int64)
	}
	if c.EvictedBy[cause] += n; c.EvictedBy[cause] == 0 {
		delete(c.EvictedBy, cause)
	}
}

// String is empty if nothing was counted, or c is nil.
func (c *counters) String() string {
	if c == nil {
		return ""
	}
	var parts []string
	say := func(n int64, what string) {
		if n != 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, what))
		}
	}
	causes := slices.SortedFunc(maps.Keys(c.EvictedBy), func(a, b string) int {
		return cmp.Or(cmp.Compare(c.EvictedBy[b], c.EvictedBy[a]), cmp.Compare(a, b))
	})
	for i, cause := range causes {
		causes[i] = fmt.Sprintf("%s %d", cause, c.EvictedBy[cause])
	}
	say(c.Evicted, "evicted ("+strings.Join(causes, ", ")+")")
	say(c.Suspected, "suspected")
	say(c.Retried, "retried")
	say(c.Rescued, "rescued")
	say(c.Lost, "lost")
	say(c.DialsMerged, "dials merged")
	return strings.Join(parts, ", ")
}
