package deadconn

import (
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/idna"
)

// spare is where new requests go while the connection to their host is under
// suspicion: a second http.Transport with the same settings, dialers and
// Registry. The suspect keeps its place in the first, and its streams go on.
// When it has answered or died the first is used again, and the spare's
// connections end as soon as they are idle. There is one spare at most, made
// when it is first needed.
type spare struct {
	make func() *http.Transport // nil: the base is not ours

	// hosts counts the suspects by address as dialed. It is never changed,
	// only replaced, and nil while there is no suspicion: all that it costs
	// then is this load.
	hosts     atomic.Pointer[map[string]int]
	transport atomic.Pointer[http.Transport]

	mu      sync.Mutex
	trusted map[string]int64 // guarded by mu; until when a host wrongly suspected is not suspected again
}

// spareIdle is how long an idle connection of the spare stays.
const spareIdle = 10 * time.Second

// trustAfterError bounds what wrong suspicions can cost: one dial a host in
// that time.
const trustAfterError = 10 * time.Second

// route returns the transport for req.
func (t *Transport) route(req *http.Request) http.RoundTripper {
	hosts := t.spare.hosts.Load()
	if hosts == nil || req == nil || req.URL == nil {
		return t.base
	}
	if (*hosts)[dialAddr(t.own, req)] > 0 {
		return t.spare.transport.Load()
	}
	return t.base
}

// suspect sends new requests to c's host elsewhere. HTTP/1 needs no such
// thing: no other request gets a connection that is waiting for an answer. If
// MaxConnsPerHost is set a second transport would break it, and the suspect
// keeps its requests until there is proof.
func (t *Transport) suspect(c *conn) {
	s := &t.spare
	if s.make == nil || t.own.MaxConnsPerHost > 0 || c.proto.Load() == uint32(isHTTP1) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if now() < s.trusted[c.addr] {
		return
	}
	if s.transport.Load() == nil {
		rt := s.make()
		if rt.IdleConnTimeout == 0 || rt.IdleConnTimeout > spareIdle {
			rt.IdleConnTimeout = spareIdle
		}
		s.transport.Store(rt)
	}
	s.countLocked(c.addr, 1)
	c.doubts.detoured = true
	t.stats.suspected.Add(1)
	if t.hooks.ConnSuspected != nil {
		info := ConnSuspectedInfo{Addr: c.addr, LocalAddr: c.LocalAddr(), RemoteAddr: c.RemoteAddr()}
		if c.raw != nil {
			info.Path = tcpInfo(c.raw).info()
		}
		t.events.put(event{suspected: &info})
	}
}

// clear ends the suspicion against c. It was wrong if c has answered.
func (t *Transport) clear(c *conn, wrong bool) {
	s := &t.spare
	if !c.doubts.detoured {
		return
	}
	c.doubts.detoured = false
	s.mu.Lock()
	defer s.mu.Unlock()
	s.countLocked(c.addr, -1)
	if wrong {
		s.trustLocked(c.addr)
	}
	s.transport.Load().CloseIdleConnections()
}

func (s *spare) countLocked(addr string, n int) {
	hosts := make(map[string]int)
	if old := s.hosts.Load(); old != nil {
		for a, k := range *old {
			hosts[a] = k
		}
	}
	if hosts[addr] += n; hosts[addr] <= 0 {
		delete(hosts, addr)
	}
	if len(hosts) == 0 {
		s.hosts.Store(nil)
		return
	}
	s.hosts.Store(&hosts)
}

func (s *spare) trustLocked(addr string) {
	at := now()
	for a, until := range s.trusted {
		if until < at {
			delete(s.trusted, a)
		}
	}
	if s.trusted == nil {
		s.trusted = make(map[string]int64)
	}
	s.trusted[addr] = at + int64(trustAfterError)
}

// dialAddr returns the address that rt would dial for req, as net/http's
// canonicalAddr makes it.
func dialAddr(rt *http.Transport, req *http.Request) string {
	u := req.URL
	if rt.Proxy != nil {
		if p, err := rt.Proxy(req); err == nil && p != nil {
			u = p
		}
	}
	host := u.Hostname()
	if ascii, err := idna.Lookup.ToASCII(host); err == nil {
		host = ascii
	}
	return net.JoinHostPort(host, portOf(u))
}

func portOf(u *url.URL) string {
	if p := u.Port(); p != "" {
		return p
	}
	switch strings.ToLower(u.Scheme) {
	case "https":
		return "443"
	case "socks5", "socks5h":
		return "1080"
	}
	return "80"
}
