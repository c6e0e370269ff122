package deadconn

import (
	"context"
	"errors"
	"net/http"
	"time"
)

// rescue decides on a failed attempt: evict, send again, or give up.
func (t *Transport) rescue(req *http.Request, a *attempt, start int64, err error) (*http.Response, error) {
	var s story
	for {
		v := t.judge(req, a, start, err)
		s.stuck++
		if t.evict(req.Context(), v, err) {
			s.stuck = 0
		}
		s.note(v, err)
		if v.ours {
			s.superseded++
		}
		if !t.mayGoOn(req, v, &s) {
			return nil, t.fail(req, a, &s, err)
		}
		next, ok := t.again(req, a)
		if !ok {
			return nil, t.fail(req, a, &s, err)
		}
		next.alone = s.superseded >= maxSuperseded
		t.turn(req, v, &s, next, err)
		if a, start = next, next.start; callerEnded(req) {
			return nil, t.fail(req, a, &s, err)
		}
		s.twice = s.retry
		var resp *http.Response
		if resp, err = t.send(a, req); err == nil {
			t.done(req, &s, nil)
			return resp, nil
		}
	}
}

// story is what has become of a request so far.
type story struct {
	superseded int   // how often it had been sent back by our own doing
	landed     int   // how often it was to be sent again, since it had not been sent
	stuck      int   // how often in a row nothing was evicted
	retry      bool  // it is to be sent again though it may have been sent, once
	twice      bool  // and was
	again      bool  // it was sent again, be it that it had not been sent before
	first      error // what it failed with at first, other than by our own doing
	died       *conn // and on what, if that is known
}

// note keeps the first failure that a dead connection gave.
func (s *story) note(v verdict, err error) {
	if s.first == nil && v.kind != KindUnknown && !v.ours {
		s.first, s.died = err, v.conn
	}
}

// mayGoOn reports whether a request with that verdict may be sent again.
func (t *Transport) mayGoOn(req *http.Request, v verdict, s *story) bool {
	switch {
	case callerEnded(req): // while the dead connection was put away
	case s.landed < maxLanded && s.stuck < maxStuck && t.mayResend(req, v) && pause(req.Context(), s.stuck):
		s.landed++ // nothing was sent, so that this is no retry
		return true
	case v.ours: // it was not sent, so that it cannot be sent again
	case !s.retry && t.mayRetry(req, v):
		s.retry = true
		return true
	}
	return false
}

// turn is the turn of a request from a failed attempt to the next.
func (t *Transport) turn(req *http.Request, v verdict, s *story, next *attempt, err error) {
	if v.ours {
		return
	}
	s.again = true
	t.retrying(req, v, err)
	if t.own == nil && v.conn != nil {
		v.conn.succeed(req.Context(), next) // NewTransport merges dials
	}
}

// verdict is what is known of a failed attempt.
type verdict struct {
	kind    Kind  // of the error; zero if it is the caller's own doing
	conn    *conn // the connection that failed; nil: net/http has dropped it itself
	hidden  bool  // the base tells nothing of its connections
	unsent  bool  // the server cannot have processed the request
	refused bool  // the connection was new, and the peer did not want it
	landed  bool  // nothing was sent, since the connection was dead
	ours    bool  // and that by our own doing
}

// judge collects the evidence. The caller's own doings come first: an end of
// the context or of the body can look like anything (DESIGN fact 10).
func (t *Transport) judge(req *http.Request, a *attempt, start int64, err error) (v verdict) {
	if req == nil || req.URL == nil || callerEnded(req) || a != nil && a.bodyFailed() {
		return verdict{}
	}
	v.kind = Classify(err)
	switch {
	case contains[*RetryError](err):
		return verdict{} // a Transport below has done what can be done
	case v.kind == KindUnknown && a != nil && cannotRewind(err):
		// net/http lost the connection and had closed the body, which we
		// have kept. If nothing was sent, nothing is lost.
		if v = a.evidence(v); !v.unsent && !v.landed {
			return verdict{}
		}
		v.landed = true
		return v
	case v.kind == KindUnknown:
		return v
	case a == nil:
		v.conn, v.refused = t.reg.recall(err, v.kind, dialAddr(t.own, req), start)
	default:
		v = a.evidence(v)
	}
	v.unsent = v.unsent || v.kind.Unprocessed()
	v.landed = v.landed || v.kind == KindNotSent
	v.ours = contains[*notSentError](err)
	return v
}

// callerEnded reports whether the caller has ended req.
func callerEnded(req *http.Request) bool {
	select {
	case <-req.Cancel: // deprecated, and in use
		return true
	default:
		return req.Context().Err() != nil
	}
}

// evict closes the connection that failed, if the error proves it dead, and
// reports whether it was not dead before.
func (t *Transport) evict(ctx context.Context, v verdict, err error) (first bool) {
	if !v.kind.Dead() {
		return false
	}
	if v.hidden {
		closeIdle(t.base) // the best that can be done
	}
	if v.conn == nil {
		return false
	}
	first = v.conn.evict(v.kind, err)
	v.conn.awaitRelease(ctx)
	return first
}

// mayResend reports whether a request with that verdict was not sent at all.
func (t *Transport) mayResend(req *http.Request, v verdict) bool {
	switch {
	case v.ours:
		return true // no caller is to see it
	case v.refused:
		return false
	}
	return v.landed && !t.noRetry && !isUpgrade(req)
}

// mayRetry reports whether a request with that verdict may be sent again.
func (t *Transport) mayRetry(req *http.Request, v verdict) bool {
	switch {
	case t.noRetry, v.refused, v.kind == KindGoAwayCalm, isUpgrade(req):
		return false
	case v.kind == KindRefusedStream:
		return false // net/http has tried 7 times, and its connection is well
	case v.unsent:
		return true
	}
	return v.kind.Dead() && t.retryable(req)
}

// again prepares the next attempt, and reports whether the body can be had.
// It asks the socket that it gets: others may have died with the first.
func (t *Transport) again(req *http.Request, a *attempt) (next *attempt, ok bool) {
	rc, ok := replay(req, a)
	if !ok {
		return nil, false
	}
	next = t.newAttempt(req, rc)
	next.asks = true
	next.wary = next.start
	return next, true
}

// fail ends a request with the error that its caller gets.
func (t *Transport) fail(req *http.Request, a *attempt, s *story, err error) error {
	if a != nil {
		a.fail()
	}
	if contains[*notSentError](err) && callerEnded(req) {
		err = endOf(req) // as net/http returns it; what sent it back is ours
	}
	if s.twice {
		err = newRetryError(s.first, err)
	}
	t.done(req, s, err)
	return err
}

// endOf returns why its caller ended req.
func endOf(req *http.Request) error {
	if err := context.Cause(req.Context()); err != nil {
		return err
	}
	return errCanceled
}

var errCanceled = errors.New("net/http: request canceled") // by Request.Cancel

// maxLanded bounds how often a request is sent again that was not sent at all:
// a whole pool may have died at once.
const maxLanded = 100

// maxStuck bounds it when nothing comes of it: 10 pauses are about a second.
const maxStuck = 10

// maxSuperseded is how often a request waits for another's dial in vain, as it
// does where a connection takes few streams. Then it dials for itself, as with
// net/http. It is less than maxStuck: no caller is to see what sent it back.
const maxSuperseded = 5

// pause gives the HTTP layer time to take a dead connection out of its pool.
// Mostly it has done so before it returned the error, so that at first there
// is none. It reports false if ctx ended meanwhile.
func pause(ctx context.Context, stuck int) bool {
	if stuck < 3 {
		return true
	}
	t := time.NewTimer(time.Millisecond << min(stuck, 9))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
