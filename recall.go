package deadconn

import (
	"net"
)

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
	if kind == KindNotSent {
		kind = KindNotEstablished // "not usable", so soon
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
		if c != nil && !c.foreign && c.addr == addr && c.fate.Load().at >= since {
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
