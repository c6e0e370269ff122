package faultnet

import (
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A Conn is a net.Conn whose faults are switched on while it is in use.
// Without a fault it passes everything through.
//
// Faults may be set from any goroutine. The latest one wins; [Conn.Heal]
// takes back those that can be taken back.
type Conn struct {
	net.Conn

	local, remote net.Addr

	readDeadline  deadline
	writeDeadline deadline

	// reading and writing hold a token while a call is under way, so that
	// bytes kept back by a fault stay in order. They are channels and not
	// mutexes because a call that waits for its turn must still hear of a
	// fault, a Close or a deadline.
	reading chan struct{}
	writing chan struct{}

	closed    chan struct{}
	closeOnce sync.Once

	read, written atomic.Int64

	mu      sync.Mutex
	changed chan struct{} // closed and replaced whenever a field below changes

	writes   writeMode
	writeErr error  // the answer when writes == failing
	sent     []byte // swallowed by a black hole; a healed path would deliver it

	dark    bool   // Read delivers nothing
	came    []byte // arrived while dark
	cameErr error  // arrived after that

	underneath bool  // CloseUnderneath was called: the reader is not to know
	reset      error // Reset was called: what Read returns
}

type writeMode uint8

const (
	passing writeMode = iota
	failing
	holding
	swallowing
)

// NewConn returns c with all faults off. The caller uses only the result from
// now on.
func NewConn(c net.Conn) *Conn {
	return &Conn{
		Conn:          c,
		local:         c.LocalAddr(),
		remote:        c.RemoteAddr(),
		readDeadline:  deadline{passed: make(chan struct{})},
		writeDeadline: deadline{passed: make(chan struct{})},
		reading:       make(chan struct{}, 1),
		writing:       make(chan struct{}, 1),
		closed:        make(chan struct{}),
		changed:       make(chan struct{}),
	}
}

// change runs f under the lock and wakes everybody who waits for a change.
func (c *Conn) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
	close(c.changed)
	c.changed = make(chan struct{})
}

// FailWrites makes each Write fail at once, those held by [Conn.HoldWrites]
// included, with a *net.OpError around err as package net would build it: a
// [syscall.Errno] becomes an *os.SyscallError, [net.ErrClosed] stays bare, a
// *net.OpError is returned as it is. The reader is not disturbed: a Read goes
// on sleeping until data comes or Close wakes it.
//
// A Write already inside the kernel is not interrupted.
func (c *Conn) FailWrites(err error) {
	err = c.opError("write", err)
	c.change(func() { c.writes, c.writeErr = failing, err })
}

// HoldWrites makes Writes block until Close, the write deadline, Heal or
// another fault. A Write that is inside the kernel when HoldWrites is called
// does not return either; when Close or the deadline ends it, it reports the
// bytes that the kernel took beside the error.
func (c *Conn) HoldWrites() {
	c.change(func() { c.writes = holding })
}

// Blackhole makes the path drop everything in both directions: Writes succeed
// and go nowhere, Reads deliver nothing, not even an error of the connection,
// until Close or the read deadline.
//
// As with a real connection, nothing is lost for good: Heal delivers what was
// written and what arrived meanwhile, in order. Close sends its FIN, which a
// real black hole would drop too.
func (c *Conn) Blackhole() {
	c.change(func() { c.writes, c.dark = swallowing, true })
}

// Heal takes back FailWrites, HoldWrites and Blackhole. A connection that was
// closed or reset stays so.
func (c *Conn) Heal() {
	var flush bool
	c.change(func() {
		if c.reset == nil {
			c.writes, c.writeErr = passing, nil
		}
		c.dark = false
		flush = c.writes == passing && len(c.sent) > 0
	})
	if flush {
		// An empty Write sends the backlog first. It may block as long as the
		// peer does not read, and ends with Close.
		go c.Write(nil)
	}
}

// SetLinger0AndClose closes the socket with SO_LINGER 0: the peer gets an RST.
// Here, Reads and Writes get what the kernel gives on a closed socket
// (net.ErrClosed). For the user of c it is not closed: Closed reports false.
func (c *Conn) SetLinger0AndClose() {
	// Closed first: a Write that was held must not get through.
	closeWithRST(c.Conn)
	c.change(func() { c.writes, c.dark = passing, false })
}

// CloseUnderneath closes the socket without telling the user of c, as in
// golang/go#39750: each Write fails with the kernel connection's own "use of
// closed network connection", while a Read goes on sleeping until Close or
// the read deadline. The peer sees a FIN.
func (c *Conn) CloseUnderneath() {
	c.change(func() { c.underneath = true })
	c.Conn.Close()
	// Only now: a Write that was held must not get through.
	c.change(func() { c.writes = passing })
}

// Reset makes the connection end as if an RST had arrived: Reads fail with
// ECONNRESET, Writes with EPIPE. The peer gets an RST as well.
//
// Mechanism: the socket is closed with SO_LINGER 0, which sends the RST to the
// peer; the local errors are made here, since no portable call makes a kernel
// reset its own side. For an RST that really arrives see [Proxy.RST] and
// [PeerConn.RST].
func (c *Conn) Reset() {
	c.change(func() {
		c.reset = c.opError("read", errConnReset)
		c.writes, c.writeErr = failing, c.opError("write", errBrokenPipe)
		c.dark = false
	})
	closeWithRST(c.Conn)
}

// Read implements [net.Conn].
func (c *Conn) Read(p []byte) (int, error) {
	select {
	case c.reading <- struct{}{}:
		defer func() { <-c.reading }()
	case <-c.closed:
		return 0, c.opError("read", net.ErrClosed)
	case <-c.readDeadline.done():
		return 0, c.opError("read", os.ErrDeadlineExceeded)
	}
	for {
		n, err, changed := c.readKept(p)
		if changed != nil {
			select {
			case <-changed:
				continue
			case <-c.closed:
				return 0, c.opError("read", net.ErrClosed)
			case <-c.readDeadline.done():
				return 0, c.opError("read", os.ErrDeadlineExceeded)
			}
		}
		if n == 0 && err == nil {
			n, err = c.Conn.Read(p)
			if c.keep(p[:n], err) {
				continue
			}
		}
		c.read.Add(int64(n))
		return n, err
	}
}

// readKept answers a Read from what the faults prescribe. If changed is not
// nil, nothing can be delivered before it is closed; if all results are zero,
// the socket is to be asked.
func (c *Conn) readKept(p []byte) (n int, err error, changed <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.reset != nil:
		return 0, c.reset, nil
	case c.dark:
		return 0, nil, c.changed
	case len(c.came) > 0:
		n = copy(p, c.came)
		c.came = c.came[n:]
		return n, nil, nil
	case c.cameErr != nil:
		err, c.cameErr = c.cameErr, nil
		return 0, err, nil
	case c.underneath:
		return 0, nil, c.changed
	}
	return 0, nil, nil
}

// keep reports whether what the socket has just delivered must not reach the
// reader, or not yet.
func (c *Conn) keep(p []byte, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.Closed() || errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	if errors.Is(err, net.ErrClosed) {
		return c.underneath || c.reset != nil
	}
	if !c.dark {
		return false
	}
	c.came = append(c.came, p...)
	c.cameErr = err
	return true
}

// Write implements [net.Conn].
func (c *Conn) Write(p []byte) (int, error) {
	for {
		mode, err, changed := c.writeState()
		turn := c.writing
		switch mode {
		case failing:
			return 0, err
		case holding:
			turn = nil // it is nobody's turn
		}
		select {
		case turn <- struct{}{}:
			n, err, ok := c.writeInTurn(p)
			<-c.writing
			if ok {
				c.written.Add(int64(n))
				return n, err
			}
		case <-changed:
		case <-c.closed:
			return 0, c.opError("write", net.ErrClosed)
		case <-c.writeDeadline.done():
			return 0, c.opError("write", os.ErrDeadlineExceeded)
		}
	}
}

func (c *Conn) writeState() (writeMode, error, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.writes, c.writeErr, c.changed
}

// writeInTurn writes p if the mode allows it (still); if not, ok is false.
func (c *Conn) writeInTurn(p []byte) (n int, err error, ok bool) {
	c.mu.Lock()
	switch c.writes {
	case failing, holding:
		c.mu.Unlock()
		return 0, nil, false
	case swallowing:
		defer c.mu.Unlock()
		switch {
		case c.Closed():
			return 0, c.opError("write", net.ErrClosed), true
		case isClosed(c.writeDeadline.done()):
			return 0, c.opError("write", os.ErrDeadlineExceeded), true
		}
		c.sent = append(c.sent, p...)
		return len(p), nil, true
	}
	backlog := c.sent
	c.sent = nil
	c.mu.Unlock()

	if len(backlog) > 0 {
		if _, err := c.Conn.Write(backlog); err != nil {
			return 0, err, true
		}
		if len(p) == 0 {
			return 0, nil, true
		}
	}
	n, err = c.Conn.Write(p)
	for err == nil {
		mode, _, changed := c.writeState()
		if mode != holding {
			break
		}
		select {
		case <-changed:
		case <-c.closed:
			err = c.opError("write", net.ErrClosed)
		case <-c.writeDeadline.done():
			err = c.opError("write", os.ErrDeadlineExceeded)
		}
	}
	return n, err, true
}

// Close closes the connection and wakes every Read and Write, whatever fault
// holds it. A second Close returns the error that the socket gives.
func (c *Conn) Close() error {
	c.closeOnce.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// SetDeadline implements [net.Conn]. Deadlines also end the calls that a fault
// holds.
func (c *Conn) SetDeadline(t time.Time) error {
	c.readDeadline.set(t)
	c.writeDeadline.set(t)
	return c.Conn.SetDeadline(t)
}

// SetReadDeadline implements [net.Conn].
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.readDeadline.set(t)
	return c.Conn.SetReadDeadline(t)
}

// SetWriteDeadline implements [net.Conn].
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.writeDeadline.set(t)
	return c.Conn.SetWriteDeadline(t)
}

// NetConn returns the connection below c.
func (c *Conn) NetConn() net.Conn { return c.Conn }

// SyscallConn gives access to the socket below c.
func (c *Conn) SyscallConn() (syscall.RawConn, error) {
	if s, ok := c.Conn.(syscall.Conn); ok {
		return s.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}

// CloseWrite sends the peer a FIN, whatever fault is on.
func (c *Conn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// Closed reports whether the user of c has called Close. Faults that close the
// socket do not count.
func (c *Conn) Closed() bool { return isClosed(c.closed) }

// ClosedChan returns a channel that is closed by Close.
func (c *Conn) ClosedChan() <-chan struct{} { return c.closed }

// BytesWritten returns how many bytes Write has reported as written, those
// that a black hole swallowed included.
func (c *Conn) BytesWritten() int64 { return c.written.Load() }

// BytesRead returns how many bytes Read has delivered.
func (c *Conn) BytesRead() int64 { return c.read.Load() }

// opError returns err as package net returns it from a Read or Write.
func (c *Conn) opError(op string, err error) error {
	var e *net.OpError
	if errors.As(err, &e) {
		return err
	}
	if errno, ok := err.(syscall.Errno); ok {
		err = os.NewSyscallError(syscallName(op), errno)
	}
	return &net.OpError{Op: op, Net: c.local.Network(), Source: c.local, Addr: c.remote, Err: err}
}

// closeWithRST closes c so that its peer gets an RST instead of a FIN. If no
// connection in the stack below c knows SO_LINGER, it is a plain Close.
func closeWithRST(c net.Conn) error {
	for b := c; b != nil; b = below(b) {
		if l, ok := b.(interface{ SetLinger(sec int) error }); ok {
			l.SetLinger(0)
			// Close this one, not c: a *tls.Conn would write its alert first.
			return b.Close()
		}
	}
	return c.Close()
}

// below returns the connection that c wraps, or nil.
func below(c net.Conn) net.Conn {
	if n, ok := c.(interface{ NetConn() net.Conn }); ok {
		return n.NetConn()
	}
	return nil
}

// A deadline is a point in time at which a channel gets closed. It can be
// moved, even after it has passed.
type deadline struct {
	mu     sync.Mutex
	timer  *time.Timer
	passed chan struct{}
}

func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		<-d.passed // the timer has fired: let it finish before going on
	}
	d.timer = nil
	over := isClosed(d.passed)
	left := time.Until(t)
	if !t.IsZero() && left <= 0 {
		if !over {
			close(d.passed)
		}
		return
	}
	if over {
		d.passed = make(chan struct{})
	}
	if !t.IsZero() {
		passed := d.passed
		d.timer = time.AfterFunc(left, func() { close(passed) })
	}
}

func (d *deadline) done() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.passed
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
