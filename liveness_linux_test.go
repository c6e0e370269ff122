package deadconn

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
	"github.com/deadconn/deadconn/internal/netlab"
)

// The tests in this file need real kernel paths: two network namespaces and a
// pair of links, made and removed by each test. They use the real clock, with
// wide bounds.

// path is a server at one end of a lab, and clients at the other.
type path struct {
	lab *netlab.Lab
	url string
	tls *tls.Config
}

func newPath(t *testing.T, o netlab.Options, h http.HandlerFunc) *path {
	t.Helper()
	lab := netlab.ForTest(t, o)
	l, err := lab.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(h)
	s.Listener.Close()
	s.Listener = l
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	cfg := s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	cfg.ServerName = "example.com"
	return &path{lab: lab, url: s.URL, tls: cfg}
}

func (p *path) client(t *testing.T, w way) (*http.Client, *faultnet.Dialer) {
	t.Helper()
	d := &faultnet.Dialer{Dial: p.lab.Dial}
	c := w.client(t, d, p.tls)
	// Twice: a connection may be dialed in vain beside the first.
	mustGet(t, c, p.url)
	mustGet(t, c, p.url)
	return c, d
}

// cut makes the path of the connection in use drop everything.
func (p *path) cut(t *testing.T, d *faultnet.Dialer) {
	t.Helper()
	if err := p.lab.Cut(live(d)); err != nil {
		t.Fatal(err)
	}
}

func getWithin(c *http.Client, url string, d time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	return drain(resp)
}

// A black hole with 20 requests on it is found out before their deadlines.
func TestBlackHoleInFlight(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		before bool // the requests are there before the path is cut
	}{{"sent into it", false}, {"sent before", true}} {
		t.Run(tt.name, func(t *testing.T) {
			run := func(t *testing.T, w way) (failed int64, slowest time.Duration) {
				var held atomic.Int64
				hold := make(chan struct{})
				p := newPath(t, netlab.Options{}, func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path == "/hold" && held.Add(1) <= 20 && tt.before {
						select {
						case <-hold:
						case <-r.Context().Done():
						}
					}
					ok(w, r)
				})
				t.Cleanup(func() { close(hold) })
				c, d := p.client(t, w)
				if !tt.before {
					p.cut(t, d)
				}
				var wg sync.WaitGroup
				var nfailed, slow atomic.Int64
				for range 20 {
					wg.Go(func() {
						start := time.Now()
						if err := getWithin(c, p.url+"/hold", 10*time.Second); err != nil {
							nfailed.Add(1)
						}
						for {
							was := slow.Load()
							if took := int64(time.Since(start)); took <= was || slow.CompareAndSwap(was, took) {
								return
							}
						}
					})
				}
				if tt.before {
					eventually(t, "20 requests there", func() bool { return held.Load() == 20 })
					time.Sleep(300 * time.Millisecond) // the kernel's delayed ACK
					p.cut(t, d)
				}
				wg.Wait()
				return nfailed.Load(), time.Duration(slow.Load())
			}
			t.Parallel()
			if !testing.Short() {
				if failed, _ := run(t, bare); failed != 20 {
					t.Errorf("net/http lost %d of 20: has the fault been cured?", failed)
				}
			}
			failed, slowest := run(t, owned)
			t.Logf("slowest %v", slowest)
			if failed != 0 || slowest > 4*time.Second {
				t.Errorf("%d failed, the slowest took %v; want 0 in 4 s", failed, slowest)
			}
		})
	}
}

// While the client's own link is down nothing can be dialed, and TCP goes on
// where it was when it is back. The same if the path is gone, and not the one
// connection's.
func TestPathGoneForAWhile(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		down func(*netlab.Lab) error
		up   func(*netlab.Lab) error
	}{
		{"link down", (*netlab.Lab).LinkDown, (*netlab.Lab).LinkUp},
		{"path gone", (*netlab.Lab).CutPath, (*netlab.Lab).HealPath},
	} {
		for _, w := range ours {
			t.Run(tt.name+"/"+w.name, func(t *testing.T) {
				t.Parallel()
				p := newPath(t, netlab.Options{}, ok)
				c, d := p.client(t, w)
				used := live(d)
				var wg sync.WaitGroup
				var failed atomic.Int64
				send := func(method string) {
					ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
					defer cancel()
					req, err := http.NewRequestWithContext(ctx, method, p.url, nil)
					if err != nil {
						t.Error(err)
						return
					}
					resp, err := c.Do(req)
					if err != nil {
						t.Logf("%s: %v", method, err)
						failed.Add(1)
						return
					}
					drain(resp)
				}
				if err := tt.down(p.lab); err != nil {
					t.Fatal(err)
				}
				for range 16 {
					wg.Go(func() { send("GET") })
					wg.Go(func() { send("POST") })
					time.Sleep(250 * time.Millisecond)
				}
				if err := tt.up(p.lab); err != nil {
					t.Fatal(err)
				}
				wg.Wait()
				if failed.Load() != 0 || used.Closed() {
					t.Errorf("%d of 32 failed, %d dials, the connection is closed: %v", failed.Load(), d.Dials(), used.Closed())
				}
			})
		}
	}
}

// outage sends GETs with short deadlines one after another until one
// succeeds, and tells how many failed and how long that took.
func outage(c *http.Client, url string, most int) (failed int, took time.Duration) {
	start := time.Now()
	for failed < most && getWithin(c, url, 300*time.Millisecond) != nil {
		failed++
	}
	return failed, time.Since(start)
}

func TestBlackHoleInTurn(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		way
		failed int
		took   time.Duration
	}{{owned, 3, 1500 * time.Millisecond}, {wrapped, 13, 4500 * time.Millisecond}} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := newPath(t, netlab.Options{}, ok)
			if tt.name == owned.name {
				c, d := p.client(t, bare)
				p.cut(t, d)
				if failed, _ := outage(c, p.url, 20); failed != 20 {
					t.Errorf("net/http recovered after %d: has the fault been cured?", failed)
				}
			}
			c, d := p.client(t, tt.way)
			p.cut(t, d)
			failed, took := outage(c, p.url, 100)
			t.Logf("%d failed in %v", failed, took)
			if failed > tt.failed || took > tt.took {
				t.Errorf("%d failed in %v, want at most %d in %v", failed, took, tt.failed, tt.took)
			}
		})
	}
}

// The same while an upload fills the send buffer and holds the write lock.
func TestStalledWrite(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		way
		failed int
		took   time.Duration
	}{{owned, 3, 1500 * time.Millisecond}, {wrapped, 13, 4500 * time.Millisecond}} {
		t.Run(tt.name, func(t *testing.T) {
			p := newPath(t, netlab.Options{}, func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				ok(w, r)
			})
			c, d := p.client(t, tt.way)
			ctx, cancel := context.WithCancel(t.Context())
			started := make(chan struct{})
			var once sync.Once
			body := readerFunc(func(b []byte) (int, error) {
				once.Do(func() { close(started) })
				return len(b), nil
			})
			done := make(chan struct{})
			go func() {
				defer close(done)
				req, _ := http.NewRequestWithContext(ctx, "POST", p.url, io.LimitReader(body, 64<<20))
				if resp, err := c.Do(req); err == nil {
					drain(resp)
				}
			}()
			<-started
			p.cut(t, d)
			failed, took := outage(c, p.url, 100)
			cancel()
			<-done
			t.Logf("%d failed in %v", failed, took)
			if failed > tt.failed || took > tt.took {
				t.Errorf("%d failed in %v, want at most %d in %v", failed, took, tt.failed, tt.took)
			}
		})
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

// While the peer holds its window shut the path is alive: the upload arrives,
// on the same connection.
func TestWindowShut(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes 12 s")
	}
	for _, w := range ours {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			const size = 32 << 20
			lab := netlab.ForTest(t, netlab.Options{})
			l, err := lab.Listen(0)
			if err != nil {
				t.Fatal(err)
			}
			// The server does not read its sockets for 12 s.
			gate := &gate{Listener: l}
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				n, err := io.Copy(io.Discard, r.Body)
				if r.Method == "POST" && (n != size || err != nil) {
					t.Errorf("%d bytes arrived, %v", n, err)
				}
			}))
			s.Listener.Close()
			s.Listener = gate
			s.EnableHTTP2 = true
			s.Config.HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerConnection: 64 << 20, MaxReceiveBufferPerStream: 64 << 20}
			s.StartTLS()
			t.Cleanup(s.Close)
			cfg := s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
			cfg.ServerName = "example.com"
			p := &path{lab: lab, url: s.URL, tls: cfg}
			c, d := p.client(t, w)
			dials := d.Dials()

			gate.shut.Store(true)
			time.AfterFunc(12*time.Second, func() { gate.shut.Store(false) })
			body := io.LimitReader(readerFunc(func(b []byte) (int, error) { return len(b), nil }), size)
			resp, err := c.Post(s.URL, "", body)
			if err != nil {
				t.Fatal(err)
			}
			drain(resp)
			mustGet(t, c, s.URL)
			if d.Dials() != dials {
				t.Errorf("%d dials, want the same connection all along", d.Dials()-dials)
			}
		})
	}
}

// gate is a listener whose connections are not read while it is shut.
type gate struct {
	net.Listener
	shut atomic.Bool
}

func (g *gate) Accept() (net.Conn, error) {
	c, err := g.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &gatedConn{Conn: c, gate: g}, nil
}

type gatedConn struct {
	net.Conn
	gate *gate
}

func (c *gatedConn) Read(b []byte) (int, error) {
	for c.gate.shut.Load() {
		time.Sleep(50 * time.Millisecond)
	}
	return c.Conn.Read(b)
}

// 20 requests run out of time on a slow server; then one takes 8 s.
func TestSlowServerThenLong(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes 11 s")
	}
	for _, w := range ours {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			p := newPath(t, netlab.Options{}, func(w http.ResponseWriter, r *http.Request) {
				switch r.URL.Path {
				case "/slow":
					<-r.Context().Done()
				case "/long":
					time.Sleep(8 * time.Second)
				}
			})
			c, d := p.client(t, w)
			dials := d.Dials()
			for range 20 {
				if getWithin(c, p.url+"/slow", 150*time.Millisecond) == nil {
					t.Fatal("no timeout")
				}
			}
			mustGet(t, c, p.url+"/long")
			if d.Dials() != dials {
				t.Errorf("%d dials, want the same connection all along", d.Dials()-dials)
			}
		})
	}
}

// drip answers with one byte each 100 ms, for d.
func drip(w http.ResponseWriter, d time.Duration) {
	for range int(d / (100 * time.Millisecond)) {
		io.WriteString(w, ".")
		w.(http.Flusher).Flush()
		time.Sleep(100 * time.Millisecond)
	}
}

// A lossy path is alive.
func TestLossyPath(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes 40 s")
	}
	for _, loss := range []float64{0.02, 0.10} {
		for _, w := range ours {
			t.Run(w.name+"/"+percent(loss), func(t *testing.T) {
				t.Parallel()
				const long = 40 * time.Second
				p := newPath(t, netlab.Options{Delay: 20 * time.Millisecond, Loss: loss, Seed: 1}, func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path == "/drip" {
						drip(w, long)
					}
				})
				c, d := p.client(t, w)
				conn := live(d)
				dials := d.Dials()
				resp, err := c.Get(p.url + "/drip")
				if err != nil {
					t.Fatal(err)
				}
				whole := make(chan int64, 1)
				go func() {
					n, err := io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
					if err != nil {
						t.Errorf("the long answer broke off: %v", err)
					}
					whole <- n
				}()
				failed, sent := 0, 0
				for end := time.Now().Add(long); time.Now().Before(end); sent++ {
					if err := getWithin(c, p.url, 10*time.Second); err != nil {
						failed++
						t.Log(err)
					}
				}
				if n := <-whole; n != int64(long/(100*time.Millisecond)) {
					t.Errorf("%d bytes of the long answer arrived", n)
				}
				extra := d.Dials() - dials
				t.Logf("%d requests, %d failed, %d extra dials", sent, failed, extra)
				if conn.Closed() || failed > 0 || extra > 5 {
					t.Errorf("closed %v, %d failed, %d extra dials; want none, none, at most 5", conn.Closed(), failed, extra)
				}
			})
		}
	}
}

func percent(f float64) string {
	return string(rune('0'+int(f*100)/10)) + string(rune('0'+int(f*100)%10)) + "%"
}

// A path of 700 ms RTT is alive, though no request of 300 ms can succeed.
func TestFarPath(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes 15 s")
	}
	for _, w := range ours {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			const long = 12 * time.Second
			p := newPath(t, netlab.Options{Delay: 350 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/drip" {
					drip(w, long)
				}
			})
			c, d := p.client(t, w)
			dials := d.Dials()
			resp, err := c.Get(p.url + "/drip")
			if err != nil {
				t.Fatal(err)
			}
			for range 30 {
				if getWithin(c, p.url, 300*time.Millisecond) == nil {
					t.Error("in time")
				}
			}
			n, err := io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if err != nil || n != int64(long/(100*time.Millisecond)) {
				t.Errorf("%d bytes of the long answer arrived, %v", n, err)
			}
			mustGet(t, c, p.url)
			if d.Dials() != dials {
				t.Errorf("%d dials, want the same connection all along", d.Dials()-dials)
			}
		})
	}
}

// helperServer is a server in a process of its own, which can be stopped.
const helperServer = "DEADCONN_TEST_SERVER"

func init() {
	if os.Getenv(helperServer) == "" {
		return
	}
	s := faultnet.NewServer(http.HandlerFunc(ok))
	fmt.Println(s.URL)
	io.Copy(io.Discard, os.Stdin) // until the test ends
	os.Exit(0)
}

// A process is frozen behind a living kernel, which acknowledges everything:
// the unanswered PING tells.
func TestFrozenProcess(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 25 s")
	}
	t.Parallel()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helperServer+"=1")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGCONT)
		stdin.Close()
		cmd.Wait()
	})
	var url string
	if _, err := fmt.Fscanln(stdout, &url); err != nil {
		t.Fatal(err)
	}
	d := new(faultnet.Dialer)
	c := owned.client(t, d, &tls.Config{InsecureSkipVerify: true})
	mustGet(t, c, url)
	mustGet(t, c, url)
	pooled := live(d)
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	answered := make(chan error, 1)
	go func() { answered <- getWithin(c, url, 50*time.Second) }()
	select {
	case <-pooled.ClosedChan():
	case <-time.After(50 * time.Second):
		t.Fatal("never evicted")
	}
	if took := time.Since(start); took > 25*time.Second {
		t.Errorf("evicted after %v, want at most 25 s", took)
	} else {
		t.Logf("evicted after %v", took)
	}
	// It thaws; the request has been sent again, or is about to.
	cmd.Process.Signal(syscall.SIGCONT)
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

// A suspicion that was wrong costs one dial and hurts nobody: the stream on
// the suspect goes on, new requests go elsewhere, and come back.
func TestWrongSuspicion(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	p := newPath(t, netlab.Options{}, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hold" {
			io.WriteString(w, "begin ")
			w.(http.Flusher).Flush()
			<-release
			io.WriteString(w, "end")
		}
	})
	c, d := p.client(t, owned)
	tr := c.Transport.(*Transport)
	suspected := live(d)
	resp, err := c.Get(p.url + "/hold")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	dials := d.Dials()
	p.cut(t, d)
	if failed, _ := outage(c, p.url, 20); failed > 3 {
		t.Errorf("%d failed", failed)
	}
	if d.Dials() != dials+1 || tr.spare.hosts.Load() == nil {
		t.Fatalf("%d dials; is there a suspicion: %v", d.Dials()-dials, tr.spare.hosts.Load() != nil)
	}
	detour := d.Last()
	if err := p.lab.Heal(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no suspicion", func() bool { return tr.spare.hosts.Load() == nil })
	mustGet(t, c, p.url)
	if d.Dials() != dials+1 || suspected.Closed() {
		t.Errorf("%d dials, the suspect is closed: %v", d.Dials()-dials, suspected.Closed())
	}
	close(release)
	if b, err := io.ReadAll(resp.Body); string(b) != "begin end" || err != nil {
		t.Errorf("the stream on the suspect: %q, %v", b, err)
	}
	// The detour's connection goes away, and another suspicion within
	// trustAfterError is not acted upon.
	eventually(t, "the detour is closed", func() bool { return detour.Closed() })
	p.cut(t, d)
	if failed, _ := outage(c, p.url, 20); failed < 4 {
		t.Errorf("only %d failed: suspected again at once", failed)
	}
}

// MaxConnsPerHost is kept: the suspect holds its place until it is dead.
func TestSuspectWithMaxConnsPerHost(t *testing.T) {
	t.Parallel()
	p := newPath(t, netlab.Options{}, ok)
	d := &faultnet.Dialer{Dial: p.lab.Dial}
	c := &http.Client{Transport: Options{Base: &http.Transport{
		DialContext: d.DialContext, TLSClientConfig: p.tls, ForceAttemptHTTP2: true, MaxConnsPerHost: 1,
	}}.NewTransport()}
	t.Cleanup(c.CloseIdleConnections)
	mustGet(t, c, p.url)
	p.cut(t, d)
	failed, took := outage(c, p.url, 100)
	t.Logf("%d failed in %v", failed, took)
	if failed == 100 || d.Open() > 1 {
		t.Errorf("%d failed, %d connections open", failed, d.Open())
	}
}

// Of two connections to the same host only the dead one is closed.
func TestOnlyTheDeadOne(t *testing.T) {
	t.Parallel()
	for _, w := range ours {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			hold := make(chan struct{})
			held := make(chan struct{}, 2)
			p := newPath(t, netlab.Options{}, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/hold" {
					w.(http.Flusher).Flush()
					held <- struct{}{}
					<-hold
				}
			})
			d := &faultnet.Dialer{Dial: p.lab.Dial}
			// Two clients of one kind stand for two connections: HTTP/2 makes
			// no second one by itself.
			reg := new(Registry)
			newClient := func() *http.Client {
				base := &http.Transport{DialContext: d.DialContext, TLSClientConfig: p.tls, ForceAttemptHTTP2: true}
				var rt http.RoundTripper = Options{Base: base, Registry: reg}.NewTransport()
				if w.name == wrapped.name {
					rt = Options{Registry: reg}.Wrap(base)
				}
				c := &http.Client{Transport: rt}
				t.Cleanup(c.CloseIdleConnections)
				return c
			}
			a, b := newClient(), newClient()
			mustGet(t, a, p.url)
			dying := d.Last()
			stream, err := b.Get(p.url + "/hold")
			if err != nil {
				t.Fatal(err)
			}
			defer stream.Body.Close()
			<-held
			living := d.Last()
			if err := p.lab.Cut(dying); err != nil {
				t.Fatal(err)
			}
			if failed, _ := outage(a, p.url, 100); failed == 100 {
				t.Error("no recovery")
			}
			eventually(t, "the dead one is closed", dying.Closed)
			mustGet(t, b, p.url)
			if living.Closed() {
				t.Error("the living one was closed")
			}
			close(hold)
			if err := drain(stream); err != nil {
				t.Error(err)
			}
		})
	}
}

// The socket filter of BPF makes a black hole on loopback, without namespaces.
func TestBlackHoleByFilter(t *testing.T) {
	s := newServer(t, ok)
	for _, tt := range []struct {
		way
		failed int
	}{{owned, 3}, {wrapped, 13}} {
		t.Run(tt.name, func(t *testing.T) {
			d := new(faultnet.Dialer)
			c := tt.client(t, d, s.ClientTLS())
			mustGet(t, c, s.URL)
			mustGet(t, c, s.URL)
			if err := faultnet.BlackholeSocket(live(d)); err != nil {
				t.Skipf("no rights for a socket filter: %v", err)
			}
			failed, took := outage(c, s.URL, 100)
			t.Logf("%d failed in %v", failed, took)
			if failed > tt.failed {
				t.Errorf("%d failed, want at most %d", failed, tt.failed)
			}
		})
	}
}

// 10,000 connections at rest cost nothing, and 10,000 that wait for an answer
// a pass of well under 30 ms.
func BenchmarkWatch(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	var r Registry
	tr := Options{Registry: &r}.NewTransport()
	// Two for each socket: 20,000 file descriptors are more than most may have.
	const n = 10_000
	list := make([]*conn, 0, n)
	for range n / 2 {
		nc, err := r.DialContext(b.Context(), "tcp", l.Addr().String())
		if err != nil {
			b.Skip(err) // too few file descriptors
		}
		defer nc.Close()
		there, err := l.Accept()
		if err != nil {
			b.Skip(err)
		}
		defer there.Close()
		c := nc.(*conn)
		twin := r.track(c.Conn, c.addr, tr)
		defer twin.Close()
		c.owner.Store(tr)
		list = append(list, c, twin)
	}
	b.Run("waiting", func(b *testing.B) {
		for b.Loop() {
			for _, c := range list {
				c.unanswered.Store(now() - int64(500*time.Millisecond))
				c.listed.Store(true)
			}
			if rest := r.look(slices.Clone(list)); len(rest) != n {
				b.Fatalf("%d still wait", len(rest))
			}
		}
	})
	b.Run("rest", func(b *testing.B) {
		for _, c := range list {
			c.unanswered.Store(0)
		}
		var before, after syscall.Rusage
		syscall.Getrusage(syscall.RUSAGE_SELF, &before)
		for b.Loop() {
			time.Sleep(100 * time.Millisecond)
		}
		syscall.Getrusage(syscall.RUSAGE_SELF, &after)
		cpu := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
		b.ReportMetric(float64(cpu)/float64(b.Elapsed()), "cpu")
		if r.watching.Load() {
			b.Error("the watch runs")
		}
	})
}
