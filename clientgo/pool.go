package clientgo

import (
	"net/http"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"unsafe"
	"weak"

	"github.com/deadconn/deadconn"
	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// A pool has the guards for one set of options, one for each transport of
// client-go's cache, so that clients share connections as they would without
// us. It lives as long as a rest.Config or a client that was made with it.
type pool struct {
	given deadconn.Options // as Protect got them
	opts  deadconn.Options // with a Registry

	mu     sync.Mutex
	guards map[uintptr]weak.Pointer[guard] // guarded by mu; by the address of guard.base
}

var pools struct {
	mu  sync.Mutex
	all []weak.Pointer[pool] // guarded by mu
}

// poolFor returns the process's pool for o.
func poolFor(o deadconn.Options) *pool {
	pools.mu.Lock()
	defer pools.mu.Unlock()
	pools.all = slices.DeleteFunc(pools.all, func(w weak.Pointer[pool]) bool { return w.Value() == nil })
	for _, w := range pools.all {
		if p := w.Value(); p != nil && equal(p.given, o) {
			return p
		}
	}
	p := &pool{given: o, opts: o, guards: make(map[uintptr]weak.Pointer[guard])}
	if p.opts.Registry == nil {
		p.opts.Registry = new(deadconn.Registry)
	}
	pools.all = append(pools.all, weak.Make(p))
	return p
}

// equal compares a and b field by field, whatever fields there are.
func equal(a, b deadconn.Options) bool {
	va, vb := reflect.ValueOf(&a).Elem(), reflect.ValueOf(&b).Elem()
	for i := range va.NumField() {
		fa, fb := va.Field(i), vb.Field(i)
		switch {
		case fa.Kind() == reflect.Func:
			// A func value is a pointer to its closure. (reflect's own
			// Pointer is that of the code, which closures share.)
			if *(*unsafe.Pointer)(fa.Addr().UnsafePointer()) != *(*unsafe.Pointer)(fb.Addr().UnsafePointer()) {
				return false
			}
		case !fa.Comparable() || !fb.Comparable() || !fa.Equal(fb):
			return false
		}
	}
	return true
}

// wrap is the transport.WrapperFunc that Protect adds.
func (p *pool) wrap(rt http.RoundTripper) http.RoundTripper {
	if rt == nil {
		rt = http.DefaultTransport
	}
	switch {
	case isProtected(rt):
		return rt // Protect was called twice, or deadconn.Wrap before it
	case isUpgrader(rt):
		return rt
	case ownTransport(rt).t == nil:
		return p.opts.Wrap(rt)
	}
	return p.guard(rt)
}

// isProtected reports whether a deadconn.Transport is rt, or below it.
func isProtected(rt http.RoundTripper) bool {
	for range maxLayers {
		switch u := rt.(type) {
		case *deadconn.Transport, *guard:
			return true
		case utilnet.RoundTripperWrapper:
			rt = u.WrappedRoundTripper()
		default:
			return false
		}
	}
	return false
}

// isUpgrader reports whether rt is what exec, attach and port-forward use:
// it makes a connection for one request, and its user takes that over. There
// is no pool to guard, and its request must not be sent twice (which could not
// be told from the request: the upgrade is asked for below us). What they have
// in common is that they hold their own TLS settings, and wrap nothing.
func isUpgrader(rt http.RoundTripper) bool {
	_, holds := rt.(utilnet.TLSClientConfigHolder)
	_, wraps := rt.(utilnet.RoundTripperWrapper)
	return holds && !wraps
}

// guard returns the guard for base, the same for all clients.
func (p *pool) guard(base http.RoundTripper) *guard {
	p.mu.Lock()
	defer p.mu.Unlock()
	// As long as a guard lives, so does its base, and the address is its own.
	at := reflect.ValueOf(base).Pointer()
	if g := p.guards[at].Value(); g != nil {
		return g
	}
	g := &guard{pool: p, base: base}
	g.follow()
	w := weak.Make(g)
	p.guards[at] = w
	runtime.AddCleanup(g, func(p *pool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.guards[at] == w {
			delete(p.guards, at)
		}
	}, p)
	return g
}

// maxLayers bounds the walk down a stack of round trippers.
const maxLayers = 32
