package deadconn

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"
)

// Silence alone does not tell that another connection would do better: while
// the client's own link is down nothing can be dialed, and a request is best
// left where it is, since TCP goes on when the link is back. So a connection
// is given up in silence only once another could be opened to its address; if
// that was not to be had before, the old one gets time to answer.

// trials are the dials that find out, two at a time for an address at most.
type trials struct {
	under dialFunc // what NewTransport dials by; nil: wrapped

	mu     sync.Mutex
	last   map[string]*trial // guarded by mu; by address as dialed
	mapped map[string]string // guarded by mu; what a base makes of addresses above our Registry, reversed
}

type trial struct {
	running int      // how many dials are under way
	began   int64    // when the last of them began
	patient int64    // when the one began that may take long; 0: there is none
	ended   int64    // when the last ended
	opened  int64    // when it was last found that one can be had; 0: never
	kept    net.Conn // that one, while nobody has taken it
}

const (
	// trialPatience is how long a dial may take: a nameserver is down, or one
	// address of several. It tells nothing if it takes longer: the dialer may
	// wait for something else than the path. PINGs take as long.
	trialPatience = defaultPingInterval + defaultPingTimeout

	// trialTimeout is when another begins beside it, and how long that may
	// take. It may find the path back earlier than the retransmissions of the
	// first one's SYN, which back off.
	trialTimeout = 3 * time.Second
	trialEvery   = 500 * time.Millisecond

	// trialPrompt tells a path that was there from one that has come back: a
	// SYN that was lost is sent again after a second (RFC 6298).
	trialPrompt = time.Second

	trialKept   = 2 * time.Second  // how long its connection may be taken
	trialForget = 10 * time.Second // how long its outcome is of any use
)

// opened returns when a trial has opened a connection to c's address, 0 if
// none has after since. It starts one if need be, and never waits. Early is for
// a suspicion that may yet pass, as on a path with losses: it is no reason for
// more than one dial in a while.
func (t *Transport) opened(c *conn, since int64, early bool) int64 {
	dial, addr := t.dialerOf(c)
	if dial == nil {
		return since // that cannot be found out
	}
	s, at := &t.trials, now()
	s.mu.Lock()
	defer s.mu.Unlock()
	tr := s.last[addr]
	switch {
	case tr == nil:
		tr = s.addLocked(addr, at)
	case tr.opened != 0 && tr.opened > since:
		return tr.opened
	case tr.patient != 0 && at-tr.patient > int64(trialPatience):
		return at // nor can it from a dialer that does not end with its context
	case tr.running == 2, tr.running == 1 && at-tr.began < int64(trialTimeout), tr.ended != 0 && at-tr.ended < int64(trialEvery),
		early && (tr.running > 0 || at-tr.ended < int64(trialForget)):
		return 0
	}
	tr.running++
	tr.began = at
	patient := tr.patient == 0
	if patient {
		tr.patient = at
	}
	keep := t.own != nil && !c.foreign && t.own.MaxConnsPerHost == 0
	go s.run(tr, dial, addr, patient, keep)
	return 0
}

func (s *trials) addLocked(addr string, at int64) *trial {
	for a, tr := range s.last {
		if tr.running == 0 && at-tr.ended > int64(trialForget) {
			delete(s.last, a)
		}
	}
	if s.last == nil {
		s.last = make(map[string]*trial)
	}
	tr := new(trial)
	s.last[addr] = tr
	return tr
}

func (s *trials) run(tr *trial, dial dialFunc, addr string, patient, keep bool) {
	timeout := trialTimeout
	if patient {
		timeout = trialPatience
	}
	nc, err := try(dial, addr, timeout)
	s.mu.Lock()
	tr.running--
	tr.ended = now()
	if patient {
		tr.patient = 0
	}
	if pathGone(err) && !(patient && err == context.DeadlineExceeded) {
		s.mu.Unlock()
		closeAll(nc)
		return
	}
	opened := tr.ended
	tr.opened = opened
	if keep && nc != nil {
		tr.kept, nc = nc, tr.kept
		time.AfterFunc(trialKept, func() { closeAll(s.take(tr, opened)) })
	}
	s.mu.Unlock()
	closeAll(nc) // not under the lock: who knows what was dialed
}

// try dials. As by net/http, the context of a dial that has succeeded does not
// end: the connection may be bound to it. Unlike there, it has no values of a
// request; a dialer may miss them.
func try(dial dialFunc, addr string, timeout time.Duration) (nc net.Conn, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer time.AfterFunc(timeout, cancel).Stop()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
		if nc == nil {
			if ctx.Err() != nil {
				err = context.DeadlineExceeded
			}
			cancel()
		}
	}()
	return dial(ctx, "tcp", addr)
}

// pathGone reports whether err, of a dial, may come from a path that is gone.
// Others say that somebody has answered, or tell of the dialer only.
func pathGone(err error) bool {
	var timeout interface{ Timeout() bool }
	return contains[*net.DNSError](err) || errors.As(err, &timeout) && timeout.Timeout() ||
		errors.Is(err, syscall.ENETUNREACH) || errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETDOWN)
}

// take takes what tr opened then, nil if somebody else has.
func (s *trials) take(tr *trial, opened int64) net.Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	if tr.opened != opened {
		return nil
	}
	nc := tr.kept
	tr.kept = nil
	return nc
}

// closeKept closes all that was opened and that nobody has taken.
func (s *trials) closeKept() {
	s.mu.Lock()
	var kept []net.Conn
	for _, tr := range s.last {
		kept = append(kept, tr.kept)
		tr.kept = nil
	}
	s.mu.Unlock()
	closeAll(kept...)
}

func closeAll(conns ...net.Conn) {
	for _, nc := range conns {
		if nc != nil {
			nc.Close()
		}
	}
}

// dial dials for a transport of ours: what a trial has opened comes first.
func (s *trials) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	s.mu.Lock()
	var nc net.Conn
	if tr := s.last[addr]; tr != nil {
		nc, tr.kept = tr.kept, nil
	}
	s.mu.Unlock()
	if nc == nil {
		return s.under(ctx, network, addr)
	}
	if raw := rawSocket(nc); raw != nil && peerHungUp(raw) {
		nc.Close() // a server does not wait for its client for ever
		return s.under(ctx, network, addr)
	}
	return nc, nil
}

// dialerOf returns what dials connections such as c, and the address that it is
// given; nil if that is not known: a TLS dialer of somebody else's, or a base
// that is none of net/http's.
func (t *Transport) dialerOf(c *conn) (dialFunc, string) {
	if t.own != nil && !c.foreign {
		return t.trials.under, c.addr
	}
	rt := transportBelow(t.base)
	switch known := rt != nil && rt.DialTLSContext == nil && rt.DialTLS == nil; {
	case known && c.addr != "":
		return underlying(rt, new(Registry)), t.trials.wanted(c.addr)
	case !c.foreign:
		return underlying(new(http.Transport), c.reg), c.addr
	}
	return nil, ""
}

// note remembers that a base dials addr for what it wants to reach.
func (s *trials) note(addr, want string) {
	if want == "" || want == addr {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mapped == nil || len(s.mapped) >= maxMapped {
		s.mapped = make(map[string]string)
	}
	s.mapped[addr] = want
}

// maxMapped bounds what is remembered. Who is forgotten is noted again by the
// next request.
const maxMapped = 4096

// wanted returns what a base wants to reach by addr.
func (s *trials) wanted(addr string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return cmp.Or(s.mapped[addr], addr)
}

// transportBelow returns net/http's transport below rt, or nil.
func transportBelow(rt http.RoundTripper) *http.Transport {
	for range maxLayers {
		switch u := rt.(type) {
		case *http.Transport:
			return u
		case interface{ WrappedRoundTripper() http.RoundTripper }:
			rt = u.WrappedRoundTripper()
		default:
			return nil
		}
	}
	return nil
}
