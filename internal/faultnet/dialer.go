package faultnet

import (
	"context"
	"net"
	"sync"
	"time"
)

// A Dialer dials, hands out each connection as a [*Conn], and remembers it.
// The zero value is ready. The fields must not be changed once the Dialer is
// in use; SetDelay and SetErr may be called at any time.
type Dialer struct {
	// Dial makes the connection; nil means a zero net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)

	// Delay is waited before each dial.
	Delay time.Duration

	// Err, if not nil, is what each dial returns, after Delay.
	Err error

	mu    sync.Mutex
	conns []*Conn // one a dial, in the order of their beginning; nil while under way or failed
}

// DialContext has the signature of [net.Dialer.DialContext].
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	d.mu.Lock()
	n := len(d.conns)
	d.conns = append(d.conns, nil)
	delay := d.Delay
	d.mu.Unlock()

	if delay > 0 {
		t := time.NewTimer(delay)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}

	d.mu.Lock()
	dial, err := d.Dial, d.Err
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	raw, err := dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	c := NewConn(raw)
	d.mu.Lock()
	d.conns[n] = c
	d.mu.Unlock()
	return c, nil
}

// SetDelay sets Delay for the dials that begin from now on.
func (d *Dialer) SetDelay(delay time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.Delay = delay
}

// SetErr sets Err for the dials that are made from now on, and for those that
// still wait out their Delay.
func (d *Dialer) SetErr(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.Err = err
}

// Dials returns how often DialContext was called, failures and dials under way
// included.
func (d *Dialer) Dials() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.conns)
}

// Conns returns the connections dialed so far, closed ones too, in the order
// in which their dials began.
func (d *Dialer) Conns() []*Conn {
	d.mu.Lock()
	defer d.mu.Unlock()
	var conns []*Conn
	for _, c := range d.conns {
		if c != nil {
			conns = append(conns, c)
		}
	}
	return conns
}

// Last returns the connection of the newest successful dial, nil if there is
// none.
func (d *Dialer) Last() *Conn {
	conns := d.Conns()
	if len(conns) == 0 {
		return nil
	}
	return conns[len(conns)-1]
}

// Open returns how many of the connections have not been closed by their user.
func (d *Dialer) Open() int {
	n := 0
	for _, c := range d.Conns() {
		if !c.Closed() {
			n++
		}
	}
	return n
}

// CloseAll closes every connection that is still open.
func (d *Dialer) CloseAll() {
	for _, c := range d.Conns() {
		if !c.Closed() {
			c.Close()
		}
	}
}
