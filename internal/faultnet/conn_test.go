package faultnet_test

import (
	"errors"
	"io"
	"net"
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

func TestFailWritesHTTP2(t *testing.T) {
	s := server(t, ok)
	for _, tc := range []struct {
		err  error
		want string
	}{
		{net.ErrClosed, ": use of closed network connection"},
		{syscall.EPIPE, ": broken pipe"},
		{syscall.ECONNRESET, ": connection reset by peer"},
		{syscall.ETIMEDOUT, ": connection timed out"},
		{os.ErrDeadlineExceeded, ": i/o timeout"},
	} {
		c, d := warm(t, s.URL, s.ClientTLS())
		d.Last().FailWrites(tc.err)
		prefix := "write tcp " + d.Last().LocalAddr().String() + "->" + s.Addr()
		err := failGet(t, c, s.URL, bound, prefix)
		if !strings.HasSuffix(err.Error(), tc.want) {
			t.Errorf("%v does not end in %q", err, tc.want)
		}
		if !errors.Is(err, tc.err) {
			t.Errorf("%v is not in the chain of %v", tc.err, err)
		}
		mustGet(t, c, s.URL, "HTTP/2.0 200 ok")
		if got := d.Dials(); got != 2 {
			t.Errorf("%d dials, want 2", got)
		}
	}
}

// A made-up error must not be told from the kernel's.
func TestErrorShapes(t *testing.T) {
	shape := func(err error) (types []string) {
		for ; err != nil; err = errors.Unwrap(err) {
			types = append(types, reflect.TypeOf(err).String())
		}
		return types
	}
	same := func(t *testing.T, got, want error) {
		t.Helper()
		if got == nil || want == nil || got.Error() != want.Error() || !reflect.DeepEqual(shape(got), shape(want)) {
			t.Errorf("got %v %q\nwant %v %q", got, shape(got), want, shape(want))
		}
	}
	one := make([]byte, 1)

	t.Run("closed", func(t *testing.T) {
		raw, _ := pair(t)
		c := faultnet.NewConn(raw)
		c.FailWrites(net.ErrClosed)
		_, made := c.Write(one)
		raw.Close()
		_, kernel := raw.Write(one)
		same(t, made, kernel)
	})
	t.Run("write deadline", func(t *testing.T) {
		raw, _ := pair(t)
		c := faultnet.NewConn(raw)
		c.HoldWrites()
		c.SetWriteDeadline(time.Unix(1, 0))
		_, made := c.Write(one)
		_, kernel := raw.Write(one)
		same(t, made, kernel)
	})
	t.Run("read deadline and close", func(t *testing.T) {
		raw, _ := pair(t)
		c := faultnet.NewConn(raw)
		c.Blackhole()
		c.SetReadDeadline(time.Unix(1, 0))
		_, made := c.Read(one)
		_, kernel := raw.Read(one)
		same(t, made, kernel)
		c.Close()
		c.SetReadDeadline(time.Time{})
		_, made = c.Read(one)
		_, kernel = raw.Read(one)
		same(t, made, kernel)
	})
	t.Run("reset", func(t *testing.T) {
		raw, peer := pair(t)
		c := faultnet.NewConn(raw)
		peer.SetLinger(0)
		peer.Close()
		_, kernel := raw.Read(one)
		_, kernel2 := raw.Write(one)
		c.Reset()
		_, made := c.Read(one)
		_, made2 := c.Write(one)
		same(t, made, kernel)
		same(t, made2, kernel2)
	})
}

func TestFailWritesLeavesReader(t *testing.T) {
	raw, peer := pair(t)
	c := faultnet.NewConn(raw)
	buf := make([]byte, 8)
	read := background(func() result { n, err := c.Read(buf); return result{n, err} })
	c.FailWrites(syscall.EPIPE)
	stillBlocked(t, "Read", read)
	io.WriteString(peer, "abc")
	if r := within(t, "data", read); r.n != 3 || r.err != nil {
		t.Fatalf("Read gave %v", r)
	}
	read = background(func() result { n, err := c.Read(buf); return result{n, err} })
	c.Close()
	if r := within(t, "wake up by Close", read); !errors.Is(r.err, net.ErrClosed) {
		t.Fatalf("Read gave %v", r)
	}
	if c.BytesRead() != 3 || c.BytesWritten() != 0 {
		t.Errorf("%d bytes read, %d written, want 3 and 0", c.BytesRead(), c.BytesWritten())
	}
}

func TestHoldWrites(t *testing.T) {
	write := func(c *faultnet.Conn) <-chan result {
		return background(func() result { n, err := c.Write([]byte("abc")); return result{n, err} })
	}
	t.Run("Close", func(t *testing.T) {
		raw, _ := pair(t)
		c := faultnet.NewConn(raw)
		c.HoldWrites()
		w := write(c)
		stillBlocked(t, "Write", w)
		c.Close()
		if r := within(t, "end of Write", w); r.n != 0 || !errors.Is(r.err, net.ErrClosed) {
			t.Errorf("Write gave %v", r)
		}
	})
	t.Run("deadline set meanwhile", func(t *testing.T) {
		raw, _ := pair(t)
		c := faultnet.NewConn(raw)
		c.HoldWrites()
		w := write(c)
		c.SetWriteDeadline(time.Now().Add(time.Hour))
		c.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
		if r := within(t, "end of Write", w); !errors.Is(r.err, os.ErrDeadlineExceeded) {
			t.Errorf("Write gave %v", r)
		}
		c.SetWriteDeadline(time.Time{})
		w = write(c)
		stillBlocked(t, "Write", w)
		c.Close()
		within(t, "end of Write", w)
	})
	t.Run("FailWrites", func(t *testing.T) {
		raw, _ := pair(t)
		c := faultnet.NewConn(raw)
		c.HoldWrites()
		w := write(c)
		c.FailWrites(syscall.EPIPE)
		if r := within(t, "end of Write", w); !errors.Is(r.err, syscall.EPIPE) {
			t.Errorf("Write gave %v", r)
		}
	})
	t.Run("Heal", func(t *testing.T) {
		raw, peer := pair(t)
		c := faultnet.NewConn(raw)
		c.HoldWrites()
		w := write(c)
		c.Heal()
		if r := within(t, "end of Write", w); r.n != 3 || r.err != nil {
			t.Errorf("Write gave %v", r)
		}
		buf := make([]byte, 3)
		if _, err := io.ReadFull(peer, buf); err != nil || string(buf) != "abc" {
			t.Errorf("peer got %q, %v", buf, err)
		}
	})
	t.Run("in progress", func(t *testing.T) {
		raw, peer := pair(t)
		c := faultnet.NewConn(raw)
		big := make([]byte, 16<<20) // more than both socket buffers take
		w := background(func() result { n, err := c.Write(big); return result{n, err} })
		stillBlocked(t, "Write", w)
		c.HoldWrites()
		if _, err := io.CopyN(io.Discard, peer, int64(len(big))); err != nil {
			t.Fatal(err)
		}
		stillBlocked(t, "Write", w)
		c.Close()
		if r := within(t, "end of Write", w); r.n != len(big) || !errors.Is(r.err, net.ErrClosed) {
			t.Errorf("Write gave %v", r)
		}
	})
	t.Run("HTTP", func(t *testing.T) {
		s := server(t, ok)
		c, d := warm(t, s.URL, s.ClientTLS())
		d.Last().HoldWrites()
		failGet(t, c, s.URL, 50*time.Millisecond, "context deadline exceeded")
	})
}

func TestBlackhole(t *testing.T) {
	raw, peer := pair(t)
	c := faultnet.NewConn(raw)
	buf := make([]byte, 8)
	read := background(func() result { n, err := c.Read(buf); return result{n, err} })
	stillBlocked(t, "Read", read) // now inside the kernel
	c.Blackhole()
	if n, err := io.WriteString(c, "abc"); n != 3 || err != nil {
		t.Fatalf("Write gave %d, %v", n, err)
	}
	io.WriteString(c, "def")
	io.WriteString(peer, "xyz")
	stillBlocked(t, "Read", read)
	peer.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if n, err := peer.Read(make([]byte, 1)); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("peer got %d bytes, %v", n, err)
	}
	peer.SetReadDeadline(time.Now().Add(bound))
	c.SetReadDeadline(time.Now())
	if r := within(t, "read deadline", read); !errors.Is(r.err, os.ErrDeadlineExceeded) {
		t.Fatalf("Read gave %v", r)
	}
	c.SetReadDeadline(time.Time{})

	c.Heal()
	io.WriteString(c, "ghi")
	got := make([]byte, 9)
	if _, err := io.ReadFull(peer, got); err != nil || string(got) != "abcdefghi" {
		t.Errorf("after Heal the peer got %q, %v", got, err)
	}
	if n, err := c.Read(buf); string(buf[:n]) != "xyz" || err != nil {
		t.Errorf("after Heal Read gave %q, %v", buf[:n], err)
	}
	if c.BytesWritten() != 9 || c.BytesRead() != 3 {
		t.Errorf("%d bytes written, %d read, want 9 and 3", c.BytesWritten(), c.BytesRead())
	}

	c.Blackhole()
	peer.Close()
	read = background(func() result { n, err := c.Read(buf); return result{n, err} })
	stillBlocked(t, "Read of the FIN", read)
	c.Close()
	if r := within(t, "wake up by Close", read); !errors.Is(r.err, net.ErrClosed) {
		t.Errorf("Read gave %v", r)
	}
	if _, err := c.Write(buf); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Write on a closed connection gave %v", err)
	}
}

func TestBlackholeHTTP(t *testing.T) {
	s := server(t, ok)
	c, d := warm(t, s.URL, s.ClientTLS())
	d.Last().Blackhole()
	for range 3 {
		failGet(t, c, s.URL, 30*time.Millisecond, "context deadline exceeded")
	}
	d.Last().Heal()
	mustGet(t, c, s.URL, "HTTP/2.0 200 ok")
	if d.Dials() != 1 || d.Open() != 1 {
		t.Errorf("%d dials, %d open, want the one connection", d.Dials(), d.Open())
	}
}

func TestCloseUnderneath(t *testing.T) {
	s := server(t, ok)
	c, d := warm(t, s.URL, s.ClientTLS())
	first := d.Last()
	first.CloseUnderneath()
	eventually(t, "the server sees the FIN", func() bool { return s.OpenConns() == 0 })
	if first.Closed() {
		t.Fatal("the transport has noticed")
	}
	failGet(t, c, s.URL, bound, "write tcp "+first.LocalAddr().String()+"->"+s.Addr()+": use of closed network connection")
	mustGet(t, c, s.URL, "HTTP/2.0 200 ok")
	within(t, "Close of the dead connection", first.ClosedChan())
	if d.Dials() != 2 || d.Open() != 1 {
		t.Errorf("%d dials, %d open, want 2 and 1", d.Dials(), d.Open())
	}
}

func TestReaderSleepsAfterCloseUnderneath(t *testing.T) {
	raw, peer := pair(t)
	c := faultnet.NewConn(raw)
	buf := make([]byte, 1)
	read := background(func() result { n, err := c.Read(buf); return result{n, err} })
	c.CloseUnderneath()
	if _, err := peer.Read(buf); err != io.EOF {
		t.Errorf("peer got %v, want EOF", err)
	}
	stillBlocked(t, "Read", read)
	c.SetReadDeadline(time.Now())
	if r := within(t, "read deadline", read); !errors.Is(r.err, os.ErrDeadlineExceeded) {
		t.Errorf("Read gave %v", r)
	}
	c.SetReadDeadline(time.Time{})
	read = background(func() result { n, err := c.Read(buf); return result{n, err} })
	stillBlocked(t, "second Read", read)
	c.Close()
	if r := within(t, "wake up by Close", read); !errors.Is(r.err, net.ErrClosed) {
		t.Errorf("Read gave %v", r)
	}
	if err := c.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("second Close gave %v", err)
	}
}

func TestResets(t *testing.T) {
	for _, tc := range []struct {
		name        string
		do          func(*faultnet.Conn)
		read, write error
	}{
		{"SetLinger0AndClose", (*faultnet.Conn).SetLinger0AndClose, net.ErrClosed, net.ErrClosed},
		{"Reset", (*faultnet.Conn).Reset, syscall.ECONNRESET, syscall.EPIPE},
	} {
		t.Run(tc.name, func(t *testing.T) {
			raw, peer := pair(t)
			c := faultnet.NewConn(raw)
			buf := make([]byte, 1)
			c.HoldWrites()
			read := background(func() error { _, err := c.Read(buf); return err })
			write := background(func() error { _, err := c.Write(buf); return err })
			stillBlocked(t, "Read", read)
			stillBlocked(t, "Write", write)
			tc.do(c)
			if err := within(t, "end of Read", read); !errors.Is(err, tc.read) {
				t.Errorf("Read gave %v, want %v", err, tc.read)
			}
			if err := within(t, "end of Write", write); !errors.Is(err, tc.write) {
				t.Errorf("Write gave %v, want %v", err, tc.write)
			}
			if _, err := peer.Read(buf); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("peer got %v, want ECONNRESET", err)
			}
			if c.Closed() {
				t.Error("Closed although the user has not closed it")
			}
			c.Heal()
			if _, err := c.Write(buf); !errors.Is(err, tc.write) {
				t.Errorf("Write after Heal gave %v, want %v", err, tc.write)
			}
		})
	}
}

func TestConnPassesThrough(t *testing.T) {
	raw, peer := pair(t)
	c := faultnet.NewConn(raw)
	if c.NetConn() != raw {
		t.Error("NetConn is not the connection below")
	}
	rc, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := rc.Control(func(uintptr) {}); err != nil {
		t.Error(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Error(err)
	}
	if _, err := peer.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("peer got %v, want EOF", err)
	}

	p, q := net.Pipe()
	defer p.Close()
	defer q.Close()
	c = faultnet.NewConn(p)
	if err := c.CloseWrite(); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("CloseWrite of a pipe gave %v", err)
	}
	if _, err := c.SyscallConn(); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("SyscallConn of a pipe gave %v", err)
	}
	c.SetLinger0AndClose()
}
