package deadconn

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// trialNet is dialed in trials.
type trialNet struct {
	mu     sync.Mutex
	now    int // dials under way
	most   int // of them, at once
	dials  int
	hangs  bool
	panics bool
	err    error
	peer   net.Conn // of the last connection
	ctx    context.Context
}

func (n *trialNet) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	n.mu.Lock()
	n.dials++
	n.ctx = ctx
	n.now++
	n.most = max(n.most, n.now)
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		n.now--
		n.mu.Unlock()
	}()
	if n.hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if n.panics {
		panic("no such value in the context")
	}
	if n.err != nil {
		return nil, n.err
	}
	nc, peer := net.Pipe()
	n.peer = peer
	return nc, nil
}

// closed reports whether the last connection has been closed.
func (n *trialNet) closed() bool {
	n.peer.SetReadDeadline(time.Now().Add(time.Microsecond))
	_, err := n.peer.Read(make([]byte, 1))
	return err == io.EOF
}

func TestTrial(t *testing.T) {
	const addr = "example.test:443"
	run := func(name string, wrap func(*http.Transport) *Transport, foreign bool, f func(t *testing.T, n *trialNet, tr *Transport, opened func(early bool) bool)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := new(trialNet)
				tr := wrap(&http.Transport{DialContext: n.dial})
				c := &conn{addr: addr, reg: tr.reg, foreign: foreign}
				since := now()
				time.Sleep(time.Millisecond)
				f(t, n, tr, func(early bool) bool {
					tr.opened(c, since, early)
					synctest.Wait()
					return tr.opened(c, since, early) != 0
				})
				time.Sleep(2 * time.Hour)
				if n.peer != nil && !n.closed() {
					t.Error("the connection was left open")
				}
			})
		})
	}
	own := func(b *http.Transport) *Transport { return Options{Base: b}.NewTransport() }
	wrapped := func(b *http.Transport) *Transport { return Options{}.Wrap(layer{b}).(*Transport) }

	run("its connection is the next dial's", own, false, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
		if !opened(true) || !opened(false) || n.dials != 1 {
			t.Errorf("%d dials", n.dials)
		}
		for _, dials := range []int{1, 2} {
			nc, err := tr.trials.dial(t.Context(), "tcp", addr)
			if err != nil || n.dials != dials || n.ctx.Err() != nil {
				t.Errorf("%v, %d dials, want %d; its context: %v", err, n.dials, dials, n.ctx.Err())
			}
			nc.Close()
		}
	})
	run("or is closed", own, false, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
		if !opened(false) || n.closed() {
			t.Error("closed at once")
		}
		if time.Sleep(trialKept); !n.closed() {
			t.Error("still open")
		}
	})
	run("or makes way for the next", own, false, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
		opened(false)
		first := n.peer
		time.Sleep(trialEvery)
		tr.opened(&conn{addr: addr, reg: tr.reg}, now(), false)
		synctest.Wait()
		last := n.peer
		if n.peer = first; last == first || !n.closed() {
			t.Errorf("%d dials", n.dials)
		}
		if n.peer = last; n.closed() {
			t.Error("closed at once")
		}
	})
	run("at once, with MaxConnsPerHost", func(b *http.Transport) *Transport {
		b.MaxConnsPerHost = 1
		return own(b)
	}, false, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
		if !opened(false) || !n.closed() {
			t.Error("still open")
		}
	})
	run("at once, wrapped", wrapped, true, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
		if !opened(false) || n.dials != 1 || !n.closed() {
			t.Errorf("%d dials", n.dials)
		}
	})
	run("it fails", own, false, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
		n.err = syscall.ENETUNREACH
		for range 2 {
			if opened(false) || n.dials != 1 {
				t.Errorf("%d dials at once", n.dials)
			}
		}
		time.Sleep(trialEvery)
		if n.err = nil; opened(true) || n.dials != 1 {
			t.Errorf("%d dials for what may yet pass", n.dials)
		}
		if !opened(false) || n.dials != 2 {
			t.Errorf("%d dials", n.dials)
		}
	})
	run("it hangs", own, false, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
		n.hangs = true
		start := time.Now()
		for !opened(false) && time.Since(start) < time.Minute {
			time.Sleep(trialEvery)
		}
		if took := time.Since(start); took < trialPatience || took > trialPatience+time.Second || n.most != 2 {
			t.Errorf("it tells nothing after %v; %d dials, %d at once", took, n.dials, n.most)
		}
	})
	run("it hangs for a while", own, false, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
		n.hangs = true
		opened(false)
		time.Sleep(trialTimeout)
		if n.hangs = false; !opened(false) || n.dials != 2 {
			t.Errorf("%d dials", n.dials)
		}
	})
	run("it never returns", func(b *http.Transport) *Transport {
		back := make(chan struct{})
		time.AfterFunc(time.Hour, func() { close(back) })
		b.DialContext = func(context.Context, string, string) (net.Conn, error) {
			<-back
			return nil, nil
		}
		return own(b)
	}, false, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
		for range 100 {
			if opened(false) {
				return
			}
			time.Sleep(trialTimeout)
		}
		t.Error("it is waited for for ever")
	})
	for name, provoke := range map[string]func(*trialNet){
		"it fails for a reason of its own": func(n *trialNet) { n.err = syscall.EMFILE },
		"it panics":                        func(n *trialNet) { n.panics = true },
	} {
		run(name, own, false, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
			if provoke(n); !opened(false) {
				t.Error("that tells nothing of the path")
			}
		})
	}
	run("CloseIdleConnections", own, false, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
		opened(false)
		if tr.CloseIdleConnections(); !n.closed() {
			t.Error("still open")
		}
	})
	run("what dials is not known", func(b *http.Transport) *Transport {
		b.DialTLSContext = b.DialContext
		return wrapped(b)
	}, true, func(t *testing.T, n *trialNet, tr *Transport, opened func(bool) bool) {
		c := &conn{addr: addr, reg: tr.reg, foreign: true}
		if at := tr.opened(c, 42, false); at != 42 || n.dials != 0 {
			t.Errorf("opened at %d, %d dials: silence is all there is to go by", at, n.dials)
		}
	})
}

// layer is a wrapper as client-go has them.
type layer struct{ http.RoundTripper }

func (l layer) WrappedRoundTripper() http.RoundTripper { return l.RoundTripper }

// A path that comes back while a connection is under suspicion is the
// connection's path too: it is asked again before it is given up.
func TestConfirm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gone := syscall.ENETUNREACH
		n := &trialNet{err: gone}
		tr := Options{Base: &http.Transport{DialContext: n.dial, TLSClientConfig: new(tls.Config)}}.NewTransport()
		c := &conn{addr: "example.test:443", reg: tr.reg, doubts: new(doubts)}
		c.own(tr)
		k := kernelInfo{known: true, retransmits: 4, sinceACK: time.Minute}
		const tick, second = watchTick, time.Second
		for i, step := range []struct {
			wait time.Duration
			v    livenessVerdict
			do   func()
			want livenessVerdict
		}{
			{0, suspect, nil, silent},                               // the first look
			{tick, suspect, nil, silent},                            // nothing can be dialed
			{second, silent, nil, silent},                           // a retransmission may yet be answered
			{tick, cutOff, func() { n.err = nil }, silent},          // now one can be dialed, and is
			{tick, cutOff, nil, suspect},                            // c has not been asked since
			{tick, cutOff, func() { k.retransmits++ }, suspect},     // now it is
			{tick, cutOff, nil, suspect},                            // it may answer yet
			{second, cutOff, nil, dead},                             // and was silent
			{tick, alive, nil, alive},                               //
			{tick, suspect, nil, silent},                            // another silence, too soon for a trial at once
			{tick, suspect, nil, silent},                            // but here is one
			{tick, suspect, nil, suspect},                           // the path is there
			{2 * second, cutOff, func() { n.err = gone }, silent},   // and now, is it?
			{second, cutOff, func() { n.err = nil }, silent},        //
			{tick, cutOff, nil, suspect},                            // it was not
			{backWait, cutOff, nil, dead},                           // c is not asked again in time
			{tick, alive, nil, alive},                               //
			{trialForget, suspect, func() { n.err = gone }, silent}, // a path that is back
			{second, suspect, func() { n.err = nil }, silent},       // before c looks cut off
			{tick, suspect, nil, suspect},                           //
			{tick, cutOff, nil, suspect},                            // is the path's all the same
			{tick, alive, nil, alive},                               //
			{trialForget, suspect, nil, silent},                     // another silence, with a trial at once
			{tick, suspect, nil, suspect},                           //
			{2 * second, cutOff, nil, silent},                       // and another
			{tick, cutOff, nil, dead},                               // the path is there
		} {
			time.Sleep(step.wait)
			if step.do != nil {
				step.do()
			}
			if got := c.confirm(now(), step.v, k); got != step.want {
				t.Fatalf("step %d: %v, want %v", i, got, step.want)
			}
			synctest.Wait()
		}
		time.Sleep(trialKept)
	})
}
