package faultnet_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

func TestDialer(t *testing.T) {
	refused := errors.New("refused")
	var d faultnet.Dialer
	d.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, s := net.Pipe()
		t.Cleanup(func() { s.Close() })
		return c, nil
	}
	if d.Last() != nil {
		t.Error("Last is not nil before the first dial")
	}
	a, err := d.DialContext(t.Context(), "tcp", "x")
	if err != nil {
		t.Fatal(err)
	}
	d.SetErr(refused)
	if _, err := d.DialContext(t.Context(), "tcp", "x"); err != refused {
		t.Errorf("got %v, want %v", err, refused)
	}
	d.SetErr(nil)
	d.SetDelay(time.Hour)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := d.DialContext(ctx, "tcp", "x"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the end of the context", err)
	}
	d.SetDelay(0)
	b, err := d.DialContext(t.Context(), "tcp", "x")
	if err != nil {
		t.Fatal(err)
	}
	if got := d.Conns(); len(got) != 2 || got[0] != a || got[1] != b || d.Last() != b {
		t.Errorf("Conns are %v", got)
	}
	a.Close()
	if d.Dials() != 4 || d.Open() != 1 {
		t.Errorf("%d dials, %d open, want 4 and 1", d.Dials(), d.Open())
	}
	d.CloseAll()
	d.CloseAll()
	if d.Open() != 0 {
		t.Error("open after CloseAll")
	}
}
