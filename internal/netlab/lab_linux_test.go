package netlab

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// web is an HTTP/2 server in the lab and a client that remembers its dials.
type web struct {
	url    string
	client *http.Client

	mu    sync.Mutex
	conns []net.Conn
}

func newWeb(t *testing.T, l *Lab) *web {
	t.Helper()
	ln, err := l.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.Proto)
	}))
	s.Listener.Close()
	s.Listener = ln
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(s.Close)

	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	w := &web{url: "https://example.com:" + strconv.Itoa(port(ln))}
	tr := &http.Transport{
		ForceAttemptHTTP2: true,
		TLSClientConfig:   &tls.Config{RootCAs: roots},
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := l.Dial(ctx, network, addr)
			if err == nil {
				w.mu.Lock()
				w.conns = append(w.conns, c)
				w.mu.Unlock()
			}
			return c, err
		},
	}
	w.client = &http.Client{Transport: tr}
	t.Cleanup(func() {
		// A connection that was cut must not keep the server waiting.
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, c := range w.conns {
			c.Close()
		}
		l.Heal()
		s.CloseClientConnections()
	})
	return w
}

func (w *web) get(timeout time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.url, nil)
	if err != nil {
		return "", err
	}
	resp, err := w.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

func (w *web) dialed() []net.Conn {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]net.Conn(nil), w.conns...)
}

func port(ln net.Listener) int { return ln.Addr().(*net.TCPAddr).Port }

// echo starts a server that sends back what it gets and returns its address.
func echo(t *testing.T, l *Lab) string {
	t.Helper()
	ln, err := l.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
			wg.Go(func() {
				defer c.Close()
				io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() { ln.Close() })
	return ln.Addr().String()
}

func dial(t *testing.T, l *Lab, addr string) *net.TCPConn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, err := l.Dial(ctx, "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

// say sends one byte and waits for it to come back.
func say(c net.Conn, timeout time.Duration) error {
	c.SetDeadline(time.Now().Add(timeout))
	defer c.SetDeadline(time.Time{})
	if _, err := c.Write([]byte{'x'}); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

func tcpInfo(t *testing.T, c net.Conn) *unix.TCPInfo {
	t.Helper()
	rc, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	if cerr := rc.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	return info
}

func TestCutLeavesNewDials(t *testing.T) {
	l := ForTest(t, Options{})
	w := newWeb(t, l)
	if got, err := w.get(5 * time.Second); err != nil || got != "HTTP/2.0" {
		t.Fatalf("before the cut: %q, %v", got, err)
	}
	c := w.dialed()[0]
	if _, ok := c.(*net.TCPConn); !ok {
		t.Fatalf("dialed a %T", c)
	}
	if err := l.Cut(c); err != nil {
		t.Fatal(err)
	}
	if got, err := w.get(300 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("on the cut connection: %q, %v", got, err)
	}
	cut := time.Now()
	if n := len(w.dialed()); n != 1 {
		t.Fatalf("%d dials, want the request on the cut connection", n)
	}
	// A dial beside the pool, which would stay with the dead connection.
	if err := say(dial(t, l, echo(t, l)), time.Second); err != nil {
		t.Fatalf("another connection: %v", err)
	}
	time.Sleep(1500*time.Millisecond - time.Since(cut))
	info := tcpInfo(t, c)
	if info.Retransmits == 0 || info.Unacked == 0 {
		t.Fatalf("retransmits %d, unacked %d after 1.5 s, want a black hole", info.Retransmits, info.Unacked)
	}
	c.Close()
	// net/http may hand it out once more before it takes it out of its pool.
	got, err := w.get(time.Second)
	for range 3 {
		if err == nil {
			break
		}
		got, err = w.get(time.Second)
	}
	if err != nil || len(w.dialed()) != 2 {
		t.Fatalf("after closing the cut connection: %q, %v, %d dials", got, err, len(w.dialed()))
	}
}

func TestHealCut(t *testing.T) {
	l := ForTest(t, Options{})
	c := dial(t, l, echo(t, l))
	if err := l.Cut(tls.Client(c, nil)); err != nil { // wrapped
		t.Fatal(err)
	}
	if err := say(c, 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("cut: %v", err)
	}
	if err := l.Heal(); err != nil {
		t.Fatal(err)
	}
	// The byte of the failed attempt comes back with the next retransmission.
	if err := say(c, 5*time.Second); err != nil {
		t.Fatalf("healed: %v", err)
	}
}

func TestCutOneWay(t *testing.T) {
	for _, toServer := range []bool{true, false} {
		t.Run("toServer="+strconv.FormatBool(toServer), func(t *testing.T) {
			l := ForTest(t, Options{})
			ln, err := l.Listen(0)
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			c := dial(t, l, ln.Addr().String())
			s, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if err := l.CutOneWay(s, toServer); err != nil { // the server's end names the same flow
				t.Fatal(err)
			}
			arrives := func(from, to net.Conn) bool {
				from.Write([]byte("x"))
				to.SetReadDeadline(time.Now().Add(150 * time.Millisecond))
				n, _ := to.Read(make([]byte, 1))
				return n == 1
			}
			if got := arrives(c, s); got == toServer {
				t.Errorf("client to server: arrives %v", got)
			}
			if got := arrives(s, c); got != toServer {
				t.Errorf("server to client: arrives %v", got)
			}
		})
	}
}

func TestCutPath(t *testing.T) {
	l := ForTest(t, Options{})
	addr := echo(t, l)
	c := dial(t, l, addr)
	if err := l.CutPath(); err != nil {
		t.Fatal(err)
	}
	if err := say(c, 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("cut: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := l.Dial(ctx, "tcp", addr)
	var ne net.Error
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &ne) || !ne.Timeout() {
		t.Errorf("dial over the cut path: %v", err)
	}
	if d := time.Since(start); d > time.Second {
		t.Errorf("dial took %v with a deadline of 100 ms", d)
	}
	if err := l.HealPath(); err != nil {
		t.Fatal(err)
	}
	if err := say(dial(t, l, addr), time.Second); err != nil {
		t.Errorf("healed: %v", err)
	}
}

func TestRejectRST(t *testing.T) {
	for _, side := range []string{"client", "server"} {
		t.Run(side+" sends", func(t *testing.T) {
			l := ForTest(t, Options{})
			ln, err := l.Listen(0)
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			c := dial(t, l, ln.Addr().String())
			s, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if err := l.RejectRST(c); err != nil {
				t.Fatal(err)
			}
			sender := map[string]net.Conn{"client": c, "server": s}[side]
			if err := say(sender, time.Second); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("got %v, want ECONNRESET", err)
			}
		})
	}
}

func TestLinkDown(t *testing.T) {
	for name, o := range map[string]Options{"veth": {}, "wire": {Delay: time.Millisecond}} {
		t.Run(name, func(t *testing.T) {
			l := ForTest(t, o)
			addr := echo(t, l)
			c := dial(t, l, addr)
			if err := l.LinkDown(); err != nil {
				t.Fatal(err)
			}
			if err := say(c, 100*time.Millisecond); err == nil {
				t.Error("the link is down and bytes come back")
			}
			if _, err := l.Dial(context.Background(), "tcp", addr); !errors.Is(err, syscall.ENETUNREACH) {
				t.Errorf("dial: %v", err)
			}
			if err := l.LinkUp(); err != nil {
				t.Fatal(err)
			}
			if err := say(dial(t, l, addr), 2*time.Second); err != nil {
				t.Errorf("link up, new connection: %v", err)
			}
			if err := say(c, 5*time.Second); err != nil {
				t.Errorf("link up, old connection: %v", err)
			}
		})
	}
}

func TestDialErrors(t *testing.T) {
	l := ForTest(t, Options{})
	ctx := context.Background()
	if _, err := l.Dial(ctx, "tcp", "example.com:1"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("no listener: %v", err)
	}
	if _, err := l.Dial(ctx, "udp", "example.com:1"); err == nil {
		t.Error("dialed udp")
	}
	if _, err := l.Dial(ctx, "tcp", "example.com"); err == nil {
		t.Error("dialed without a port")
	}
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := l.Dial(canceled, "tcp", "example.com:1"); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	if _, err := l.Listen(1 << 16); err == nil {
		t.Error("listens on port 65536")
	}
	if err := l.Cut(nil); err == nil {
		t.Error("cut nothing")
	}
}

func TestWireDelay(t *testing.T) {
	const delay = 40 * time.Millisecond
	l := ForTest(t, Options{Delay: delay})
	c := dial(t, l, echo(t, l))
	start := time.Now()
	if err := say(c, 2*time.Second); err != nil {
		t.Fatal(err)
	}
	if rtt := time.Since(start); rtt < 2*delay {
		t.Errorf("answer after %v, want %v at least", rtt, 2*delay)
	}
	if rtt := time.Duration(tcpInfo(t, c).Rtt) * time.Microsecond; rtt < 2*delay {
		t.Errorf("kernel measures %v, want %v at least", rtt, 2*delay)
	}
}

func TestWireLoss(t *testing.T) {
	l := ForTest(t, Options{Delay: time.Millisecond, Loss: 0.1, Seed: 1})
	ln, err := l.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	data := make([]byte, 1<<20)
	rnd := rand.NewChaCha8([32]byte{})
	rnd.Read(data)
	var sent atomic.Int64
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		n, _ := c.Write(data)
		sent.Store(int64(n))
	}()
	c := dial(t, l, ln.Addr().String())
	c.SetDeadline(time.Now().Add(15 * time.Second))
	got, err := io.ReadAll(c)
	if err != nil {
		t.Fatalf("after %d bytes (sent %d): %v", len(got), sent.Load(), err)
	}
	if sha256.Sum256(got) != sha256.Sum256(data) {
		t.Fatalf("%d bytes arrived, not what was sent", len(got))
	}
	delivered, dropped := l.Stats()
	if share := float64(dropped) / float64(delivered+dropped); share < 0.05 || share > 0.15 {
		t.Errorf("lost %.0f %% of %d packets, want 10 %%", 100*share, delivered+dropped)
	}
}

func TestStartServer(t *testing.T) {
	l := ForTest(t, Options{})
	path, err := lookTool("ip")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "-br", "address", "show", device)
	var out strings.Builder
	cmd.Stdout = &out
	if err := l.StartServer(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), serverIP+"/24") {
		t.Errorf("the command sees %q", out.String())
	}
}

// TestCloseLeavesNothing looks for what a lab might leave: named namespaces
// and links where the process lives, files and threads in the namespaces.
func TestCloseLeavesNothing(t *testing.T) {
	for name, o := range map[string]Options{"veth": {}, "wire": {Delay: time.Millisecond}} {
		t.Run(name, func(t *testing.T) {
			list := func() string { return output(t, "ip", "netns", "list") + output(t, "ip", "-br", "link") }
			ForTest(t, o).Close() // where there is no lab there may be no ip either: skip first
			before := list()
			l := ForTest(t, o)
			c, err := l.Dial(context.Background(), "tcp", echo(t, l))
			if err != nil {
				t.Fatal(err)
			}
			var inodes []string
			for _, n := range []*namespace{l.client, l.server} {
				var st unix.Stat_t
				if err := unix.Fstat(int(n.f.Fd()), &st); err != nil {
					t.Fatal(err)
				}
				inodes = append(inodes, "net:["+strconv.FormatUint(st.Ino, 10)+"]")
			}
			if h := holders(t, inodes); len(h) < 2 {
				t.Fatalf("in the open namespaces: %v, the check is blind", h)
			}
			for range 2 { // twice is once
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if err := say(c, 50*time.Millisecond); err == nil {
				t.Error("the connection works without its link")
			}
			c.Close()
			if _, err := l.Dial(context.Background(), "tcp", ":1"); !errors.Is(err, net.ErrClosed) {
				t.Errorf("dial in a closed lab: %v", err)
			}
			if err := l.CutPath(); !errors.Is(err, net.ErrClosed) {
				t.Errorf("cut in a closed lab: %v", err)
			}
			if after := list(); after != before {
				t.Errorf("namespaces and links\nbefore:\n%safter:\n%s", before, after)
			}
			if h := holders(t, inodes); len(h) > 0 {
				t.Errorf("still in the namespaces: %v", h)
			}
		})
	}
}

func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	path, err := lookTool(name)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(path, args...).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// holders lists the process's threads in, and files of, the namespaces.
func holders(t *testing.T, inodes []string) (in []string) {
	t.Helper()
	for _, pattern := range []string{"/proc/self/task/*/ns/net", "/proc/self/fd/*"} {
		links, err := filepath.Glob(pattern)
		if err != nil || len(links) == 0 {
			t.Fatal(pattern, links, err)
		}
		for _, link := range links {
			if to, _ := os.Readlink(link); slices.Contains(inodes, to) {
				in = append(in, link)
			}
		}
	}
	return in
}
