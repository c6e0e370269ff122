package deadconn

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// events carries what happens to the hooks and the log, so that neither can
// hold up a request.
type events struct {
	t *Transport

	mu      sync.Mutex
	queue   []event // guarded by mu
	running bool    // guarded by mu
	dropped int64   // guarded by mu
	limiter limiter // deliver's own
}

// An event is one of these.
type event struct {
	at        time.Time
	tracked   *conn
	suspected *ConnSuspectedInfo
	evicted   *death
	closed    *ConnClosedInfo
	merged    *DialMergedInfo
	retry     *retryEvent
}

type retryEvent struct {
	method, host string
	first, err   error
	again        bool
}

const (
	// eventDelay lets an eviction's record have the rescues in it that
	// follow at once.
	eventDelay = 100 * time.Millisecond
	maxEvents  = 16384
)

func (q *events) put(e event) {
	e.at = time.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.queue) >= maxEvents {
		q.dropped++
		return
	}
	q.queue = append(q.queue, e)
	if !q.running {
		q.running = true
		time.AfterFunc(eventDelay, q.deliver)
	}
}

// deliver delivers what is due, and comes back as long as something is left.
func (q *events) deliver() {
	for {
		e, wait, ok := q.next(q.limiter.flush(q.t.log))
		switch {
		case !ok:
			return
		case wait > 0:
			time.AfterFunc(wait, q.deliver)
			return
		}
		q.t.tell(e)
	}
}

// next takes the next event, or returns how long to wait for it. If there is
// none and rest is 0, it ends the delivery.
func (q *events) next(rest time.Duration) (e event, wait time.Duration, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.queue) == 0 {
		// One that comes while the second lasts is not to wait for its end.
		q.queue, q.running = nil, rest > 0
		return e, min(rest, eventDelay), rest > 0
	}
	if wait = eventDelay - time.Since(q.queue[0].at); wait > 0 {
		return e, wait, true
	}
	e, q.queue = q.queue[0], q.queue[1:]
	return e, 0, true
}

// tell calls the hook that e is for, and logs it.
func (t *Transport) tell(e event) {
	h := &t.hooks
	switch {
	case e.tracked != nil:
		c := e.tracked
		h.ConnTracked(ConnTrackedInfo{Addr: c.addr, LocalAddr: c.LocalAddr(), RemoteAddr: c.RemoteAddr()})
	case e.suspected != nil:
		h.ConnSuspected(*e.suspected)
	case e.closed != nil:
		h.ConnClosed(*e.closed)
	case e.merged != nil:
		h.DialMerged(*e.merged)
	case e.retry != nil:
		t.logRetry(e.retry)
	case e.evicted != nil:
		a := e.evicted.record()
		if t.log != nil {
			t.logEvicted(&a)
		}
		if h.ConnEvicted != nil {
			h.ConnEvicted(ConnEvictedInfo{a})
		}
	}
}

func (t *Transport) logEvicted(a *Autopsy) {
	if !t.events.limiter.allow(a.Addr, "deadconn: connection evicted", slog.LevelWarn) {
		return
	}
	attrs := []slog.Attr{
		slog.String("cause", a.Cause.String()),
		slog.String("error", a.Err.Error()),
		slog.String("addr", a.Addr),
		slog.String("local", addrString(a.LocalAddr)),
		slog.String("remote", addrString(a.RemoteAddr)),
		slog.String("protocol", a.Protocol),
		slog.Duration("age", a.Age.Round(time.Microsecond)),
		slog.Duration("unanswered", a.Unanswered.Round(time.Microsecond)),
		slog.Int64("bytes_read", a.BytesRead),
		slog.Int64("bytes_written", a.BytesWritten),
		slog.Int64("rescued", a.Rescued),
		slog.Int64("lost", a.Lost),
	}
	if p := a.Path; p.Known {
		attrs = append(attrs, slog.Duration("rtt", p.RTT), slog.Int("unacked", p.Unacked), slog.Int("retransmits", p.Retransmits))
	}
	t.log.LogAttrs(context.Background(), slog.LevelWarn, "deadconn: connection evicted", attrs...)
}

func (t *Transport) logRetry(r *retryEvent) {
	msg := "deadconn: request sent again"
	if !r.again {
		msg = "deadconn: request not sent again"
	}
	if !t.log.Enabled(context.Background(), slog.LevelDebug) || !t.events.limiter.allow(r.host, msg, slog.LevelDebug) {
		return
	}
	attrs := []slog.Attr{
		slog.String("method", r.method),
		slog.String("host", r.host),
		slog.Bool("rescued", r.err == nil),
		slog.String("error", r.first.Error()),
	}
	t.log.LogAttrs(context.Background(), slog.LevelDebug, msg, attrs...)
}

// limiter lets a few lines a second through for each host and message, and
// sums up the rest. It is used by one goroutine at a time.
type limiter struct {
	second time.Time
	counts map[limitKey]int
}

type limitKey struct {
	host, msg string
	level     slog.Level
}

// linesPerSecond is for each host, the summary not counted in.
const linesPerSecond = 5

// allow reports whether a line may be written now.
func (l *limiter) allow(host, msg string, level slog.Level) bool {
	if l.counts == nil {
		l.counts = make(map[limitKey]int)
		l.second = time.Now()
	}
	key := limitKey{host, msg, level}
	l.counts[key]++
	return l.counts[key] <= linesPerSecond
}

// flush sums up what was held back in a second that is over, and returns how
// long the one under way still lasts; 0: there is none.
func (l *limiter) flush(log *slog.Logger) time.Duration {
	if l.counts == nil {
		return 0
	}
	if rest := time.Second - time.Since(l.second); rest > 0 {
		return rest
	}
	for key, n := range l.counts {
		if n > linesPerSecond {
			log.LogAttrs(context.Background(), key.level, key.msg+": more",
				slog.String("host", key.host), slog.Int("count", n-linesPerSecond))
		}
	}
	l.counts = nil
	return 0
}
