package deadconn

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"reflect"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/net/http2"
)

// A Registry dials connections and keeps track of them until they are closed,
// so that exactly one of them can be closed when it is found dead. It is what
// [NewTransport] works with. Use one directly to give a transport that
// somebody else builds the same evidence: set its DialContext (or client-go's
// rest.Config.Dial) to [Registry.DialContext], and wrap it by
// [Options.Wrap] with this Registry. Without a Transport that uses its
// connections it keeps count of them and does nothing else.
//
// Whoever dials through a Registry closes the connections, as usual.
// The zero value is ready. A Registry must not be copied, and its fields must
// not be changed, after first use. All methods may be called concurrently.
type Registry struct {
	// Dial opens the underlying connections. Nil means a net.Dialer with the
	// timeout and keep-alive of net/http's default transport, 30 seconds
	// each.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)

	// TLSClientConfig is what DialTLSContext sets up TLS with. It is cloned
	// and never changed. Nil means the zero tls.Config, which offers no
	// protocol by ALPN and so speaks HTTP/1. NewTransport does not use it.
	TLSClientConfig *tls.Config

	// TLSHandshakeTimeout bounds the handshake in DialTLSContext. Zero means
	// no limit. NewTransport does not use it.
	TLSHandshakeTimeout time.Duration

	mu   sync.Mutex
	live conn // guarded by mu; the sentinel of a ring of the open connections
	n    int  // guarded by mu; how many there are

	// The last connections that failed or were evicted, for errors that do
	// not tell where they come from.
	failed     [32]*conn // guarded by mu; a ring
	failedNext int       // guarded by mu

	// Connections that somebody else dialed, while they are watched, and
	// how many of them were ever evicted.
	foreign        sync.Map // net.Conn, the raw one -> *conn
	foreignEvicted atomic.Int64

	waiting  atomic.Pointer[conn] // a stack of those that are new to the watch
	watching atomic.Bool          // the watch goes on
	watched  []*conn              // the watch's own: those that it looks at
}

// conn is a connection of a Registry. It sits below TLS: net/http speaks
// HTTP/2 only over a real *tls.Conn (DESIGN fact 4).
type conn struct {
	net.Conn
	raw   syscall.RawConn // its socket; nil: cannot be asked
	reg   *Registry
	owner atomic.Pointer[Transport] // whom to tell of c; nil: nobody uses it yet
	addr  string                    // as dialed
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

// track takes over raw. The conn that it returns is to be closed by its user.
func (r *Registry) track(raw net.Conn, addr string, owner *Transport) *conn {
	c := &conn{Conn: raw, reg: r, addr: addr, born: now(), raw: rawSocket(raw)}
	if owner != nil {
		c.own(owner)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.live.next == nil {
		r.live.next, r.live.prev = &r.live, &r.live
	}
	c.prev, c.next = r.live.prev, &r.live
	c.prev.next, c.next.prev = c, c
	r.n++
	return c
}

func (r *Registry) untrack(c *conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.next == nil {
		return
	}
	c.prev.next, c.next.prev = c.next, c.prev
	c.prev, c.next = nil, nil
	r.n--
}

// Len returns how many connections are open.
func (r *Registry) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.n
}

// CloseAll closes every open connection. Requests on them fail, or are sent
// again on a new one if a [Transport] may do so. It returns the errors of the
// closing, nil if there was none. The Registry stays usable.
func (r *Registry) CloseAll() error {
	r.mu.Lock()
	all := make([]*conn, 0, r.n)
	for c := r.live.next; c != nil && c != &r.live; c = c.next {
		all = append(all, c)
	}
	r.mu.Unlock()
	var errs *multierror.Error
	for _, c := range all {
		if err := c.shut(KindClosed, errCloseAll); err != nil {
			errs = multierror.Append(errs, err)
		}
	}
	return errs.ErrorOrNil()
}

var errPingLost = errors.New("a PING was not answered")

var errEndedUnused = errors.New("the peer ended it before it said anything")

var errCloseAll = errors.New("all connections were closed")

// death is why a connection is of no use any more. It is also the error that
// an evicted connection's own reads and writes return, inside a *net.OpError
// as package net would build it.
type death struct {
	kind Kind
	err  error // what said so
	at   int64

	autopsy       atomic.Pointer[Autopsy] // set before it is told to anybody
	rescued, lost atomic.Int64            // what became of its requests
}

func (d *death) Error() string {
	return "connection evicted (" + d.kind.String() + "): " + d.err.Error()
}

// Unwrap keeps callers right that ask for net.ErrClosed, which closing the
// socket gives without us.
func (d *death) Unwrap() []error { return []error{net.ErrClosed, d.err} }

// doom notes why c is of no use any more, and reports whether it is the first
// to say so.
func (c *conn) doom(kind Kind, err error) bool {
	if !c.fate.CompareAndSwap(nil, &death{kind: kind, err: err, at: now()}) {
		return false
	}
	r := c.reg
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed[r.failedNext%len(r.failed)] = c
	r.failedNext++
	return true
}

func (c *conn) dead() bool { return c.fate.Load() != nil }

// own makes t the one to be told of c, if nobody is yet.
func (c *conn) own(t *Transport) {
	if c.owner.Load() != nil || !c.owner.CompareAndSwap(nil, t) {
		return
	}
	if !t.health.Disable {
		c.watched.Store(true)
	}
	if c.foreign {
		return
	}
	t.stats.dialed.Add(1)
	if t.hooks.ConnTracked != nil {
		t.events.put(event{tracked: c})
	}
}

// evict closes c, if the HTTP layer has not done so yet, and tells its owner,
// once; it reports whether this call did. It must be called without locks.
func (c *conn) evict(kind Kind, why error) (first bool) {
	t := c.owner.Load()
	first = t != nil && c.reported.CompareAndSwap(false, true)
	if first {
		c.doom(kind, why)
		c.fate.Load().autopsy.Store(c.autopsy(now()))
	}
	c.shut(kind, why)
	if first {
		t.evicted(c)
	}
	return first
}

// shut closes the raw connection, once. A *tls.Conn is never closed here: that
// can hang for 5 seconds on a dead peer.
func (c *conn) shut(kind Kind, why error) error {
	c.doom(kind, why)
	if c.closed.Load() || !c.evicted.CompareAndSwap(false, true) {
		return nil
	}
	if c.foreign {
		c.reg.foreignEvicted.Add(1)
		c.reg.forget(c)
	}
	raw := rawConn(c.Conn)
	err := raw.Close()
	if _, ok := c.Conn.(*tls.Conn); !ok && !c.foreign && c.Conn != raw {
		c.Conn.Close() // a wrapper may not notice what became of its socket
	}
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// adopt returns the conn for a connection that somebody else dialed, the same
// for all its requests as long as it is watched or was evicted of late.
func (r *Registry) adopt(nc net.Conn, owner *Transport) *conn {
	raw := rawConn(nc)
	if !isPointer(raw) {
		return nil // it has no identity to go by
	}
	if c, ok := r.foreign.Load(raw); ok {
		return c.(*conn)
	}
	if c := r.evictedForeign(raw); c != nil {
		return c
	}
	c := &conn{Conn: raw, reg: r, born: now(), foreign: true, raw: rawSocket(raw)}
	c.own(owner)
	v, _ := r.foreign.LoadOrStore(raw, c)
	return v.(*conn)
}

// forget lets go of a connection that was adopted.
func (r *Registry) forget(c *conn) {
	if c.foreign {
		r.foreign.CompareAndDelete(c.Conn, c)
	}
}

// evictedForeign returns the conn of an adopted connection that was evicted
// of late, or nil.
func (r *Registry) evictedForeign(raw net.Conn) *conn {
	if r.foreignEvicted.Load() == 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.failed {
		if c != nil && c.foreign && c.Conn == raw {
			return c
		}
	}
	return nil
}

func isPointer(c net.Conn) bool { return reflect.ValueOf(c).Kind() == reflect.Pointer }

// releaseWait bounds the wait for the HTTP layer to let go of an evicted
// connection. It takes well under a millisecond unless the machine is busy;
// net/http itself gives a hanging TLS close 250 ms.
const releaseWait = 500 * time.Millisecond

// awaitRelease waits until the HTTP layer has closed c, which it does after
// taking it out of its pool: until then a retry can land on it again (7 to 13
// times in 640, measured).
func (c *conn) awaitRelease(ctx context.Context) {
	if c.foreign {
		return
	}
	t := time.NewTimer(releaseWait)
	defer t.Stop()
	select {
	case <-c.released():
	case <-ctx.Done():
	case <-t.C:
	}
}

// succeed makes next the first attempt on another connection, if none is under
// way: what is waiting then goes on when next has its connection. Otherwise it
// waits for that one, so that the requests that died together do not all dial.
func (c *conn) succeed(ctx context.Context, next *attempt) {
	ch := make(chan struct{})
	if c.heir.CompareAndSwap(nil, &ch) {
		next.onConn = sync.OnceFunc(func() { close(ch) })
		return
	}
	t := time.NewTimer(succeedWait)
	defer t.Stop()
	select {
	case <-*c.heir.Load():
	case <-ctx.Done():
	case <-t.C:
	}
}

// succeedWait bounds the wait for another request's dial, which has the
// request's own reasons to take long.
const succeedWait = time.Second

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
		if c.unanswered.Load() != 0 {
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
	if c.quiet(at) && c.hungUp() {
		return 0, c.refuse()
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
		return &net.OpError{Op: op, Net: c.LocalAddr().Network(), Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: d}
	}
	if kind := Classify(err); kind.Dead() {
		c.doom(kind, err)
	}
	return err
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

// A TLS alert, in the largest framing of TLS 1.2 and 1.3, with room to spare.
// An HTTP/2 server that took the connection has sent more: its SETTINGS and
// an acknowledgement of ours.
const alertSize = 64

// refused reports whether c failed, with an error of that kind, in the way of
// a server, or a firewall, that does not want this client: ended by the peer
// after the handshake, before it had said anything, and so new that the
// request from before since was its first. A retry would meet the same
// refusal (golang/go#76671).
func (c *conn) refused(kind Kind, since int64) bool {
	if d := c.fate.Load(); d != nil {
		kind = d.kind
	}
	return c.born > since && peerEnded(kind) && !c.proven()
}

// proven reports whether the peer has said anything but an alert after the
// handshake.
func (c *conn) proven() bool {
	shaken := c.shakenRead.Load()
	return shaken != 0 && c.read.Load()-shaken > alertSize
}

func peerEnded(k Kind) bool {
	return k == KindReset || k == KindEOF || k == KindNotEstablished
}

// recall finds where err, of that kind, came from among the connections to
// addr that failed of late, for a request that began at since. Package net
// puts the connection's own address value into its errors. If err has none, c
// is the only one that it can have been, nil if there are several or none, and
// refused says whether all of them were refusals.
func (r *Registry) recall(err error, kind Kind, addr string, since int64) (c *conn, refused bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if source := sourceOf(err); source != nil {
		for _, c := range r.failed {
			if c != nil && sameAddr(c.LocalAddr(), source) {
				return c, c.refused(kind, since)
			}
		}
	}
	n, refusals := 0, 0
	note := func(one *conn) {
		c = one
		n++
		if one.refused(kind, since) {
			refusals++
		}
	}
	for _, c := range r.failed {
		if c != nil && c.addr == addr && c.fate.Load().at >= since {
			note(c)
		}
	}
	// One that the peer ended inside TLS, by close_notify or an alert, has
	// not failed: the HTTP layer is about to close it.
	for c := r.live.prev; c != nil && c != &r.live && c.born > since; c = c.prev {
		if c.addr == addr && !c.dead() {
			note(c)
		}
	}
	if n != 1 || !c.dead() {
		c = nil
	}
	return c, n > 0 && n == refusals
}

// sourceOf returns the local address in err, nil if there is none.
func sourceOf(err error) net.Addr {
	for _, e := range flatten(err) {
		if op, ok := e.(*net.OpError); ok && op.Source != nil {
			return op.Source
		}
	}
	return nil
}

// sameAddr compares identities: two connections never share a *net.TCPAddr.
func sameAddr(a, b net.Addr) bool {
	x, ok := a.(*net.TCPAddr)
	y, ok2 := b.(*net.TCPAddr)
	return ok && ok2 && x == y
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
