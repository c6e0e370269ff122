package soak

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/deadconn/deadconn"
)

// A rule is what no seed may break.
type rule int

const (
	// ruleOnce: a request that is not idempotent (a POST without an
	// Idempotency-Key) runs at most once. Its run begins with its handler.
	ruleOnce rule = iota
	// ruleAnswer: a response is whole and its request's own, and the server
	// got the body that was sent.
	ruleAnswer
	// ruleBody: every request body is closed exactly once, within lateClose
	// after RoundTrip has returned; so is what GetBody gave. (net/http by
	// itself forgets one of those, see TestRulesBite.)
	ruleBody
	// ruleUntouched: a request that got no connection which a fault touched
	// succeeds, header and body.
	ruleUntouched
	// ruleRescued: an idempotent request whose body can be had again succeeds
	// unless it met two touched connections. See unfair for NewTransport.
	ruleRescued
	// ruleEviction: no connection is evicted that no fault touched.
	ruleEviction
	// ruleSettled: goroutines, tracked connections and memory are back at
	// their level.
	ruleSettled
	rules int = iota
)

func (r rule) String() string {
	return [...]string{"runs once", "whole and own answer", "body closed once", "untouched succeeds", "rescued", "no needless eviction", "settles"}[r]
}

// lateClose bounds how long after RoundTrip a body may be closed.
const lateClose = 10 * time.Second

// maxGrowth is how much more memory than before may be in use after the end:
// what the runtime and net/http's pools keep, and 100 autopsies a client.
const maxGrowth = 16 << 20

// judge says which rule the failure of cl broke, if any. Faults are noted before
// they strike, so that those noted by now are all that can have been to blame.
func (cl *call) judge(err error) (r rule, why string, broken bool) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	touched := cl.touchedLocked()
	switch {
	case !cl.replayable && deadconn.Classify(err) == deadconn.KindRefusedStream:
		return 0, "", false // the server counted a canceled stream longer than the client
	case !cl.replayable && err.Error() == "net/http: cannot rewind body after connection loss":
		return 0, "", false // net/http had closed it before it found no room on its connection
	case !cl.replayable && errors.Is(err, http.ErrBodyReadAfterClose):
		return 0, "", false // net/http had begun to send it again, and then closed it: 1 in 500,000
	case len(touched) == 0:
		return ruleUntouched, "no fault had touched its connections", true
	case !cl.idempotent || !cl.replayable:
		return 0, "", false
	case !cl.o.http2 && touchedBy(touched, func(k faultKind) bool { return k == closeUnderneath }):
		return 0, "", false // its reader sleeps on, and HTTP/1 writes no more
	case cl.c.foreign && !cl.o.http2 && touchedBy(touched, faultKind.silent):
		return 0, "", false // README: Wrap does not see it before the next write
	case cl.c.foreign && slices.ContainsFunc(touched, func(g got) bool { return !g.reused }):
		return 0, "", false // Wrap takes the end of a new connection for a refusal
	case slices.ContainsFunc(touched, got.fresh):
		return 0, "", false // a new connection that ends unused passes for a refusal
	case len(touched) == 1:
		return ruleRescued, "one fault had touched one of its connections", true
	case !cl.c.owns:
		return 0, "", false // README: Wrap may meet two dead ones
	}
	last := touched[len(touched)-1]
	if !last.unfair() {
		return ruleRescued, "its last connection had been dead, and not silent, when it got it", true
	}
	return 0, "", false
}

// got is that a call got a connection.
type got struct {
	r      *connRecord
	at     time.Duration
	reused bool
}

// unfair: the fault struck while the request was under way, or gave no sign.
func (g got) unfair() bool {
	g.r.w.mu.Lock()
	defer g.r.w.mu.Unlock()
	for _, f := range g.r.faults {
		if f.at >= g.at-50*time.Millisecond || f.kind.silent() {
			return true
		}
	}
	return false
}

// fresh: a fault struck before anything had been answered on it.
func (g got) fresh() bool {
	g.r.w.mu.Lock()
	defer g.r.w.mu.Unlock()
	return slices.ContainsFunc(g.r.faults, func(f fault) bool { return f.fresh })
}

// touchedLocked returns the touched connections that cl got, each once, with
// when it got it last.
func (cl *call) touchedLocked() (all []got) {
	for i, g := range cl.gots {
		again := false
		for _, later := range cl.gots[i+1:] {
			again = again || later.r == g.r
		}
		if !again && g.r.touched() {
			all = append(all, g)
		}
	}
	return all
}

func touchedBy(all []got, is func(faultKind) bool) bool {
	for _, g := range all {
		g.r.w.mu.Lock()
		for _, f := range g.r.faults {
			if is(f.kind) {
				g.r.w.mu.Unlock()
				return true
			}
		}
		g.r.w.mu.Unlock()
	}
	return false
}

// A violation is a broken rule and what is needed to understand it.
type violation struct {
	rule rule
	text string
}

const maxViolations = 12 // that are kept in full

// violate notes a broken rule. cl and r may be nil.
func (w *world) violate(r rule, cl *call, c *connRecord, format string, args ...any) {
	var b strings.Builder
	at := w.now()
	fmt.Fprintf(&b, "VIOLATION of %q at %v: %s\n", r, at, fmt.Sprintf(format, args...))
	from := at - time.Second
	if cl != nil {
		from = min(from, cl.start-200*time.Millisecond)
		b.WriteString(cl.history())
	}
	if c != nil {
		b.WriteString("  connection " + c.text() + "\n")
	}
	b.WriteString("  faults around:\n")
	w.mu.Lock()
	for _, f := range w.recent {
		if f.at >= from {
			fmt.Fprintf(&b, "    %v\n", f)
		}
	}
	w.counts[r]++
	if w.counts[r] <= maxViolations {
		w.violations = append(w.violations, violation{r, b.String()})
	}
	stop := w.until == r || w.until < 0 && w.counts[r] > 100
	w.mu.Unlock()
	if stop {
		w.stop()
	}
}

func (w *world) violated(r rule) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.counts[r]
}

func (w *world) text() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var b strings.Builder
	for _, v := range w.violations {
		b.WriteString(v.text)
	}
	return b.String()
}
