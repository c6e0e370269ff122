package deadconn

import (
	"context"
	"net"
	"net/http"
	"time"
)

// Hooks are functions that a [Transport] calls on what happens, in the manner
// of httptrace.ClientTrace. A nil function is not called and costs nothing.
//
// Those whose name begins with Request are called on the goroutine of the
// request's RoundTrip: a slow one delays that request and no other. All others
// are called one after another on a goroutine that belongs to the Transport,
// about 100 ms after what they tell of: a slow one delays those that come
// after it, and when 16384 wait the newest are dropped ([Stats].HooksDropped).
// No lock is held. A panic in a hook is not caught.
//
// What they are told never has a header, a body, or the path or query of a
// URL in it.
type Hooks struct {
	// ConnTracked is called once for each connection that was dialed
	// through the Registry by or for this Transport.
	ConnTracked func(ConnTrackedInfo)

	// ConnSuspected is called each time that a connection falls under
	// suspicion, so that new requests to its host go elsewhere.
	ConnSuspected func(ConnSuspectedInfo)

	// ConnEvicted is called once for each connection that was found dead
	// and closed. A connection that net/http had found dead and closed
	// itself is among them if the request's error tells which it was.
	ConnEvicted func(ConnEvictedInfo)

	// ConnClosed is called once for each connection that ConnTracked was
	// called for, when it is closed by whomever.
	ConnClosed func(ConnClosedInfo)

	// DialMerged is called when a dial has ended that other requests had
	// waited for, once for all of them.
	DialMerged func(DialMergedInfo)

	// RequestRetried is called when a request is about to be sent again.
	// It is called once for a retry, and may be called more often for a
	// request that was not sent at all before.
	RequestRetried func(RequestRetriedInfo)

	// RequestDone is called once for each request that met a connection
	// which was found dead, with its outcome: also if it was not sent again,
	// as it may not be if it may have been processed and is not idempotent.
	RequestDone func(RequestDoneInfo)
}

// JoinHooks returns Hooks that call those of each of hooks, in that order; nil
// ones are left out. It lets a program and a metrics library both listen.
func JoinHooks(hooks ...*Hooks) *Hooks {
	j := new(Hooks)
	for _, h := range hooks {
		if h == nil {
			continue
		}
		j.ConnTracked = join(j.ConnTracked, h.ConnTracked)
		j.ConnSuspected = join(j.ConnSuspected, h.ConnSuspected)
		j.ConnEvicted = join(j.ConnEvicted, h.ConnEvicted)
		j.ConnClosed = join(j.ConnClosed, h.ConnClosed)
		j.DialMerged = join(j.DialMerged, h.DialMerged)
		j.RequestRetried = join(j.RequestRetried, h.RequestRetried)
		j.RequestDone = join(j.RequestDone, h.RequestDone)
	}
	return j
}

func join[T any](a, b func(T)) func(T) {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	return func(info T) {
		a(info)
		b(info)
	}
}

// ConnTrackedInfo tells of a new connection.
type ConnTrackedInfo struct {
	Addr       string   // host:port as dialed; a proxy's, if there is one
	LocalAddr  net.Addr // of the socket
	RemoteAddr net.Addr
}

// ConnSuspectedInfo tells of a connection under suspicion.
type ConnSuspectedInfo struct {
	Addr       string // host:port as dialed
	LocalAddr  net.Addr
	RemoteAddr net.Addr
	Path       PathInfo
}

// ConnEvictedInfo tells of an evicted connection.
type ConnEvictedInfo struct {
	Autopsy
}

// ConnClosedInfo tells of a connection that has ended.
type ConnClosedInfo struct {
	Addr         string // host:port as dialed
	LocalAddr    net.Addr
	RemoteAddr   net.Addr
	Protocol     string        // "h2", "http/1.1", or "" if not known
	Age          time.Duration // since it was dialed
	BytesRead    int64         // on the wire, TLS included
	BytesWritten int64
	Evicted      bool
}

// DialMergedInfo tells of a dial that others have waited for.
type DialMergedInfo struct {
	Addr    string // host:port
	Waiters int    // how many there were
	Err     error  // what they share; nil: the connection is up
}

// RequestRetriedInfo tells of a request that is sent again.
type RequestRetriedInfo struct {
	Context context.Context // the request's
	Method  string
	Host    string // of the request's URL
	Kind    Kind   // what the failure tells of the connection
	Err     error  // what the request failed with
	Unsent  bool   // nothing of it had been sent, provably
	Evicted bool   // its connection was evicted; false: net/http had dropped it
}

// RequestDoneInfo tells how a request ended that met a dead connection.
type RequestDoneInfo struct {
	Context context.Context // the request's
	Method  string
	Host    string // of the request's URL
	Retried bool   // it was sent again
	First   error  // what it failed with at first
	Err     error  // what the caller gets; nil: the request was rescued
}

// merged tells the world of dials that were not made.
func (t *Transport) merged(info DialMergedInfo) {
	t.stats.merged.Add(int64(info.Waiters))
	if t.hooks.DialMerged != nil {
		t.events.put(event{merged: &info})
	}
}

// retrying tells the world that req is about to be sent again.
func (t *Transport) retrying(req *http.Request, v verdict, err error) {
	t.stats.retried.Add(1)
	if t.hooks.RequestRetried != nil {
		t.hooks.RequestRetried(RequestRetriedInfo{
			Context: req.Context(), Method: req.Method, Host: req.URL.Host,
			Kind: v.kind, Err: err, Unsent: v.unsent || v.landed, Evicted: v.conn != nil && v.kind.Dead(),
		})
	}
}

// done tells the world how a request ended whose connection was found dead.
func (t *Transport) done(req *http.Request, s *story, err error) {
	if s.first == nil {
		return
	}
	var d *death
	if s.died != nil {
		d = s.died.fate.Load()
	}
	switch {
	case err == nil:
		t.stats.rescued.Add(1)
	case s.again:
		t.stats.lost.Add(1)
	default:
		t.stats.notRetried.Add(1)
	}
	switch {
	case d == nil:
	case err == nil:
		d.rescued.Add(1)
	default:
		d.lost.Add(1)
	}
	if t.log != nil {
		t.events.put(event{retry: &retryEvent{method: req.Method, host: req.URL.Host, first: s.first, err: err, again: s.again}})
	}
	if t.hooks.RequestDone != nil {
		t.hooks.RequestDone(RequestDoneInfo{
			Context: req.Context(), Method: req.Method, Host: req.URL.Host, Retried: s.again, First: s.first, Err: err,
		})
	}
}
