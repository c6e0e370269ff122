package deadconn

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// dialBurst sends n GETs at once and returns the errors, one for each that
// failed. No caller may ever see how a merged dial ends.
func dialBurst(t *testing.T, c *http.Client, url string, n int) []error {
	t.Helper()
	return dialEach(t, n, func() error { return get(c, url) })
}

func dialEach(t *testing.T, n int, f func() error) (errs []error) {
	t.Helper()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			if err := f(); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		dialCheckText(t, err)
	}
	return errs
}

func dialCheckText(t *testing.T, err error) {
	t.Helper()
	if err != nil && (errors.Is(err, errSuperseded) || strings.Contains(err.Error(), "nothing was sent")) {
		t.Errorf("a caller got what is between RoundTrip and its dialer: %v", err)
	}
}

// A cold start and a death of everything under 1000 concurrent requests.
// net/http dials 999 times. A server of net/http takes 250 streams a
// connection, so 4 connections are the least.
func TestMergedDialsUnderLoad(t *testing.T) {
	const n, most, mostAgain, tries = 1000, 8, 12, 3
	var cold, again int
	// How many it takes hangs on when the server's SETTINGS come in, and so on
	// how busy the machine is. The best of three tries counts.
	for try := 1; try <= tries; try++ {
		s := newServer(t, func(w http.ResponseWriter, r *http.Request) { time.Sleep(300 * time.Millisecond) })
		d := new(faultnet.Dialer)
		c := owned.client(t, d, s.ClientTLS())
		start := time.Now()
		if errs := dialBurst(t, c, s.URL, n); len(errs) != 0 {
			t.Errorf("cold: %d failed, such as: %v", len(errs), errs[0])
		}
		cold = d.Dials()
		t.Logf("cold: %d dials, %v", cold, time.Since(start))
		for _, conn := range d.Conns() {
			conn.FailWrites(syscall.EPIPE)
		}
		start = time.Now()
		if errs := dialBurst(t, c, s.URL, n); len(errs) != 0 {
			t.Errorf("after the death: %d failed, such as: %v", len(errs), errs[0])
		}
		again = d.Dials() - cold
		t.Logf("after the death: %d dials, %v", again, time.Since(start))
		if cold <= most && again <= mostAgain {
			return
		}
	}
	t.Errorf("%d dials cold and %d after the death, want at most %d and %d", cold, again, most, mostAgain)
}

// An address that is known to speak HTTP/1 is dialed in parallel, for each
// request, as net/http does.
func TestMergeNotForHTTP1(t *testing.T) {
	const n = 50
	s := newServer(t, ok, faultnet.HTTP1Only())
	var armed atomic.Bool
	var dials atomic.Int64
	all := make(chan struct{})
	base := &http.Transport{
		TLSClientConfig:   s.ClientTLS(),
		ForceAttemptHTTP2: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			if armed.Load() {
				if dials.Add(1) == n {
					close(all)
				}
				select {
				case <-all:
				case <-time.After(20 * time.Second):
					return nil, errors.New("not all dials were under way at once")
				}
			}
			return new(net.Dialer).DialContext(ctx, network, addr)
		},
	}
	tr := Options{Base: base}.NewTransport()
	defer tr.CloseIdleConnections()
	c := &http.Client{Transport: tr}
	mustGet(t, c, s.URL) // now it is known
	tr.CloseIdleConnections()
	armed.Store(true)
	if errs := dialBurst(t, c, s.URL, n); len(errs) != 0 {
		t.Errorf("%d failed, such as: %v", len(errs), errs[0])
	}
	if dials.Load() != n {
		t.Errorf("%d dials, want %d", dials.Load(), n)
	}
}

// What is known may be wrong: a server that spoke HTTP/1 may speak HTTP/2
// later, and the other way round. Both are learned from the next dial.
func TestMergeLearns(t *testing.T) {
	d := new(dialer)
	const addr = "host:443"
	d.learn(addr, isHTTP1)
	if own, other, _ := d.join(addr); own != nil || other != nil {
		t.Error("a dial to an HTTP/1 address is merged")
	}
	d.learn(addr, isHTTP2)
	own, other, _ := d.join(addr)
	if own == nil || other != nil {
		t.Fatal("a dial to an HTTP/2 address cannot be joined")
	}
	if own2, other, _ := d.join(addr); own2 != nil || other != own {
		t.Error("the second does not wait for the first")
	}
	if own, other, _ := d.join("other:443"); own == nil || other != nil {
		t.Error("a dial to another address waits for this one")
	}
	d.end(addr, own, isHTTP2, nil)
	if _, other, _ := d.join(addr); other != nil {
		t.Error("a dial that has ended is waited for")
	}
}

func TestMergeMemoryIsBounded(t *testing.T) {
	d := new(dialer)
	for i := range 3*maxHTTP1 + 7 {
		d.learn(fmt.Sprintf("10.0.0.1:%d", i), isHTTP1)
		if len(d.http1) > maxHTTP1 {
			t.Fatalf("%d addresses remembered", len(d.http1))
		}
	}
	if len(d.calls) != 0 {
		t.Errorf("%d calls remembered", len(d.calls))
	}
}

// dialMemServer is a net/http server in memory, for tests in a bubble of
// testing/synctest.
type dialMemServer struct {
	conns chan net.Conn
	done  chan struct{}
	srv   *http.Server
	dials atomic.Int64
}

func newDialMemServer(h http.HandlerFunc, http2 bool) *dialMemServer {
	s := &dialMemServer{conns: make(chan net.Conn), done: make(chan struct{})}
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetHTTP2(http2)
	s.srv = &http.Server{
		Handler:   h,
		Protocols: p,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{faultnet.ClientCert()}},
		ErrorLog:  log.New(io.Discard, "", 0),
	}
	go s.srv.ServeTLS(s, "", "")
	return s
}

func (s *dialMemServer) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.done:
		return nil, net.ErrClosed
	}
}

func (s *dialMemServer) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 443} }

// Close is called by the http.Server.
func (s *dialMemServer) Close() error {
	select {
	case <-s.done:
	default:
		close(s.done)
	}
	return nil
}

func (s *dialMemServer) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	s.dials.Add(1)
	here, there := net.Pipe()
	select {
	case s.conns <- there:
		return here, nil
	case <-s.done:
		return nil, syscall.ECONNREFUSED
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

const dialMemURL = "https://127.0.0.1/"

func dialMemTLS() *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(faultnet.ClientCert().Leaf)
	return &tls.Config{RootCAs: pool}
}

// dialBubble runs f in a bubble, with a Transport that dials by dial.
func dialBubble(t *testing.T, dial dialFunc, f func(t *testing.T, tr *Transport)) {
	faultnet.ClientCert() // made once, outside
	synctest.Test(t, func(t *testing.T) {
		tr := Options{
			Base:   &http.Transport{DialContext: dial, TLSClientConfig: dialMemTLS(), ForceAttemptHTTP2: true},
			Health: Health{Disable: true},
		}.NewTransport()
		f(t, tr)
		synctest.Wait()
		if err := tr.CloseConnections(); err != nil {
			t.Error(err)
		}
	})
}

// All that wait share the one failure, when it comes and not later.
func TestMergedDialFails(t *testing.T) {
	const n = 200
	refused := &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	var dials atomic.Int64
	dial := func(context.Context, string, string) (net.Conn, error) {
		dials.Add(1)
		time.Sleep(20 * time.Millisecond)
		return nil, refused
	}
	dialBubble(t, dial, func(t *testing.T, tr *Transport) {
		start := time.Now()
		errs := dialBurst(t, &http.Client{Transport: tr}, dialMemURL, n)
		if d := time.Since(start); d != 20*time.Millisecond {
			t.Errorf("it took %v", d)
		}
		if len(errs) != n || dials.Load() != 1 {
			t.Errorf("%d failures by %d dials, want %d by 1", len(errs), dials.Load(), n)
		}
		for _, err := range errs {
			if !errors.Is(err, refused) {
				t.Fatalf("err = %v", err)
			}
		}
		// The next one does not inherit the failure.
		if err := get(&http.Client{Transport: tr}, dialMemURL); !errors.Is(err, refused) || dials.Load() != 2 {
			t.Errorf("err = %v after %d dials", err, dials.Load())
		}
	})
}

// So does a failed handshake: certificates do not change from one to the next.
func TestMergedHandshakeFails(t *testing.T) {
	const n = 100
	s := newServer(t, ok)
	d := &faultnet.Dialer{Delay: 200 * time.Millisecond}
	c := owned.client(t, d, &tls.Config{})
	errs := dialBurst(t, c, s.URL, n)
	if len(errs) != n || d.Dials() > 5 {
		t.Errorf("%d failures by %d dials, want %d by a handful", len(errs), d.Dials(), n)
	}
	for _, err := range errs {
		if u := (x509.UnknownAuthorityError{}); !errors.As(err, &u) {
			t.Fatalf("err = %v", err)
		}
	}
	eventually(t, "all closed", func() bool { return d.Open() == 0 })
}

// One whose context ends while it waits for another's dial leaves at once.
func TestMergedDialCallerLeaves(t *testing.T) {
	const slow = 200 * time.Millisecond // not stalled yet
	var s *dialMemServer
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		time.Sleep(slow)
		return s.dial(ctx, network, addr)
	}
	dialBubble(t, dial, func(t *testing.T, tr *Transport) {
		s = newDialMemServer(ok, true)
		defer s.srv.Close()
		c := &http.Client{Transport: tr}
		start := time.Now()
		first := make(chan error, 1)
		go func() { first <- get(c, dialMemURL) }()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		resp, err := c.Do(request(t, "GET", dialMemURL, nil).WithContext(ctx))
		if err == nil {
			drain(resp)
		}
		if d := time.Since(start); d != 10*time.Millisecond || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after %v: %v", d, err)
		}
		if err := <-first; err != nil {
			t.Error(err)
		}
		if d := time.Since(start); d < slow || d > slow+time.Second || s.dials.Load() != 1 {
			t.Errorf("the first: after %v, by %d dials", d, s.dials.Load())
		}
	})
}

// A dial that has stalled does not keep others waiting for long: net/http does
// not end it with its request, and one to a server that says nothing would
// last for ever.
func TestMergedDialStalls(t *testing.T) {
	var s *dialMemServer
	var dials atomic.Int64
	var hole chan struct{} // of the bubble
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		if dials.Add(1) == 1 {
			<-hole
			return nil, errors.New("a black hole")
		}
		return s.dial(ctx, network, addr)
	}
	dialBubble(t, dial, func(t *testing.T, tr *Transport) {
		s = newDialMemServer(ok, true)
		defer s.srv.Close()
		hole = make(chan struct{})
		c := &http.Client{Transport: tr}
		first := make(chan error, 1)
		go func() { first <- get(c, dialMemURL) }()
		synctest.Wait()
		start := time.Now()
		if errs := dialBurst(t, c, dialMemURL, 20); len(errs) != 0 {
			t.Errorf("%d failed, such as: %v", len(errs), errs[0])
		}
		if took := time.Since(start); took < stalledDial || took > 2*stalledDial || dials.Load() != 2 {
			t.Errorf("after %v, by %d dials", took, dials.Load())
		}
		close(hole)
		if err := <-first; err != nil {
			t.Errorf("the one that dialed gets the connection of the others: %v", err)
		}
	})
}

// CloseIdleConnections ends dials that nobody waits for any more. Those that
// have merged with such a one go on with another.
func TestMergedDialTakenOver(t *testing.T) {
	var s *dialMemServer
	var dials atomic.Int64
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		if dials.Add(1) == 1 {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return s.dial(ctx, network, addr)
	}
	dialBubble(t, dial, func(t *testing.T, tr *Transport) {
		s = newDialMemServer(ok, true)
		defer s.srv.Close()
		c := &http.Client{Transport: tr}
		ctx, cancel := context.WithCancel(t.Context())
		first := make(chan error, 1)
		go func() {
			resp, err := c.Do(request(t, "GET", dialMemURL, nil).WithContext(ctx))
			if err == nil {
				drain(resp)
			}
			first <- err
		}()
		synctest.Wait()
		const n = 50
		others := make(chan []error, 1)
		go func() { others <- dialBurst(t, c, dialMemURL, n) }()
		synctest.Wait()
		cancel()
		if err := <-first; !errors.Is(err, context.Canceled) {
			t.Errorf("the first: %v", err)
		}
		synctest.Wait()
		if dials.Load() != 1 {
			t.Errorf("%d dials, want the first still to be waited for", dials.Load())
		}
		start := time.Now()
		tr.CloseIdleConnections()
		if errs := <-others; len(errs) != 0 {
			t.Errorf("%d failed, such as: %v", len(errs), errs[0])
		}
		if d := time.Since(start); d > supersededWait || dials.Load() != 2 {
			t.Errorf("after %v, by %d dials", d, dials.Load())
		}
	})
}

// The same when the dial is done, and the handshake hangs.
func TestMergedHandshakeTakenOver(t *testing.T) {
	s := newServer(t, ok)
	silent := dialSilentListener(t)
	var dials atomic.Int64
	base := &http.Transport{
		TLSClientConfig:   s.ClientTLS(),
		ForceAttemptHTTP2: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			if dials.Add(1) == 1 {
				addr = silent.Addr().String()
			}
			return new(net.Dialer).DialContext(ctx, network, addr)
		},
	}
	reg := new(Registry)
	tr := Options{Base: base, Registry: reg}.NewTransport()
	defer tr.CloseIdleConnections()
	c := &http.Client{Transport: tr}
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() {
		resp, err := c.Do(request(t, "GET", s.URL, nil).WithContext(ctx))
		if err == nil {
			drain(resp)
		}
		first <- err
	}()
	eventually(t, "the first has dialed", func() bool { return reg.Len() == 1 })
	second := make(chan error, 1)
	go func() { second <- get(c, s.URL) }()
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the first: %v", err)
	}
	// net/http may not have seen yet that the first is gone.
	for done := false; !done; {
		tr.CloseIdleConnections()
		select {
		case err := <-second:
			if err != nil {
				t.Errorf("the second: %v", err)
			}
			done = true
		case <-time.After(10 * time.Millisecond):
		}
	}
	if dials.Load() != 2 {
		t.Errorf("%d dials, want 2", dials.Load())
	}
	eventually(t, "the first connection is closed", func() bool { return reg.Len() <= 1 })
}

// dialSilentListener accepts and says nothing.
func dialSilentListener(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
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
			wg.Go(func() {
				defer c.Close()
				io.Copy(io.Discard, c)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
	return ln
}

// Settings that limit or forbid the reuse of connections work as in net/http.
func TestMergeAndLimits(t *testing.T) {
	for _, proto := range []struct {
		name string
		opts []faultnet.ServerOption
	}{
		{"HTTP/2", nil},
		{"HTTP/1", []faultnet.ServerOption{faultnet.HTTP1Only()}},
	} {
		for _, tt := range []struct {
			name  string
			set   func(*http.Transport)
			close bool
			check func(t *testing.T, bare, ours, most int)
		}{
			{"MaxConnsPerHost 1", func(t *http.Transport) { t.MaxConnsPerHost = 1 }, false,
				func(t *testing.T, bare, ours, most int) {
					if most > 1 {
						t.Errorf("%d connections at once, want 1", most)
					}
				}},
			{"MaxConnsPerHost 3", func(t *http.Transport) { t.MaxConnsPerHost = 3 }, false,
				func(t *testing.T, bare, ours, most int) {
					if most > 3 {
						t.Errorf("%d connections at once, want at most 3", most)
					}
				}},
			{"MaxIdleConnsPerHost -1", func(t *http.Transport) { t.MaxIdleConnsPerHost = -1 }, false,
				func(t *testing.T, bare, ours, most int) {
					if proto.name == "HTTP/1" && ours != bare {
						t.Errorf("%d dials, net/http %d", ours, bare)
					}
					if most < 10 {
						t.Errorf("%d connections at once: one waits for another", most)
					}
				}},
			{"DisableKeepAlives", func(t *http.Transport) { t.DisableKeepAlives = true }, false,
				func(t *testing.T, bare, ours, most int) {
					// Over HTTP/2 some dials lose a race in net/http itself.
					if ours < 20 || proto.name == "HTTP/1" && ours != bare || ours > 2*bare {
						t.Errorf("%d dials, net/http %d", ours, bare)
					}
					if most < 10 {
						t.Errorf("%d connections at once: one waits for another", most)
					}
				}},
			{"Request.Close", func(t *http.Transport) {}, true,
				func(t *testing.T, bare, ours, most int) {
					// They are not merged: each has its connection for itself,
					// and those of a burst dial at once. Over HTTP/2 net/http
					// dials many in vain, so that the number is no figure.
					if proto.name == "HTTP/1" && ours != bare || most < 5 {
						t.Errorf("%d dials, at most %d at once; net/http %d", ours, most, bare)
					}
				}},
		} {
			t.Run(proto.name+"/"+tt.name, func(t *testing.T) {
				const n = 20
				run := func(w way) (dials, most int) {
					s := newServer(t, func(w http.ResponseWriter, r *http.Request) { time.Sleep(5 * time.Millisecond) }, proto.opts...)
					var open, peak atomic.Int64
					d := new(faultnet.Dialer)
					d.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
						c, err := new(net.Dialer).DialContext(ctx, network, addr)
						if err != nil {
							return nil, err
						}
						now := open.Add(1)
						for old := peak.Load(); now > old && !peak.CompareAndSwap(old, now); old = peak.Load() {
						}
						return &dialCounted{Conn: c, open: &open}, nil
					}
					base := &http.Transport{DialContext: d.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true}
					tt.set(base)
					c := &http.Client{Transport: w.new(base)}
					defer c.CloseIdleConnections()
					start := time.Now()
					errs := dialEach(t, n, func() error {
						req := request(t, "GET", s.URL, nil)
						req.Close = tt.close
						resp, err := c.Do(req)
						if err != nil {
							return err
						}
						return drain(resp)
					})
					if len(errs) != 0 {
						t.Errorf("%s: %d failed, such as: %v", w.name, len(errs), errs[0])
					}
					t.Logf("%s: %d dials, at most %d at once, %v", w.name, d.Dials(), peak.Load(), time.Since(start))
					return d.Dials(), int(peak.Load())
				}
				bareDials, _ := run(bare)
				dials, most := run(owned)
				tt.check(t, bareDials, dials, most)
			})
		}
	}
}

type dialCounted struct {
	net.Conn
	open *atomic.Int64
	once sync.Once
}

func (c *dialCounted) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.Conn.Close()
}

// Any interleaving of dials that work, fail or are given up: each ends, with
// an outcome that was really there, and nothing is left behind. Outside of
// what is known to be HTTP/1 no two dials to one address are ever under way
// at once.
func TestMergeInterleavings(t *testing.T) {
	faultnet.ClientCert()
	rounds := 60
	if testing.Short() {
		rounds = 20
	}
	for seed := range rounds {
		synctest.Test(t, func(t *testing.T) { dialInterleave(t, uint64(seed)) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func dialInterleave(t *testing.T, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	speaksHTTP2 := rnd.IntN(3) > 0
	errDial := errors.New("dial failed")
	plan := make([]time.Duration, 64)
	fails := make([]bool, len(plan))
	for i := range plan {
		plan[i] = time.Duration(rnd.IntN(30)) * time.Millisecond
		fails[i] = rnd.IntN(4) == 0
	}
	var nth, underWay, merged, failures atomic.Int64
	cfg := dialMemTLS()
	cfg.NextProtos = []string{"h2", "http/1.1"}
	d := &dialer{reg: new(Registry), transport: &http.Transport{TLSClientConfig: cfg}}
	var servers sync.WaitGroup
	d.under = func(ctx context.Context, _, addr string) (net.Conn, error) {
		d.mu.Lock()
		_, http1 := d.http1[addr]
		d.mu.Unlock()
		if n := underWay.Add(1); n > 1 && !http1 {
			t.Errorf("%d dials at once", n)
		}
		defer underWay.Add(-1)
		i := int(nth.Add(1)-1) % len(plan)
		select {
		case <-time.After(plan[i]):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if fails[i] {
			failures.Add(1)
			return nil, errDial
		}
		here, there := net.Pipe()
		servers.Go(func() {
			scfg := &tls.Config{Certificates: []tls.Certificate{faultnet.ClientCert()}, NextProtos: []string{"http/1.1"}}
			if speaksHTTP2 {
				scfg.NextProtos = []string{"h2", "http/1.1"}
			}
			s := tls.Server(there, scfg)
			defer there.Close()
			if s.Handshake() == nil {
				io.Copy(io.Discard, s)
			}
		})
		return here, nil
	}
	var callers sync.WaitGroup
	const host = "127.0.0.1:443"
	for range 20 {
		begin := time.Duration(rnd.IntN(60)) * time.Millisecond
		leave := time.Duration(rnd.IntN(80)) * time.Millisecond
		leaves := rnd.IntN(4) == 0
		callers.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			time.Sleep(begin)
			if leaves {
				var stop context.CancelFunc
				ctx, stop = context.WithTimeout(ctx, leave)
				defer stop()
			}
			nc, err := d.dialTLSContext(ctx, "tcp", host)
			if err == nil {
				err = nc.(*tls.Conn).HandshakeContext(ctx) // as net/http does
				defer nc.(*tls.Conn).NetConn().Close()
			}
			switch {
			case err == nil:
				want := "http/1.1"
				if speaksHTTP2 {
					want = "h2"
				}
				if got := nc.(*tls.Conn).ConnectionState().NegotiatedProtocol; got != want {
					t.Errorf("protocol %q, want %q", got, want)
				}
				time.Sleep(5 * time.Millisecond) // its life
			case ctx.Err() != nil:
				if end, ok := ctx.Deadline(); ok && time.Now().After(end) {
					t.Errorf("left %v after the end of its context", time.Since(end))
				}
			case errors.Is(err, errSuperseded):
				merged.Add(1)
				if !speaksHTTP2 {
					t.Error("superseded, but there is no HTTP/2")
				}
			case errors.Is(err, errDial):
				if failures.Load() == 0 {
					t.Error("a failure out of nowhere")
				}
			default:
				t.Errorf("err = %v", err)
			}
		})
	}
	callers.Wait()
	synctest.Wait()
	time.Sleep(time.Second) // awaitPooled
	servers.Wait()
	if len(d.calls) != 0 || d.reg.Len() != 0 {
		t.Errorf("%d calls and %d connections left", len(d.calls), d.reg.Len())
	}
}

// Connections that die as soon as they are up, under requests that have
// merged their dials: the worst time for a dial to be superseded.
func TestMergedDialsDieYoung(t *testing.T) {
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) { time.Sleep(time.Millisecond) })
	var dials atomic.Int64
	d := new(faultnet.Dialer)
	c := owned.client(t, d, s.ClientTLS())
	d.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err != nil || dials.Add(1)%2 == 0 {
			return nc, err
		}
		return &dialShortLived{Conn: nc}, nil
	}
	failed := 0
	for range 20 {
		for _, err := range dialBurst(t, c, s.URL, 50) {
			failed++
			if !errors.Is(err, net.ErrClosed) && !errors.Is(err, syscall.EPIPE) && Classify(err) == KindUnknown {
				t.Errorf("err = %v", err)
			}
		}
		if l := live(d); l != nil {
			l.FailWrites(syscall.EPIPE)
		}
	}
	// A connection that fails on its first request looks like a refusal, and
	// a request is sent again once, so some fail.
	t.Logf("%d of 1000 failed, %d dials", failed, d.Dials())
}

// dialShortLived fails its writes after the handshake and a little more.
type dialShortLived struct {
	net.Conn
	writes atomic.Int64
}

func (c *dialShortLived) Write(p []byte) (int, error) {
	if c.writes.Add(1) > 4 {
		return 0, &net.OpError{Op: "write", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: syscall.EPIPE}
	}
	return c.Conn.Write(p)
}

// Whoever has come after a dial failed, but before that was made known, has not
// seen it fail and tries for itself.
func TestMergeLateJoiner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const addr = "host:443"
		errFirst, errSecond := errors.New("first"), errors.New("second")
		var dials atomic.Int64
		reg := &Registry{Dial: func(context.Context, string, string) (net.Conn, error) {
			here, there := net.Pipe()
			there.Close()
			return here, nil
		}}
		d := &dialer{reg: reg, transport: &http.Transport{}, under: func(context.Context, string, string) (net.Conn, error) {
			dials.Add(1)
			return nil, errSecond
		}}
		wait := func() <-chan error {
			err := make(chan error, 1)
			go func() {
				_, e := d.dialTLSContext(t.Context(), "tcp", addr)
				err <- e
			}()
			synctest.Wait()
			return err
		}
		for _, dead := range []bool{false, true} {
			dials.Store(0)
			call, _, _ := d.join(addr)
			undialed := wait()
			nc, err := reg.DialContext(t.Context(), "tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			c := nc.(*conn)
			d.mu.Lock()
			call.conn = c
			d.mu.Unlock()
			unheard := wait()
			c.read.Store(100)
			if dead {
				c.doom(KindEOF, io.EOF)
			}
			late := wait() // the handshake may have failed now
			nc.Close()
			d.end(addr, call, failed, errFirst)
			for name, got := range map[string]<-chan error{"before the dial was done": undialed, "before the last bytes": unheard} {
				if err := <-got; err != errFirst {
					t.Errorf("dead=%v, came %s: %v", dead, name, err)
				}
			}
			if err := <-late; err != errSecond || dials.Load() != 1 {
				t.Errorf("dead=%v, came late: %v after %d dials", dead, err, dials.Load())
			}
		}
	})
}

// A caller that leaves while its request is being sent back gets its own end, not
// our error.
func TestSupersededCallerLeaves(t *testing.T) {
	tr := NewTransport()
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("the caller's")
	cancel(cause)
	left := request(t, "GET", "https://example.test/", nil)
	left.Cancel = make(chan struct{})
	for _, tt := range []struct {
		req  *http.Request
		want error
	}{
		{left.WithContext(ctx), cause},
		{left, errSuperseded},
	} {
		if err := tr.fail(tt.req, nil, new(story), errSuperseded); err != tt.want {
			t.Errorf("%v, want %v", err, tt.want)
		}
	}
}

// What was sent back is sent back again, or given up; it is never a retry. After
// a while it dials for itself.
func TestSupersededIsNoRetry(t *testing.T) {
	tr := NewTransport()
	req := request(t, "GET", "https://example.test/", nil)
	v := verdict{kind: KindNotSent, unsent: true, landed: true, ours: true}
	if s := (&story{stuck: maxStuck}); tr.mayGoOn(req, v, s) || s.retry {
		t.Error("it counts as a retry")
	}

	dials := 0
	own := Options{Base: &http.Transport{}}.NewTransport()
	own.own.DialTLSContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		if dials++; dialsAlone(ctx) {
			return nil, io.ErrNoProgress
		}
		return nil, errSuperseded
	}
	if _, err := own.RoundTrip(req); err != io.ErrNoProgress || dials != maxSuperseded+1 {
		t.Errorf("%v after %d dials, want its own to be number %d", err, dials, maxSuperseded+1)
	}
}

// In a Registry that is shared, what Wrap has adopted is no candidate for an
// error of NewTransport's.
func TestRecallForeign(t *testing.T) {
	var r Registry
	const addr = "example.test:443"
	ours := r.track(new(restConn), addr, nil)
	theirs := &conn{Conn: new(restConn), reg: &r, addr: addr, foreign: true}
	ours.shaken()
	for _, c := range []*conn{ours, theirs} {
		c.doom(KindReset, net.ErrClosed)
	}
	if c, _ := r.recall(io.ErrUnexpectedEOF, KindEOF, addr, 0); c != ours {
		t.Errorf("got %p, want %p", c, ours)
	}
}
