package faultnet_test

import (
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

func TestBlackholeSocket(t *testing.T) {
	s := server(t, ok)
	c, d := warm(t, s.URL, s.ClientTLS())
	// Only a NetConn method on top, as a *tls.Conn has.
	conn := hidden{d.Last()}
	if err := faultnet.BlackholeSocket(conn); errors.Is(err, syscall.EPERM) {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	failGet(t, c, s.URL, 50*time.Millisecond, "context deadline exceeded")
	if err := faultnet.HealSocket(conn); err != nil {
		t.Fatal(err)
	}
	mustGet(t, c, s.URL, "HTTP/2.0 200 ok")
	if d.Dials() != 1 {
		t.Errorf("%d dials, want 1", d.Dials())
	}
}

func TestBlackholeSocketWithoutSocket(t *testing.T) {
	p, q := net.Pipe()
	defer p.Close()
	defer q.Close()
	if err := faultnet.BlackholeSocket(faultnet.NewConn(p)); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("got %v, want ErrUnsupported", err)
	}
}

type hidden struct{ net.Conn }

func (h hidden) NetConn() net.Conn { return h.Conn }
