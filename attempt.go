package deadconn

import (
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"time"
)

// attempt is one sending of a request, and what was seen of it: which
// connection carried it and how far it got.
type attempt struct {
	t      *Transport
	req    *http.Request // ours, a shallow copy of the caller's
	caller *http.Request
	start  int64

	mu            sync.Mutex
	body          *body    // nil: the request has none, or one that needs no guard
	rewindErr     error    // what the caller's GetBody failed with
	asked         bool     // the base looks for a connection, so it has some
	addr          string   // the address that GetConn told
	got           net.Conn // the last that GotConn told; nil: none
	conn          *conn    // got's; nil if it is foreign and not watched
	reused        bool     // got had been used before
	gotAt         int64    // when
	landed        bool     // got was known to be dead already
	wrote         int64    // conn.wrote, when the request got it
	headersWrote  bool     // the write of the request's header has ended
	headersFailed bool     // and failed

	sees   bool   // is told when its header was written; trace has the caller's hooks too
	wary   int64  // when the connection of the attempt before died; 0: none did
	asks   bool   // asks the socket that it gets whether the peer has closed it
	alone  bool   // dials for itself, whoever else dials
	onConn func() // called once it has a connection, or will have none; may be nil

	first body // what body points to at the start, here to save an allocation
	trace httptrace.ClientTrace
}

// newAttempt prepares to send req with body, which may be nil. What httptrace
// tells comes on top of the hooks that the caller has set.
func (t *Transport) newAttempt(req *http.Request, rc io.ReadCloser) *attempt {
	a := &attempt{t: t, caller: req, start: now()}
	a.trace.GetConn = a.getConn
	a.trace.GotConn = a.gotConn
	if !IsIdempotent(req) {
		a.asks = true
		a.sees = true
		a.trace.WroteHeaders = a.wroteHeaders // for unsent, which others do not need
	}
	a.req = req.WithContext(httptrace.WithClientTrace(req.Context(), &a.trace))
	if rc != nil {
		a.first.rc = rc
		a.body = &a.first
		a.req.Body = a.body
	}
	if req.GetBody != nil {
		a.req.GetBody = a.rewind
	}
	return a
}

// rewind is what net/http gets its own retries' bodies from.
func (a *attempt) rewind() (io.ReadCloser, error) {
	rc, err := a.caller.GetBody()
	a.mu.Lock()
	if err != nil {
		a.rewindErr = err
		a.mu.Unlock()
		return nil, err
	}
	old := a.body
	if old == nil {
		a.mu.Unlock()
		return rc, nil // no guard, as before
	}
	b := &body{rc: rc}
	a.body = b
	a.mu.Unlock()
	old.settle(true) // net/http has done with it, and may not have closed it
	return b, nil
}

func (a *attempt) getConn(hostPort string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked, a.addr = true, hostPort
}

// dialed returns the address that net/http's transport dials for a's request;
// empty if the base is another. HTTP/2 gives GetConn the server's, also behind a
// proxy.
func (a *attempt) dialed() string {
	rt := transportBelow(a.t.base)
	if rt == nil {
		return ""
	}
	return dialAddr(rt, a.req)
}

// waryWait is how long a retry waits, on a connection from before the death, for
// what may befall that one too: who closes one connection closes all, one after
// the other.
const waryWait = 5 * time.Millisecond

// gotConn may be called several times in one attempt: the last one counts.
func (a *attempt) gotConn(info httptrace.GotConnInfo) {
	c := tracked(info.Conn)
	if c == nil && !a.t.health.Disable {
		c = a.t.reg.adopt(info.Conn, a)
	}
	if a.onConn != nil {
		a.onConn()
	}
	if a.wary != 0 && c != nil && info.Reused && (c.foreign || c.born < a.wary) {
		time.Sleep(waryWait)
	}
	hungUp := a.asks && c != nil && info.Reused && c.hungUp()
	if hungUp {
		c.evict(KindEOF, errPeerClosed)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.got, a.conn, a.reused, a.gotAt = info.Conn, c, info.Reused, now()
	a.headersWrote, a.headersFailed, a.landed = false, false, false
	switch {
	case c == nil:
	case c.foreign:
		a.landed = c.isShut()
		c.wrote.Add(1)
		c.wait(now())
	default:
		c.own(a.t)
		if a.t.own == nil && c.addr != a.addr {
			a.t.trials.note(c.addr, a.dialed())
		}
		if tc, ok := info.Conn.(*tls.Conn); ok && !c.tls.Load() {
			c.describe(tc)
		}
		if !info.Reused {
			c.shaken()
		}
		// One that is younger than the attempt was dialed for it: its death
		// is an answer, not bad luck. One whose peer only does not send any
		// more could still take the request: it must be closed for the
		// request to be unsent, and not only about to be, by somebody else.
		if c.dead() && (hungUp || c.born < a.start) {
			c.shut(c.fate.Load().kind, c.fate.Load().err)
			a.landed = c.isShut()
		}
		a.wrote = c.wrote.Load()
	}
}

// refusalTime is how soon a refusal ends a connection that is not one of ours,
// of which it cannot be told whether the peer has said anything.
const refusalTime = 100 * time.Millisecond

// wroteHeaders is called when the write of the header has ended, well or not.
// Over HTTP/2 it is called with the write lock held, and the HTTP/2 layer
// keeps its first write error: so if a write has failed on the connection, it
// was this one or one before it, and the peer has no whole header. (A later
// "write" error proves nothing: the read loop ends all streams with the error
// of its own writes.)
func (a *attempt) wroteHeaders() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.headersWrote = true
	a.headersFailed = a.conn != nil && a.conn.writeFailed.Load()
}

// evidence adds to v what is known of the connection that failed.
func (a *attempt) evidence(v verdict) verdict {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.got != nil:
		v.conn, v.landed = a.conn, a.landed
		if v.conn == nil && v.kind.Dead() {
			v.conn = a.t.reg.adopt(a.got, a)
		}
		if c := v.conn; c == nil || c.foreign {
			v.refused = !a.reused && peerEnded(v.kind) && now()-a.gotAt < int64(refusalTime)
			break
		}
		v.refused = v.conn.refused(v.kind, a.start)
		// DESIGN fact 13: no byte has gone out since the request got its
		// connection, or its header did not go out whole. That it was not
		// begun can be told only of net/http's own transport.
		v.unsent = a.headersFailed || v.conn.wrote.Load() == a.wrote ||
			a.t.own != nil && a.sees && !a.headersWrote
		v.landed = v.landed || v.unsent && v.kind.Dead() && !v.refused
	case !a.asked:
		v.hidden = true
	case !v.kind.Unprocessed():
		return verdict{} // none was had: a dial error
	}
	return v
}

// finish hands resp to the caller.
func (a *attempt) finish(resp *http.Response) *http.Response {
	if b := a.currentBody(); b != nil {
		b.settle(false)
	}
	if resp == nil {
		return nil
	}
	a.mu.Lock()
	c := a.conn
	a.mu.Unlock()
	switch {
	case c == nil:
	case resp.ProtoMajor == 1 && hasLeftHTTP(a.caller, resp):
		c.leave()
	case c.foreign:
		c.unanswered.Store(0)
	}
	resp.Request = a.caller
	return resp
}

// fail ends the attempt for good.
func (a *attempt) fail() {
	if b := a.currentBody(); b != nil {
		b.settle(true)
	}
}

func (a *attempt) currentBody() *body {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.body
}

// bodyFailed reports whether the caller's own reader failed, or its GetBody.
func (a *attempt) bodyFailed() bool {
	a.mu.Lock()
	b, failed := a.body, a.rewindErr != nil
	a.mu.Unlock()
	return failed || b != nil && b.failure() != nil
}
