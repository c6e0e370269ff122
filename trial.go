package deadconn

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

// Silence alone does not tell that another connection would do better: while
// the client's own link is down nothing can be dialed, and a request is best
// left where it is, since TCP goes on when the link is back. So a connection
// is given up in silence only once another could be opened to its address,
// and it has been asked again after that.

// trials are the dials that find out, one at a time for each address.
type trials struct {
	under dialFunc // what NewTransport dials by; nil: wrapped

	mu   sync.Mutex
	last map[string]*trial // guarded by mu; by address as dialed
}

type trial struct {
	running bool
	ended   int64
	opened  int64    // when it last opened a connection; 0: never
	kept    net.Conn // that one, while nobody has taken it
}

const (
	// trialTimeout ends a trial on a path that is gone: the next one may find
	// it back earlier than the retransmissions of a SYN, which back off.
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
	dial := t.dialerOf(c)
	if dial == nil {
		return since // that cannot be found out
	}
	s, at := &t.trials, now()
	s.mu.Lock()
	defer s.mu.Unlock()
	tr := s.last[c.addr]
	switch {
	case tr == nil:
		tr = s.addLocked(c.addr, at)
	case tr.opened != 0 && tr.opened > since:
		return tr.opened
	case tr.running, at-tr.ended < int64(trialEvery), early && at-tr.ended < int64(trialForget):
		return 0
	}
	tr.running = true
	keep := t.own != nil && !c.foreign && t.own.MaxConnsPerHost == 0
	go s.run(tr, dial, c.addr, keep)
	return 0
}

func (s *trials) addLocked(addr string, at int64) *trial {
	for a, tr := range s.last {
		if !tr.running && at-tr.ended > int64(trialForget) {
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

func (s *trials) run(tr *trial, dial dialFunc, addr string, keep bool) {
	ctx, cancel := context.WithTimeout(context.Background(), trialTimeout)
	defer cancel()
	nc, err := dial(ctx, "tcp", addr)
	s.mu.Lock()
	tr.running, tr.ended = false, now()
	if err != nil || nc == nil {
		s.mu.Unlock()
		return
	}
	opened := tr.ended
	tr.opened = opened
	if keep {
		tr.kept, nc = nc, tr.kept
		time.AfterFunc(trialKept, func() { s.drop(tr, opened) })
	}
	s.mu.Unlock()
	if nc != nil {
		nc.Close() // not under the lock: who knows what was dialed
	}
}

// drop closes what was opened then, unless somebody has taken it.
func (s *trials) drop(tr *trial, opened int64) {
	s.mu.Lock()
	nc := tr.kept
	if nc == nil || tr.opened != opened {
		s.mu.Unlock()
		return
	}
	tr.kept = nil
	s.mu.Unlock()
	nc.Close()
}

// dial dials for a transport of ours: what a trial has opened comes first.
func (s *trials) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	s.mu.Lock()
	tr := s.last[addr]
	if tr == nil || tr.kept == nil {
		s.mu.Unlock()
		return s.under(ctx, network, addr)
	}
	nc := tr.kept
	tr.kept = nil
	s.mu.Unlock()
	return nc, nil
}

// dialerOf returns what dials connections such as c, nil if that is not known:
// a TLS dialer of somebody else's, or a base that is none of net/http's.
func (t *Transport) dialerOf(c *conn) dialFunc {
	switch {
	case c.addr == "":
		return nil
	case !c.foreign && t.own != nil:
		return t.trials.under
	case !c.foreign:
		return underlying(new(http.Transport), c.reg)
	}
	rt := transportBelow(t.base)
	if rt == nil || rt.DialTLSContext != nil || rt.DialTLS != nil {
		return nil
	}
	return underlying(rt, new(Registry))
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
