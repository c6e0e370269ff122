package deadconn

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/http2"
)

// conn is a connection of a Registry. It sits below TLS: net/http speaks
// HTTP/2 only over a real *tls.Conn (DESIGN fact 4).
type conn struct {
	net.Conn
	raw   syscall.RawConn // its socket; nil: cannot be asked
	reg   *Registry
	owner atomic.Pointer[Transport] // whom to tell of c; nil: nobody uses it yet
	addr  string                    // as dialed; if foreign, as wanted
	born  int64                     // when the dial was done

	read, wrote atomic.Int64                  // bytes that went through
	shakenRead  atomic.Int64                  // read, when the TLS handshake was done; 0: not known
	lastWrite   atomic.Int64                  // when the last Write began
	lastRead    atomic.Int64                  // when something was read; 0: nothing was
	onWrite     atomic.Pointer[chan struct{}] // closed at the next write, if set

	fate        atomic.Pointer[death]         // why it is of no use any more; set once
	onClose     atomic.Pointer[chan struct{}] // closed by Close, if set
	heir        atomic.Pointer[chan struct{}] // closed when a retry has another connection, if set
	writeFailed atomic.Bool                   // a write failed, so that no later one can succeed
	evicted     atomic.Bool                   // set once, by whoever closes it
	reported    atomic.Bool                   // its owner was told that it was evicted
	closed      atomic.Bool                   // its user, the HTTP layer, has let go of it
	proto       atomic.Uint32                 // an outcome: isHTTP1, isHTTP2, or 0 if not known
	tls         atomic.Bool                   // known to have TLS on it
	foreign     bool                          // not dialed by us and not in the path of its bytes

	watched    atomic.Bool  // Health is not disabled
	listed     atomic.Bool  // on the list of the watch, or about to be
	suspected  atomic.Bool  // the watch suspects it
	listedAt   atomic.Int64 // since when
	unanswered atomic.Int64 // since when; 0: something was read after all writes
	writing    atomic.Int64 // since when a Write has been going on; 0: none
	nextListed *conn        // the list's
	doubts     *doubts      // the watch's own; nil: there never were any

	prev, next *conn // guarded by reg.mu
}

// epoch makes a monotonic clock out of time.Time that fits in an atomic.
var epoch = time.Now()

func now() int64 { return int64(time.Since(epoch)) }

var errPingLost = errors.New("a PING was not answered")

var errEndedUnused = errors.New("the peer ended it before it said anything")

// released returns a channel that is closed when c is.
func (c *conn) released() <-chan struct{} {
	for {
		if ch := c.onClose.Load(); ch != nil {
			return *ch
		}
		ch := make(chan struct{})
		if !c.onClose.CompareAndSwap(nil, &ch) {
			continue
		}
		// Close may have come before it could see ch.
		if c.closed.Load() && c.onClose.CompareAndSwap(&ch, nil) {
			close(ch)
		}
		return ch
	}
}

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.read.Add(int64(n))
		c.lastRead.Store(now())
		switch {
		case c.writing.Load() != 0:
			c.unanswered.Store(c.lastRead.Load()) // the write under way still is
		case c.unanswered.Load() != 0:
			c.unanswered.Store(0)
		}
	}
	if err != nil {
		err = c.failure("read", err)
	}
	return n, err
}

func (c *conn) Write(p []byte) (int, error) {
	at := now()
	if c.quiet(at) && c.proven() && c.hungUp() {
		return 0, c.refuse()
	}
	if c.shakenRead.Load() == 0 && isHTTP(p) {
		c.shaken()
	}
	sound := !c.dead()
	c.lastWrite.Store(at)
	c.writing.Store(at)
	c.wait(at)
	n, err := c.Conn.Write(p)
	if n > 0 {
		c.wrote.Add(int64(n)) // before writing is reset, see unlist
	}
	c.writing.Store(0)
	if ch := c.onWrite.Load(); ch != nil && c.onWrite.CompareAndSwap(ch, nil) {
		close(*ch)
	}
	switch {
	case err == nil:
	case n > 0 && errors.Is(err, os.ErrDeadlineExceeded):
		// net/http's WriteByteTimeout goes on where that was some progress.
	default:
		// What the TLS layer writes by itself, an alert or a key update,
		// may fail after a request has gone out whole. Such records are
		// short, and the end of reading comes before their failure mostly.
		if sound && len(p) > controlSize && c.proto.Load() == uint32(isHTTP2) {
			c.writeFailed.Store(true)
		}
		err = c.failure("write", err)
	}
	return n, err
}

// controlSize is the size of an alert or a key update with the AEAD ciphers of
// HTTP/2 (RFC 9113 section 9.2.2).
const controlSize = 31

// ReadFrom lets net/http send a file by sendfile, as it does on a TCPConn.
func (c *conn) ReadFrom(src io.Reader) (int64, error) {
	n, err := io.Copy(c.Conn, src) // not watched: src may be the slow one
	c.wrote.Add(n)
	c.wait(now())
	return n, err // which may be src's
}

// failure notes the end of c by an error of its own I/O, and turns what a
// closed socket says after an eviction into the reason for it.
func (c *conn) failure(op string, err error) error {
	switch {
	case op == "read" && errors.Is(err, os.ErrDeadlineExceeded), c.closed.Load():
		return err // somebody's deadline, or the end of an orderly life
	case c.evicted.Load(): // whatever a closed connection of that type says
		d := c.fate.Load()
		if d.err == (handshakeTimeoutError{}) {
			return d.err // as net/http returns it
		}
		return c.opError(op, d)
	}
	if kind := Classify(err); kind.Dead() {
		c.doom(kind, err)
	}
	return err
}

// opError wraps err as package net does.
func (c *conn) opError(op string, err error) error {
	e := &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
	if e.Addr != nil { // which an odd connection may not know
		e.Net = e.Addr.Network()
	}
	return e
}

// Close is called by the HTTP layer, after it has taken c out of its pool.
func (c *conn) Close() error {
	if !c.closed.CompareAndSwap(false, true) {
		return net.ErrClosed
	}
	if ch := c.onClose.Swap(nil); ch != nil {
		close(*ch)
	}
	switch t := c.owner.Load(); { // for recall
	case !c.proven():
		c.doom(KindNotEstablished, errEndedUnused)
	case t != nil && c.proto.Load() == uint32(isHTTP2) && time.Duration(now()-c.lastRead.Load()) >= t.health.PingTimeout:
		c.doom(KindLost, errPingLost) // most likely; a request's error will say so
	}
	c.reg.untrack(c)
	if t := c.owner.Load(); t != nil && t.hooks.ConnClosed != nil {
		t.events.put(event{closed: &ConnClosedInfo{
			Addr: c.addr, LocalAddr: c.LocalAddr(), RemoteAddr: c.RemoteAddr(), Protocol: c.protocol(),
			Age: time.Duration(now() - c.born), BytesRead: c.read.Load(), BytesWritten: c.wrote.Load(),
			Evicted: c.evicted.Load() || c.reported.Load(),
		}})
	}
	err := c.Conn.Close()
	if d := c.fate.Load(); d != nil {
		d.shut.Store(true)
	}
	if c.evicted.Load() {
		return nil // closed before, by us
	}
	return err
}

// leave ends our part: c is no HTTP connection any more. What is silent on it,
// or half closed, is its user's business.
func (c *conn) leave() {
	c.proto.Store(uint32(hasLeft))
	c.watched.Store(false)
}

// CloseWrite is there for the writable body of an upgraded connection.
func (c *conn) CloseWrite() error {
	if cw, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}

// NetConn returns the connection that was dialed, as tls.Conn.NetConn does.
func (c *conn) NetConn() net.Conn { return c.Conn }

// describe notes what tc, which is over c, speaks.
func (c *conn) describe(tc *tls.Conn) {
	c.tls.Store(true)
	o := isHTTP1
	if tc.ConnectionState().NegotiatedProtocol == http2.NextProtoTLS {
		o = isHTTP2
	}
	c.proto.Store(uint32(o))
}

// shaken notes that the TLS handshake is done.
func (c *conn) shaken() { c.shakenRead.CompareAndSwap(0, max(1, c.read.Load())) }

// isHTTP reports whether p, the first that its user writes in one go, is HTTP or
// TLS's application data, and so whether what comes before it is over: SOCKS, a
// CONNECT, a handshake. Those inside a proxy are net/http's, which tells nothing
// of them.
func isHTTP(p []byte) bool {
	const applicationData = 23 // RFC 8446 section 5.1
	return len(p) > 0 && (p[0] == applicationData || p[0] >= 'A') && !bytes.HasPrefix(p, []byte("CONNECT "))
}

// pooledWait bounds awaitPooled. The HTTP/2 layer takes microseconds.
const pooledWait = time.Millisecond

// awaitPooled waits after the handshake until the HTTP/2 layer has put c in
// its pool, or is about to: around that it writes its preface and the first
// request.
func (c *conn) awaitPooled() {
	written := make(chan struct{})
	c.onWrite.Store(&written)
	t := time.NewTimer(pooledWait)
	defer t.Stop()
	select {
	case <-written:
	case <-c.released():
	case <-t.C:
	}
}

// rawConn takes every layer off c that can be taken off.
func rawConn(c net.Conn) net.Conn {
	for range maxLayers {
		u, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		inner := u.NetConn()
		if inner == nil {
			break
		}
		c = inner
	}
	return c
}

// tracked finds a connection of a Registry below c, or nil.
func tracked(c net.Conn) *conn {
	for range maxLayers {
		switch u := c.(type) {
		case *conn:
			return u
		case interface{ NetConn() net.Conn }:
			c = u.NetConn()
		default:
			return nil
		}
	}
	return nil
}

// maxLayers bounds the walk down a stack of connections: TLS inside TLS
// through an HTTPS proxy is four.
const maxLayers = 16

// addrString is a's text; empty if a is nil, as it is of odd connections.
func addrString(a net.Addr) string {
	if a == nil {
		return ""
	}
	return a.String()
}
