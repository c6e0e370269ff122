package deadconn

import (
	"cmp"
	"fmt"
	"time"
)

// A connection that says nothing is found out by evidence. Half of this file
// is the question (evidence in, verdict out, one pure function), half the
// watch that asks it. Closing is evict.go's.

// evidence is what is known of a connection at one moment.
type evidence struct {
	silent  time.Duration // since the oldest write after which nothing was read; 0: none
	writing time.Duration // how long a Write has been going on without progress; 0: none is
	http2   bool          // and is known to be
	kernel  kernelInfo
}

// kernelInfo is the kernel's account of the path (Linux: TCP_INFO). The zero
// value knows nothing.
type kernelInfo struct {
	known       bool
	unacked     uint32        // segments sent and not acknowledged
	notSent     uint32        // bytes that wait in the send buffer
	retransmits uint32        // timeouts in a row, without an ACK in between
	probes      uint32        // keep-alive or window probes in a row, likewise
	sinceACK    time.Duration // since the last ACK came in
	rto         time.Duration // until what is in flight is sent again, backed off
	rtt         time.Duration // smoothed
	acked       uint64        // bytes acknowledged since the connection began
}

// timeouts returns how many times in a row the kernel has waited in vain: for
// the acknowledgement of what is in flight, or for the answer to a probe of a
// window that is shut, which backs off in the same way. The last probe may
// still be under way.
//
// A peer whose window is shut may answer each retransmission by an ACK that
// acknowledges nothing: it is alive, and has answered within the timeout.
func (k kernelInfo) timeouts() uint32 {
	switch {
	case k.unacked > 0 && k.sinceACK <= k.rto:
		return 0
	case k.unacked > 0:
		return k.retransmits
	case k.notSent > 0 && k.probes > 0:
		return k.probes - 1
	}
	return 0
}

type livenessVerdict uint8

const (
	alive   livenessVerdict = iota // everything was answered, or at least acknowledged
	silent                         // no answer yet, and no proof of anything
	suspect                        // cheap, early evidence against the path
	cutOff                         // proof, if only another connection can be had
	dead                           // proof
)

// The thresholds, and what they were measured against. On a path of 10 % loss
// each way and 40 ms RTT, two retransmissions in a row are seen for 1.2 s and
// three for 38 ms, and the longest time without an ACK is 2.3 s. A black hole
// on a local network has 1 at 0.4 s, 2 at 0.8 s and 3 at 1.7 s. A spurious
// tail loss probe counts as no retransmission here. That loss takes 6 probes
// in a row, or their answers, 1 time in 20,000.
const (
	suspectSilence     = 200 * time.Millisecond
	suspectRetransmits = 1
	deadSilence        = 2500 * time.Millisecond // or 4 RTT, if that is longer
	deadRetransmits    = 3
	deadProbes         = 6
)

// verdict judges e. What the kernel knows decides: a peer that has
// acknowledged everything is alive as far as it can see. Whether its process
// is, only a PING can tell, which net/http sends. An HTTP/2 peer that takes
// nothing at all for writeTimeout is dead, since HTTP/2 reads its connection
// whatever becomes of its streams; one of HTTP/1 may hold an upload back for
// as long as it likes. Where the kernel tells nothing, that and the PING are
// all there is.
func (e evidence) verdict(writeTimeout time.Duration) livenessVerdict {
	k := e.kernel
	long := max(deadSilence, 4*k.rtt)
	switch {
	case e.silent == 0 && e.writing == 0:
		return alive
	case e.http2 && e.writing > writeTimeout:
		return dead
	case !k.known:
		return silent
	case k.timeouts() >= deadRetransmits && k.sinceACK > long && e.silent > long:
		return cutOff
	case k.probes >= deadProbes && k.sinceACK > long:
		return cutOff
	case k.unacked == 0 && k.notSent == 0 && e.writing == 0:
		return alive
	case k.timeouts() >= suspectRetransmits && k.sinceACK > suspectSilence && e.silent > suspectSilence:
		return suspect
	}
	return silent
}

// silenceError says why a connection was evicted in silence.
type silenceError struct{ evidence }

func (e *silenceError) Error() string {
	if k := e.kernel; k.known && k.unacked+k.probes > 0 {
		return fmt.Sprintf("no answer for %v, no ACK for %v, %d segments unacknowledged, %d retransmissions, %d probes",
			e.silent.Round(time.Millisecond), k.sinceACK.Round(time.Millisecond), k.unacked, k.retransmits, k.probes)
	}
	return fmt.Sprintf("a write has made no progress for %v", e.writing.Round(time.Millisecond))
}

// watchTick is how often connections that wait for an answer are looked at.
const watchTick = 100 * time.Millisecond

// wait notes that something is about to be written to c, which is to be
// answered. On the busy path that takes no lock: c is put on the list when it
// is not there, and the watch takes it off.
func (c *conn) wait(at int64) {
	c.unanswered.CompareAndSwap(0, at)
	if !c.watched.Load() || c.listed.Load() {
		return
	}
	c.listedAt.Store(at)
	if c.listed.CompareAndSwap(false, true) {
		c.reg.list(c)
	}
}

// list puts c, which is marked as listed, before the watch, and starts it if
// it rests.
func (r *Registry) list(c *conn) {
	for {
		head := r.waiting.Load()
		c.nextListed = head
		if r.waiting.CompareAndSwap(head, c) {
			break
		}
	}
	if r.watching.CompareAndSwap(false, true) {
		time.AfterFunc(watchTick, r.watch)
	}
}

// watch looks at the connections that wait for an answer, again and again
// until there are none. So a Registry at rest has no timer, and never more
// than one.
func (r *Registry) watch() {
	for c := r.waiting.Swap(nil); c != nil; {
		next := c.nextListed
		c.nextListed = nil
		r.watched = append(r.watched, c)
		c = next
	}
	r.watched = r.look(r.watched)
	if len(r.watched) == 0 {
		r.watched = nil
		r.watching.Store(false)
		// One may have been listed meanwhile, by somebody who saw the watch
		// go on.
		if r.waiting.Load() == nil || !r.watching.CompareAndSwap(false, true) {
			return
		}
	}
	time.AfterFunc(watchTick, r.watch)
}

// look passes once over list and returns those that still wait, in its place.
func (r *Registry) look(list []*conn) []*conn {
	rest := list[:0]
	for _, c := range list {
		if c.look(now()) {
			rest = append(rest, c)
		}
	}
	clear(list[len(rest):])
	return rest
}

// look judges c, does what follows, and reports whether c is to be looked at
// again without another write.
func (c *conn) look(at int64) bool {
	if c.closed.Load() || c.evicted.Load() || !c.watched.Load() {
		if c.doubts != nil {
			c.endProbes()
		}
		c.listed.Store(false)
		c.suspect(alive)
		c.reg.forget(c)
		return false
	}
	wrote := c.wrote.Load()
	e := c.evidence(at)
	if wait := max(e.silent, e.writing); wait > 0 {
		if wait < suspectSilence {
			return true // too early to ask
		}
		if c.doubts == nil {
			c.doubts = &doubts{ackedAt: at - int64(wait)}
		}
		if c.raw != nil {
			e.kernel = tcpInfo(c.raw)
		}
		c.doubts.refine(at, &e)
	}
	v := c.confirm(at, e.verdict(c.owner.Load().health.WriteTimeout), e.kernel)
	if v == dead {
		go c.evict(KindSilent, &silenceError{e}) // the watch is not to wait for a close
		c.suspect(alive)
		return false
	}
	c.suspect(v)
	if v == alive || e.kernel.probes > 0 && e.kernel.notSent == 0 {
		if c.probe(at, e) {
			return true
		}
	}
	switch {
	case v == alive:
		// Acknowledged is enough: until the next write, or probe, the
		// kernel sees no more.
		return c.unlist(wrote)
	case !e.kernel.known && e.writing == 0:
		// Where the kernel sees nothing (a foreign connection is closed
		// then, most likely) only a write under way is worth watching.
		return c.unlist(wrote)
	}
	return true
}

// doubts are what the watch has noted of a connection that kept it waiting.
type doubts struct {
	firstLook int64  // since when it looks suspect; 0: it does not
	cutAt     int64  // since when it looks cut off; 0: it does not
	opened    int64  // when another connection was opened since; 0: not yet
	gone      bool   // that took long: the path was gone
	asked     uint32 // how often this one had been asked in vain by then
	askedAt   int64  // when it was seen to be asked again; 0: not yet
	detoured  bool   // new requests go elsewhere because of it

	acked   uint64 // kernelInfo.acked, when it was last seen to change
	ackedAt int64
	restAt  int64 // when all was seen acknowledged; 0: never

	wrote     int64     // conn.wrote, which tells silences apart
	since     int64     // when this one was first seen
	round     int       // index of probeRounds, in it
	probed    int64     // when the last probe of the round was sent; 0: none was
	keepAlive keepAlive // the socket's own, while probed
}

// refine bounds e by what was noted before: a Write under way may have made
// progress, and a silence that began before all was acknowledged is none of
// the path's.
func (d *doubts) refine(at int64, e *evidence) {
	k := e.kernel
	if k.acked != d.acked {
		d.acked, d.ackedAt = k.acked, at
	}
	if e.writing > 0 {
		e.writing = max(1, min(e.writing, time.Duration(at-d.ackedAt)))
	} else {
		d.ackedAt = at
	}
	if k.known && k.unacked == 0 && k.notSent == 0 {
		d.restAt = at
	}
	if e.silent > 0 && d.restAt != 0 {
		e.silent = max(1, min(e.silent, time.Duration(at-d.restAt)))
	}
}

// keepAlive is a socket's TCP_KEEPIDLE, in seconds, and TCP_KEEPCNT. Zero
// means that it has none.
type keepAlive struct{ idle, count int }

// backWait bounds how long a connection is waited for whose path is back. It is
// not asked again before its timeout, which has doubled all the while.
const backWait = 5 * time.Second

// confirm lets a suspicion against c stand only if it holds over max(100 ms,
// 3 RTT) and another connection can be had; see trial.go. It is death if that is
// so, again, when c looks cut off. If the path was gone meanwhile, and is back,
// c is to be asked once more, and to keep silent.
func (c *conn) confirm(at int64, v livenessVerdict, k kernelInfo) livenessVerdict {
	d := c.doubts
	if d != nil && (v == alive || k.sinceACK < time.Duration(at-d.firstLook)) {
		d.firstLook = 0 // it has answered
	}
	if v != suspect && v != cutOff {
		return v
	}
	if d.firstLook == 0 {
		d.firstLook, d.cutAt, d.opened, d.gone = at, 0, 0, false
	}
	since := d.firstLook
	if v == cutOff {
		if d.cutAt == 0 {
			d.cutAt = at
			d.gone = d.gone || d.opened == 0 && time.Duration(at-since) >= trialPrompt
			if time.Duration(at-d.opened) > trialPrompt {
				d.opened = 0 // it is old
			}
		}
		since = d.cutAt
	}
	hold := max(watchTick, 3*k.rtt)
	early := time.Duration(at-d.firstLook) < hold
	asked := k.retransmits + k.probes
	if d.opened == 0 {
		d.opened = c.owner.Load().opened(c, since-int64(suspectSilence), early)
		d.gone = d.gone || time.Duration(cmp.Or(d.opened, at)-since) >= trialPrompt
		d.asked, d.askedAt = asked, 0
	}
	if d.askedAt == 0 && asked > d.asked {
		d.askedAt = at
	}
	switch {
	case d.opened == 0, early:
		return silent
	case v == cutOff && (!d.gone ||
		d.askedAt != 0 && time.Duration(at-d.askedAt) >= max(hold, trialPrompt) || // it may be another path, and longer
		time.Duration(at-d.opened) >= backWait):
		return dead
	}
	return suspect
}

// suspect begins a suspicion against c or ends it. It stands until c has
// answered or died; an ACK is an answer.
func (c *conn) suspect(v livenessVerdict) {
	d, t := c.doubts, c.owner.Load()
	switch {
	case d == nil:
	case v == suspect && !c.suspected.Load():
		c.suspected.Store(true)
		t.suspect(c)
	case v == alive && c.suspected.Load():
		c.suspected.Store(false)
		t.clear(c, !c.dead() && !c.closed.Load())
	}
}

// probeRounds are when, in a silence in which everything was acknowledged,
// the kernel is made to ask the peer's: the request may have got through just
// before the path died. Later on the PINGs of HTTP/2 take over.
var probeRounds = [...]time.Duration{time.Second, 5 * time.Second}

// probeEvery is how often, as long as there is no answer; or once an RTT, if
// that is longer.
const probeEvery = 200 * time.Millisecond

// probe sends TCP keep-alive probes on a connection of ours that is silent,
// and reports whether c is to be looked at for their sake. A peer whose
// process is slow, or frozen, answers: its kernel does.
func (c *conn) probe(at int64, e evidence) bool {
	d := c.doubts
	if d == nil || c.foreign {
		return false
	}
	if wrote := c.wrote.Load(); wrote != d.wrote || c.unanswered.Load() == 0 {
		c.endProbes()
		d.wrote, d.since, d.round = wrote, at, 0
	}
	if c.unanswered.Load() == 0 || d.round == len(probeRounds) {
		return false
	}
	round := time.Duration(at-d.since) - probeRounds[d.round]
	switch {
	case round < 0: // not yet
	case d.probed != 0 && e.kernel.sinceACK < round:
		c.endProbes()
		d.round++
		return d.round < len(probeRounds)
	case at-d.probed >= int64(max(probeEvery, e.kernel.rtt)):
		was := probePeer(c.raw)
		if was == (keepAlive{}) {
			return false
		}
		if d.probed == 0 {
			d.keepAlive = was
		}
		d.probed = at
	}
	return true
}

// endProbes puts back what the probes changed on c's socket.
func (c *conn) endProbes() {
	if d := c.doubts; d.probed != 0 {
		unprobe(c.raw, d.keepAlive)
		d.probed = 0
	}
}

// unlist takes c off the list, unless something was written since wrote was
// read: that writer may have taken c for listed.
func (c *conn) unlist(wrote int64) bool {
	c.listed.Store(false)
	if c.wrote.Load() == wrote && c.writing.Load() == 0 {
		c.reg.forget(c)
		return false
	}
	if !c.listed.CompareAndSwap(false, true) {
		return false // the writer has listed c
	}
	c.listedAt.Store(now())
	return true
}

// evidence collects what is known of c, without asking the kernel.
func (c *conn) evidence(at int64) (e evidence) {
	// Not every write is answered. What was left so when c was last at rest
	// is no part of this silence.
	if since := c.unanswered.Load(); since != 0 {
		e.silent = max(1, time.Duration(at-max(since, c.listedAt.Load())))
	}
	if since := c.writing.Load(); since != 0 {
		e.writing = max(1, time.Duration(at-since))
	}
	e.http2 = c.proto.Load() == uint32(isHTTP2)
	return e
}
