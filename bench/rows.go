package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/http2"

	"github.com/deadconn/deadconn/internal/faultnet"
	"github.com/deadconn/deadconn/internal/netlab"
)

// A Row is one fault, or the absence of one.
type Row struct {
	Name    string
	What    string // one line
	Group   string
	Healthy bool   // there is no fault: nothing may fail
	Lab     bool   // needs netlab
	Root    bool   // needs BlackholeSocket
	Program string // needs this server in PATH
	Waits   bool   // hardly any CPU: many at once do not disturb each other
	Alone   bool   // nothing else at the same time
	Quick   bool   // part of the short run in CI
	opts    netlab.Options
	run     func(c Contestant, env *cellEnv) (*world, error)
}

type cellEnv struct {
	quick bool
	lab   *netlab.Lab
}

const (
	groupEnd    = "The connection ends"
	groupH2     = "The HTTP/2 server says so"
	groupReal   = "A real server"
	groupSilent = "Silence"
	groupMany   = "Many at once"
	groupFine   = "Nothing is wrong"
)

// Rows are all of them, in the order of the report.
var Rows = append([]Row{
	{
		Name: "socket closed underneath, idle", Group: groupEnd, Quick: true,
		What: "golang/go#39750: the client's socket is closed while its reader sleeps; then a request of each kind, 12 times",
		run:  idle(12, 20*time.Millisecond, func(w *world) { each(w, (*faultnet.Conn).CloseUnderneath) }),
	},
	{
		Name: "socket closed underneath, load", Group: groupEnd, Quick: true,
		What: "the same four times under GETs, one every 25 ms that takes 60 ms",
		run:  socketDeath,
	},
	{
		Name: "write error, sleeping reader", Group: groupEnd, Quick: true,
		What: "each write gets EPIPE and the reader hears nothing; 12 times",
		run:  idle(12, 20*time.Millisecond, func(w *world) { each(w, func(c *faultnet.Conn) { c.FailWrites(syscall.EPIPE) }) }),
	},
	{
		Name: "RST, idle", Group: groupEnd, Quick: true,
		What: "the server resets the connection at rest; a request follows after 20 ms, 12 times",
		run:  idle(12, 20*time.Millisecond, func(w *world) { w.srv.reset() }),
	},
	{
		Name: "RST, in flight", Group: groupEnd, Quick: true,
		What: "the server resets the connection under one request of each kind that it is working on; 6 times",
		run:  inFlight(6, func(w *world) { w.srv.reset() }),
	},
	{
		Name: "FIN, idle", Group: groupEnd, Quick: true,
		What: "the server ends the connection at rest, without GOAWAY; a request follows after 20 ms, 12 times",
		run:  idle(12, 20*time.Millisecond, func(w *world) { w.srv.kill() }),
	},
	{
		Name: "FIN, in flight", Group: groupEnd, Quick: true,
		What: "as with kill -9: the server ends the connection under one request of each kind; 6 times",
		run:  inFlight(6, func(w *world) { w.srv.kill() }),
	},
	{
		Name: "idle close, raced", Group: groupEnd, Quick: true,
		What: "the server ends the connection at rest and a request is sent at once; 60 times",
		run:  idle(60, 0, func(w *world) { w.srv.kill() }),
	},
	{
		Name: "GOAWAY, graceful", Group: groupH2, Quick: true,
		What: "NO_ERROR that covers the request, which is then answered; 12 times",
		run: scripted(12, func(w *world, c *faultnet.PeerConn, r *faultnet.PeerRequest) bool {
			c.GoAway(r.StreamID, http2.ErrCodeNo, "")
			time.Sleep(20 * time.Millisecond)
			w.ran(r.Method, r.Header.Get("X-Id"))
			c.Respond(r.StreamID, 200, "done")
			return false
		}),
	},
	{
		Name: "GOAWAY, error", Group: groupH2, Quick: true,
		What: "INTERNAL_ERROR that covers the request, which has run and is not answered; 12 times",
		run: scripted(12, func(w *world, c *faultnet.PeerConn, r *faultnet.PeerRequest) bool {
			w.ran(r.Method, r.Header.Get("X-Id"))
			c.GoAway(r.StreamID, http2.ErrCodeInternal, "")
			return false
		}),
	},
	{
		Name: "GOAWAY below the request", Group: groupH2, Quick: true,
		What: "NO_ERROR with a Last-Stream-ID below the request, which has not run; 12 times",
		run: scripted(12, func(_ *world, c *faultnet.PeerConn, r *faultnet.PeerRequest) bool {
			c.GoAway(r.StreamID-2, http2.ErrCodeNo, "")
			return false
		}),
	},
	{
		Name: "REFUSED_STREAM", Group: groupH2, Quick: true,
		What: "the request is refused once, unprocessed, on a healthy connection; 12 times",
		run: scripted(12, func(_ *world, c *faultnet.PeerConn, r *faultnet.PeerRequest) bool {
			c.Reset(r.StreamID, http2.ErrCodeRefusedStream)
			return true
		}),
	},
	{
		Name: "MAX_CONCURRENT_STREAMS to 1", Group: groupH2, Quick: true,
		What: "the limit is lowered to 1 under load: 40 requests that take 20 ms, 8 at a time",
		run:  lowered,
	},
	{
		Name: "RST by a NAT", Group: groupEnd, Lab: true,
		What: "state lost on the way: the first packet of a connection at rest is answered by a RST; 12 times",
		run:  natReset,
	},
	{
		Name: "nginx max requests", Group: groupReal, Program: "nginx",
		What: "keepalive_requests 40: nginx ends each connection by GOAWAY; 320 requests, 8 at a time",
		run:  behind(realServers[0], maxRequests),
	},
	{
		Name: "black hole", Group: groupSilent, Lab: true, Waits: true,
		What: "the pooled connection's packets vanish both ways, new connections work; a request every 400 ms for 26 s",
		run:  hole(func(l *netlab.Lab, c *faultnet.Conn) error { return l.Cut(c) }),
	},
	{
		Name: "black hole to the server", Group: groupSilent, Lab: true, Waits: true,
		What: "the same, only what the client sends vanishes",
		run:  hole(func(l *netlab.Lab, c *faultnet.Conn) error { return l.CutOneWay(c, true) }),
	},
	{
		Name: "black hole to the client", Group: groupSilent, Lab: true, Waits: true,
		What: "the same, only what the server sends vanishes: requests run, answers are lost",
		run:  hole(func(l *netlab.Lab, c *faultnet.Conn) error { return l.CutOneWay(c, false) }),
	},
	{
		Name: "state lost by a NAT, silently", Group: groupSilent, Lab: true, Waits: true,
		What: "forgotten on the way while the connection is at rest: a request of each kind in turn goes into the hole, a GET follows 200 ms later",
		run:  natSilence,
	},
	{
		Name: "write stalls in a black hole", Group: groupSilent, Lab: true, Waits: true,
		What: "the path dies in the middle of an upload and its write blocks; then a GET every 400 ms for 20 s",
		run:  stalledUpload,
	},
	{
		Name: "write stalls, peer there", Group: groupSilent, Waits: true,
		What: "writes make no progress and the kernel sees nothing wrong; deadline 30 s",
		run:  heldWrites,
	},
	{
		Name: "frozen process", Group: groupSilent, Waits: true,
		What: "SIGSTOP: the kernel acknowledges, nobody answers; new connections reach another process; deadline 30 s",
		run:  frozen,
	},
	{
		Name: "link down 4 s, up", Group: groupSilent, Lab: true, Waits: true,
		What: "the client's interface goes down, and up after 4 s: nobody can dial meanwhile; a GET every 250 ms",
		run:  linkDown,
	},
	{
		Name: "50 hosts dead at once", Group: groupMany, Root: true, Waits: true,
		What: "as after a VM's suspend: 50 pooled connections to 50 hosts are black holes (socket filter), then 4 GETs to each",
		run:  fiftyHosts,
	},
	{
		Name: "dies under 300 requests", Group: groupMany, Alone: true, Quick: true,
		What: "300 GETs that take 300 ms are in flight, on two connections since the server allows 250 on each, when it ends them",
		run:  stampede,
	},
	{
		Name: "slow server", Group: groupFine, Healthy: true, Waits: true,
		What: "answers take 12 s",
		run: fine(func(w *world, quick bool) []ask {
			wait := 12 * time.Second
			if quick {
				wait = 4 * time.Second
			}
			return []ask{{kind: get, wait: wait}, {kind: put, wait: wait}, {kind: post, wait: wait}, {kind: stream, wait: wait}}
		}), Quick: true,
	},
	{
		Name: "long poll", Group: groupFine, Healthy: true, Waits: true,
		What: "4 responses whose body comes after 24 s of silence",
		run: fine(func(*world, bool) []ask {
			a := ask{kind: get, wait: 24 * time.Second, query: "&early"}
			return []ask{a, a, a, a}
		}),
	},
	{
		Name: "held-back upload", Group: groupFine, Healthy: true, Waits: true,
		What: "4 MiB that the server does not read for 12 s",
		run: fine(func(w *world, quick bool) []ask {
			a := ask{kind: put, wait: 12 * time.Second, query: "&held", body: func() io.Reader { return bytes.NewReader(make([]byte, 4<<20)) }}
			if quick {
				a.wait = 4 * time.Second
			}
			b := a
			b.kind = stream
			return []ask{a, b}
		}), Quick: true,
	},
	{
		Name: "a neighbour dies", Group: groupEnd, Quick: true,
		What: "8 streams to one host run on while another host's socket is closed underneath; the streams may not notice",
		run:  neighbour,
	},
	{
		Name: "10 % loss", Group: groupFine, Healthy: true, Lab: true, Waits: true,
		What: "each way, round trip 10 ms; 4 requests at a time for 12 s, deadline 10 s",
		opts: netlab.Options{Loss: 0.1, Delay: 5 * time.Millisecond, Seed: 7},
		run:  bad,
	},
	{
		Name: "round trip of 700 ms", Group: groupFine, Healthy: true, Lab: true, Waits: true,
		What: "4 requests at a time for 12 s, deadline 10 s",
		opts: netlab.Options{Delay: 350 * time.Millisecond},
		run:  bad,
	},
}, serverRows()...)

// LeftOut is what nobody has made yet.
var LeftOut = []string{
	"github.com/imroc/req/v3 as a contestant: the module proxy does not serve it",
}

func each(w *world, f func(*faultnet.Conn)) {
	for _, c := range w.open() {
		f(c)
	}
}

// idle breaks a connection at rest, n times, waits, and sends: a victim of
// each kind in turn and a GET after it.
func idle(n int, wait time.Duration, fault func(*world)) func(Contestant, *cellEnv) (*world, error) {
	return func(c Contestant, env *cellEnv) (*world, error) {
		w, err := newWorld(c, nil, nil)
		if err != nil {
			return nil, err
		}
		w.faultsAtRest(n, wait, func() { fault(w) })
		return w, nil
	}
}

func (w *world) faultsAtRest(n int, wait time.Duration, fault func()) {
	for i := range n {
		w.do(ask{kind: get})
		time.Sleep(5 * time.Millisecond) // the answer's last bytes, such as a WINDOW_UPDATE
		w.strike(fault)
		time.Sleep(wait)
		w.do(ask{kind: kinds[i%4]})
		w.do(ask{kind: get})
	}
}

// inFlight breaks the connection under a request of each kind, n times.
func inFlight(n int, fault func(*world)) func(Contestant, *cellEnv) (*world, error) {
	return func(c Contestant, env *cellEnv) (*world, error) {
		w, err := newWorld(c, nil, nil)
		if err != nil {
			return nil, err
		}
		w.faultsInFlight(n, 200*time.Millisecond, func() { fault(w) })
		return w, nil
	}
}

func (w *world) faultsInFlight(n int, wait time.Duration, fault func()) {
	for range n {
		w.do(ask{kind: get})
		var wg sync.WaitGroup
		for _, k := range kinds {
			wg.Go(func() { w.do(ask{kind: k, wait: wait}) })
		}
		time.Sleep(80 * time.Millisecond)
		w.strike(fault)
		wg.Wait()
		w.do(ask{kind: get})
	}
}

// scripted lets the server do fault instead of answering, n times. fault
// reports whether the connection goes on.
func scripted(n int, fault func(*world, *faultnet.PeerConn, *faultnet.PeerRequest) bool) func(Contestant, *cellEnv) (*world, error) {
	return func(c Contestant, env *cellEnv) (*world, error) {
		w, err := newWorld(c, nil, nil)
		if err != nil {
			return nil, err
		}
		var armed atomic.Bool
		p, err := faultnet.NewPeer(func(c *faultnet.PeerConn) {
			for {
				r, err := c.ReadRequest()
				if err != nil {
					return
				}
				if !r.EndStream {
					if _, err := c.ReadBody(r.StreamID); err != nil {
						return
					}
				}
				if armed.CompareAndSwap(true, false) {
					if !fault(w, c, r) {
						return
					}
					continue
				}
				w.ran(r.Method, r.Header.Get("X-Id"))
				c.Respond(r.StreamID, 200, "done")
			}
		})
		if err != nil {
			return w, err
		}
		w.cleanup(func() { p.Close() })
		w.to(p.Addr())
		for i := range n {
			w.do(ask{kind: get})
			w.strike(func() { armed.Store(true) })
			w.do(ask{kind: kinds[i%4]})
			w.do(ask{kind: get})
		}
		return w, nil
	}
}

func maxRequests(w *world, _ *proxy) error {
	w.strike(func() {})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 40 {
				w.do(ask{kind: kinds[(i+j)%4]})
			}
		})
	}
	wg.Wait()
	return nil
}

func lowered(c Contestant, env *cellEnv) (*world, error) {
	w, err := newWorld(c, nil, nil)
	if err != nil {
		return nil, err
	}
	var lower atomic.Bool
	p, err := faultnet.NewPeer(func(c *faultnet.PeerConn) {
		var answers sync.WaitGroup
		defer answers.Wait()
		var told bool
		for {
			r, err := c.ReadRequest()
			if err != nil {
				return
			}
			if !r.EndStream {
				if _, err := c.ReadBody(r.StreamID); err != nil {
					return
				}
			}
			w.ran(r.Method, r.Header.Get("X-Id"))
			if lower.Load() && !told {
				told = true
				c.Settings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 1})
			}
			answers.Go(func() {
				time.Sleep(20 * time.Millisecond)
				c.Respond(r.StreamID, 200, "done")
			})
		}
	})
	if err != nil {
		return w, err
	}
	w.cleanup(func() { p.Close() })
	w.to(p.Addr())
	w.do(ask{kind: get, wait: 20 * time.Millisecond})
	w.strike(func() { lower.Store(true) })
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 5 {
				w.do(ask{kind: kinds[(i+j)%4], wait: 20 * time.Millisecond})
			}
		})
	}
	wg.Wait()
	return w, nil
}

func socketDeath(c Contestant, env *cellEnv) (*world, error) {
	w, err := newWorld(c, nil, nil)
	if err != nil {
		return nil, err
	}
	w.do(ask{kind: get})
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 4 {
			time.Sleep(400 * time.Millisecond)
			w.strike(func() { each(w, (*faultnet.Conn).CloseUnderneath) })
		}
	})
	w.load(2*time.Second, 25*time.Millisecond, func(int) ask { return ask{kind: get, wait: 60 * time.Millisecond} })
	wg.Wait()
	return w, nil
}

func inLab(c Contestant, env *cellEnv) (*world, error) {
	l, err := env.lab.Listen(0)
	if err != nil {
		return nil, err
	}
	return newWorld(c, l, env.lab.Dial)
}

func natReset(c Contestant, env *cellEnv) (*world, error) {
	w, err := inLab(c, env)
	if err != nil {
		return nil, err
	}
	for i := range 12 {
		w.do(ask{kind: get})
		time.Sleep(5 * time.Millisecond)
		w.strike(func() { each(w, func(c *faultnet.Conn) { err = errors.Join(err, env.lab.RejectRST(c)) }) })
		w.do(ask{kind: kinds[i%4]})
		w.do(ask{kind: get})
		err = errors.Join(err, env.lab.Heal())
	}
	return w, err
}

// natSilence never heals: what a NAT has forgotten stays forgotten, and only a
// new connection helps.
func natSilence(c Contestant, env *cellEnv) (*world, error) {
	w, err := inLab(c, env)
	if err != nil {
		return nil, err
	}
	for _, k := range kinds {
		if len(w.open()) == 0 { // else it may be a dead one, and this a victim
			w.do(ask{kind: get})
		}
		time.Sleep(100 * time.Millisecond) // until all is acknowledged
		w.strike(func() { each(w, func(c *faultnet.Conn) { err = errors.Join(err, env.lab.Cut(c)) }) })
		var wg sync.WaitGroup
		wg.Go(func() { w.do(ask{kind: k}) })
		time.Sleep(200 * time.Millisecond)
		w.do(ask{kind: get})
		wg.Wait()
	}
	return w, err
}

// mixed is the traffic of the rows on silence: three idempotent requests, then
// a POST.
func mixed(i int) ask { return ask{kind: []string{get, get, put, post}[i%4]} }

func hole(cut func(*netlab.Lab, *faultnet.Conn) error) func(Contestant, *cellEnv) (*world, error) {
	return func(c Contestant, env *cellEnv) (*world, error) {
		w, err := inLab(c, env)
		if err != nil {
			return nil, err
		}
		w.do(ask{kind: get})
		var wg sync.WaitGroup
		var cutErr error
		wg.Go(func() {
			time.Sleep(1900 * time.Millisecond)
			w.strike(func() { each(w, func(c *faultnet.Conn) { cutErr = errors.Join(cutErr, cut(env.lab, c)) }) })
		})
		w.load(28*time.Second, 400*time.Millisecond, mixed)
		wg.Wait()
		return w, cutErr
	}
}

// A trip calls f when n bytes have been read.
type trip struct {
	io.Reader
	n int
	f func()
}

func (t *trip) Read(p []byte) (int, error) {
	n, err := t.Reader.Read(p)
	if t.n -= n; t.n <= 0 && t.f != nil {
		t.f()
		t.f = nil
	}
	return n, err
}

func stalledUpload(c Contestant, env *cellEnv) (*world, error) {
	l, err := env.lab.Listen(0)
	if err != nil {
		return nil, err
	}
	w, err := newWorld(c, l, env.lab.Dial)
	if err != nil {
		return nil, err
	}
	w.do(ask{kind: get})
	var once sync.Once
	var cutErr error
	var wg sync.WaitGroup
	cut := make(chan struct{})
	wg.Go(func() {
		w.do(ask{kind: put, body: func() io.Reader {
			return &trip{bytes.NewReader(make([]byte, 2<<20)), 256 << 10, func() {
				once.Do(func() {
					w.strike(func() {
						each(w, func(c *faultnet.Conn) {
							cutErr = errors.Join(cutErr, env.lab.Cut(c))
							if b, ok := c.NetConn().(interface{ SetWriteBuffer(int) error }); ok {
								b.SetWriteBuffer(8 << 10) // full at once
							}
						})
					})
					close(cut)
				})
			}}
		}})
	})
	<-cut
	w.load(20*time.Second, 400*time.Millisecond, func(int) ask { return ask{kind: get} })
	wg.Wait()
	return w, cutErr
}

func heldWrites(c Contestant, env *cellEnv) (*world, error) {
	w, err := newWorld(c, nil, nil)
	if err != nil {
		return nil, err
	}
	w.deadline = 30 * time.Second
	w.do(ask{kind: get})
	w.strike(func() { each(w, (*faultnet.Conn).HoldWrites) })
	w.load(26*time.Second, 500*time.Millisecond, mixed)
	return w, nil
}

// childEnv tells a child process which server it is a proxy to.
const childEnv = "DEADCONN_BENCH_PROXY_TO"

// Child turns this process into a proxy if it was started as one, and does
// not return then. A program that runs Rows calls it first.
func Child() {
	target := os.Getenv(childEnv)
	if target == "" {
		return
	}
	p, err := faultnet.NewProxy(target)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(p.Addr())
	io.Copy(io.Discard, os.Stdin) // until the parent is gone
	os.Exit(0)
}

func frozen(c Contestant, env *cellEnv) (*world, error) {
	w, err := newWorld(c, nil, nil)
	if err != nil {
		return nil, err
	}
	w.deadline = 30 * time.Second
	exe, err := os.Executable()
	if err != nil {
		return w, err
	}
	direct := w.srv.l.Addr().String()
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"="+direct)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return w, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return w, err
	}
	if err := cmd.Start(); err != nil {
		return w, err
	}
	w.cleanup(func() {
		cmd.Process.Signal(syscall.SIGCONT)
		in.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	b := make([]byte, 64)
	n, err := out.Read(b)
	if err != nil {
		return w, err
	}
	w.to(strings.TrimSpace(string(b[:n])))
	w.do(ask{kind: get})
	w.strike(func() {
		cmd.Process.Signal(syscall.SIGSTOP)
		time.Sleep(20 * time.Millisecond) // a signal is not at once
		w.to(direct)
	})
	w.load(26*time.Second, 500*time.Millisecond, mixed)
	return w, nil
}

func linkDown(c Contestant, env *cellEnv) (*world, error) {
	w, err := inLab(c, env)
	if err != nil {
		return nil, err
	}
	w.do(ask{kind: get})
	var wg sync.WaitGroup
	var down, up error
	wg.Go(func() {
		time.Sleep(900 * time.Millisecond)
		w.strike(func() { down = env.lab.LinkDown() })
		time.Sleep(4 * time.Second)
		up = env.lab.LinkUp()
	})
	w.load(9*time.Second, 250*time.Millisecond, func(int) ask { return ask{kind: get} })
	wg.Wait()
	return w, errors.Join(down, up)
}

func fiftyHosts(c Contestant, env *cellEnv) (*world, error) {
	w, err := newWorld(c, nil, nil)
	if err != nil {
		return nil, err
	}
	all := func(n int) {
		var wg sync.WaitGroup
		for h := range 50 {
			for range n {
				wg.Go(func() { w.do(ask{kind: get, host: fmt.Sprintf("h%02d.test", h), victim: n > 1}) })
			}
		}
		wg.Wait()
	}
	all(1)
	var cutErr error
	w.strike(func() {
		each(w, func(c *faultnet.Conn) { cutErr = errors.Join(cutErr, faultnet.BlackholeSocket(c)) })
	})
	all(4)
	return w, cutErr
}

func stampede(c Contestant, env *cellEnv) (*world, error) {
	w, err := newWorld(c, nil, nil)
	if err != nil {
		return nil, err
	}
	w.do(ask{kind: get})
	var wg sync.WaitGroup
	for range 300 {
		wg.Go(func() { w.do(ask{kind: get, wait: 300 * time.Millisecond}) })
	}
	time.Sleep(200 * time.Millisecond)
	w.strike(w.srv.kill)
	wg.Wait()
	return w, nil
}

func fine(asks func(w *world, quick bool) []ask) func(Contestant, *cellEnv) (*world, error) {
	return func(c Contestant, env *cellEnv) (*world, error) {
		w, err := newWorld(c, nil, nil)
		if err != nil {
			return nil, err
		}
		w.deadline = 40 * time.Second
		w.do(ask{kind: get, healthy: true})
		w.strike(func() {}) // so that dials are counted from here
		var wg sync.WaitGroup
		for _, a := range asks(w, env.quick) {
			a.healthy = true
			wg.Go(func() { w.do(a) })
		}
		wg.Wait()
		return w, nil
	}
}

func neighbour(c Contestant, env *cellEnv) (*world, error) {
	w, err := newWorld(c, nil, nil)
	if err != nil {
		return nil, err
	}
	w.do(ask{kind: get, host: "b.test", healthy: true})
	safe := len(w.dialer.Conns())
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() { w.do(ask{kind: get, host: "b.test", wait: time.Second, query: "&early", healthy: true}) })
	}
	time.Sleep(50 * time.Millisecond)
	for i := range 4 {
		w.do(ask{kind: get})
		time.Sleep(20 * time.Millisecond)
		w.strike(func() {
			for _, c := range w.dialer.Conns()[safe:] {
				c.CloseUnderneath()
			}
		})
		w.do(ask{kind: []string{get, put}[i%2]})
	}
	wg.Wait()
	return w, nil
}

func bad(c Contestant, env *cellEnv) (*world, error) {
	w, err := inLab(c, env)
	if err != nil {
		return nil, err
	}
	w.strike(func() {})
	ctx, cancel := context.WithTimeout(context.Background(), 12*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := 0; ctx.Err() == nil; j++ {
				w.do(ask{kind: kinds[(i+j)%4], healthy: true})
			}
		})
	}
	wg.Wait()
	return w, nil
}
