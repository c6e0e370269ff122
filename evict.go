package deadconn

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-multierror"
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

var errCloseAll = errors.New("all connections were closed")

// death is why a connection is of no use any more. It is also the error that
// an evicted connection's own reads and writes return, inside a *net.OpError
// as package net would build it.
type death struct {
	kind Kind
	err  error // what said so
	at   int64

	shut          atomic.Bool             // the socket is closed: nothing can be sent on it
	autopsy       atomic.Pointer[Autopsy] // set before it is told to anybody
	rescued, lost atomic.Int64            // what became of its requests
}

func (d *death) Error() string {
	return net.ErrClosed.Error() + ": evicted (" + d.kind.String() + "): " + d.err.Error()
}

// Unwrap keeps callers right that ask for net.ErrClosed, which closing the
// socket gives without us.
func (d *death) Unwrap() []error { return []error{net.ErrClosed, d.err} }

// doom notes why c is of no use any more, and reports whether it is the first
// to say so.
func (c *conn) doom(kind Kind, err error) bool {
	if c.dead() {
		return false
	}
	r := c.reg
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.foreign {
		// A quiet connection is forgotten while requests are on it, and may
		// be adopted anew: it still dies once.
		if twin := r.failedForeignLocked(c.Conn); twin != nil && twin != c {
			c.reported.Store(true)
			c.evicted.Store(true)
			c.fate.CompareAndSwap(nil, twin.fate.Load())
			return false
		}
	}
	if !c.fate.CompareAndSwap(nil, &death{kind: kind, err: err, at: now()}) {
		return false
	}
	r.failed[r.failedNext%len(r.failed)] = c
	r.failedNext++
	return true
}

func (c *conn) dead() bool { return c.fate.Load() != nil }

// isShut reports whether c is dead and its socket is closed, by now. Between the
// two a request may still go out on it.
func (c *conn) isShut() bool {
	d := c.fate.Load()
	return d != nil && d.shut.Load()
}

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
	c.doom(kind, why)
	t := c.owner.Load()
	first = t != nil && c.reported.CompareAndSwap(false, true)
	if first {
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
	if c.foreign {
		c.reg.forget(c)
	}
	if c.closed.Load() || !c.evicted.CompareAndSwap(false, true) {
		return nil
	}
	if c.foreign {
		c.reg.foreignEvicted.Add(1)
	}
	raw := rawConn(c.Conn)
	err := raw.Close()
	if _, ok := c.Conn.(*tls.Conn); !ok && !c.foreign && c.Conn != raw {
		c.Conn.Close() // a wrapper may not notice what became of its socket
	}
	c.fate.Load().shut.Store(true)
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// adopt returns the conn for a connection of a that somebody else dialed, the same
// for all its requests as long as it is watched or was evicted of late.
func (r *Registry) adopt(nc net.Conn, a *attempt) *conn {
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
	c := &conn{Conn: raw, reg: r, addr: a.dialed(), born: now(), foreign: true, raw: rawSocket(raw)}
	c.own(a.t)
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
	return r.failedForeignLocked(raw)
}

func (r *Registry) failedForeignLocked(raw net.Conn) *conn {
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
