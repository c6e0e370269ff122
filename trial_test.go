package deadconn

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// trialNet is dialed in trials.
type trialNet struct {
	dials int
	hangs bool
	err   error
	peer  net.Conn // of the last connection
}

func (n *trialNet) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	n.dials++
	if n.hangs {
		<-ctx.Done()
		return nil, ctx.Err()
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
				time.Sleep(time.Minute)
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
			if err != nil || n.dials != dials {
				t.Errorf("%v, %d dials, want %d", err, n.dials, dials)
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
		n.err = errors.New("network is unreachable")
		if opened(false) || opened(false) || n.dials != 1 {
			t.Errorf("%d dials at once", n.dials)
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
		for range 10 {
			if opened(false) || n.dials != 1 {
				t.Fatalf("%d dials", n.dials)
			}
			time.Sleep(trialTimeout / 10)
		}
		n.hangs = false
		if time.Sleep(trialEvery); !opened(false) || n.dials != 2 {
			t.Errorf("%d dials", n.dials)
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
		n := &trialNet{err: errors.New("network is unreachable")}
		tr := Options{Base: &http.Transport{DialContext: n.dial, TLSClientConfig: new(tls.Config)}}.NewTransport()
		c := &conn{addr: "example.test:443", reg: tr.reg, doubts: new(doubts)}
		c.own(tr)
		k := kernelInfo{known: true, retransmits: 4, sinceACK: time.Minute}
		for i, step := range []struct {
			v    livenessVerdict
			do   func()
			want livenessVerdict
		}{
			{suspect, nil, silent},                        // the first look
			{suspect, nil, silent},                        // nothing can be dialed
			{silent, nil, silent},                         // a retransmission may yet be answered
			{cutOff, func() { n.err = nil }, silent},      // now it can, and is
			{cutOff, nil, suspect},                        // it has not been asked since
			{cutOff, func() { k.retransmits++ }, suspect}, // now it is
			{cutOff, nil, dead},                           // and was silent
			{alive, nil, alive},
			{cutOff, nil, silent}, // another silence, too soon for another trial at once
			{cutOff, nil, silent}, // but here is one
			{cutOff, nil, dead},   // and the path is there
		} {
			if step.do != nil {
				step.do()
			}
			if got := c.confirm(now(), step.v, k); got != step.want {
				t.Fatalf("step %d: %v, want %v", i, got, step.want)
			}
			time.Sleep(trialEvery + time.Millisecond)
			synctest.Wait()
		}
		time.Sleep(trialKept)
	})
}
