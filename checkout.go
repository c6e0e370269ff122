package deadconn

import (
	"errors"
	"time"
)

// The checkout asks the socket, before a request is written on a connection
// that was at rest, whether the peer has closed it. HTTP/2 sends the request
// all the same and loses it: 95 in 200 right after the close, measured
// (HTTP/1 peeks, and loses none). Nothing is sent then, so that any request
// may go to another connection. Half a microsecond is asked of a request that
// is not idempotent, which nothing else could save, and of the first write
// after a quiet spell.

// quietSpell is how long nothing may have been written.
const quietSpell = time.Millisecond

// hungUpWait bounds how long the answer is held back while the reader takes
// nothing of what the peer sent before it closed: answers of streams that could
// still end well, or a GOAWAY.
const hungUpWait = 5 * time.Millisecond

var (
	errPeerClosed = errors.New("the peer had closed it")
	errRefused    = &notSentError{"the peer had closed the connection"}
)

// hungUp reports whether the peer of c has closed it, so that nothing that is
// written can be answered and nothing more will come in.
func (c *conn) hungUp() bool {
	if c.raw == nil || !peerHungUp(c.raw) {
		return false
	}
	for end, left := now()+int64(hungUpWait), unread(c.raw); left > 0 && now() < end; {
		time.Sleep(50 * time.Microsecond)
		if n := unread(c.raw); n < left {
			end, left = now()+int64(hungUpWait), n
		}
	}
	return true
}

// quiet reports whether c speaks HTTP/2 and nothing was written to it for a
// while before at. Over HTTP/1 the peer may have answered and closed while the
// request is still being written, and its answer is to be read.
func (c *conn) quiet(at int64) bool {
	return c.proto.Load() == uint32(isHTTP2) && time.Duration(at-c.lastWrite.Load()) > quietSpell
}

// refuse is the end of a write on a connection that the peer has closed, having
// taken it once: from one that did not even do that, a retry would get the same.
func (c *conn) refuse() error {
	c.writeFailed.Store(true)
	c.evict(KindEOF, errPeerClosed)
	return c.opError("write", errRefused)
}
