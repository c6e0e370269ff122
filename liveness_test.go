package deadconn

import (
	"context"
	"io"
	"net"
	"net/http"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

func TestVerdict(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	known := func(k kernelInfo) kernelInfo { k.known = true; return k }
	hole := known(kernelInfo{unacked: 2, retransmits: 3, sinceACK: 3 * s, rtt: ms})
	for _, tt := range []struct {
		name string
		e    evidence
		want livenessVerdict
	}{
		{"all answered", evidence{}, alive},
		{"all answered, old losses in the kernel's account", evidence{kernel: hole}, alive},
		{"just sent", evidence{silent: 10 * ms, kernel: known(kernelInfo{unacked: 1})}, silent},
		{"slow server: acknowledged, and silent for long", evidence{silent: 600 * s, kernel: known(kernelInfo{sinceACK: 600 * s})}, alive},
		{"one retransmission", evidence{silent: 500 * ms, kernel: known(kernelInfo{unacked: 1, retransmits: 1, sinceACK: 500 * ms})}, suspect},
		{"one, but too early", evidence{silent: 150 * ms, kernel: known(kernelInfo{unacked: 1, retransmits: 1, sinceACK: 500 * ms})}, silent},
		{"one, but an ACK since", evidence{silent: 500 * ms, kernel: known(kernelInfo{unacked: 1, retransmits: 1, sinceACK: 50 * ms})}, silent},
		{"10 % loss at its worst: two for 1.2 s", evidence{silent: 1200 * ms, kernel: known(kernelInfo{unacked: 9, retransmits: 2, sinceACK: 2300 * ms})}, suspect},
		{"three, but not for long", evidence{silent: 2 * s, kernel: known(kernelInfo{unacked: 1, retransmits: 3, sinceACK: 2 * s})}, suspect},
		{"a black hole", evidence{silent: 3 * s, kernel: hole}, cutOff},
		{"idle for long, and then a black hole", evidence{silent: s, kernel: known(kernelInfo{unacked: 1, retransmits: 3, sinceACK: 600 * s})}, suspect},
		{"far: 2.6 s are nothing at an RTT of 700 ms", evidence{silent: 2600 * ms, kernel: known(kernelInfo{unacked: 1, retransmits: 3, sinceACK: 2600 * ms, rtt: 700 * ms})}, suspect},
		{"window shut, each retransmission answered", evidence{silent: 9 * s, kernel: known(kernelInfo{unacked: 5, retransmits: 5, sinceACK: 3 * s, rto: 6400 * ms})}, silent},
		{"a black hole after many retransmissions", evidence{silent: 9 * s, kernel: known(kernelInfo{unacked: 5, retransmits: 5, sinceACK: 9 * s, rto: 6400 * ms})}, cutOff},
		{"probes unanswered", evidence{silent: 3 * s, kernel: known(kernelInfo{probes: 6, sinceACK: 3 * s})}, cutOff},
		{"probes too few", evidence{silent: 3 * s, kernel: known(kernelInfo{probes: 5, sinceACK: 3 * s})}, alive},
		{"window shut, and probed", evidence{silent: 12 * s, writing: 12 * s, http2: true, kernel: known(kernelInfo{notSent: 1 << 20, sinceACK: s})}, silent},
		{"window shut when the path died", evidence{silent: 3 * s, writing: 3 * s, http2: true, kernel: known(kernelInfo{notSent: 1 << 20, probes: 4, sinceACK: 3 * s})}, cutOff},
		{"window shut when the path died, early", evidence{silent: 500 * ms, writing: 500 * ms, http2: true, kernel: known(kernelInfo{notSent: 1 << 20, probes: 2, sinceACK: 500 * ms})}, suspect},
		{"window shut, and a probe under way", evidence{silent: 5 * s, writing: 5 * s, http2: true, kernel: known(kernelInfo{notSent: 1 << 20, probes: 1, sinceACK: 3 * s})}, silent},
		{"window shut for ever", evidence{silent: 23 * s, writing: 23 * s, http2: true, kernel: known(kernelInfo{notSent: 1 << 20, sinceACK: s})}, dead},
		{"window shut for ever over HTTP/1: the server's right", evidence{silent: 600 * s, writing: 600 * s, kernel: known(kernelInfo{notSent: 1 << 20, sinceACK: s})}, silent},
		{"full buffer on a dead path", evidence{silent: 3 * s, writing: 3 * s, kernel: hole}, cutOff},
		{"no kernel: silent", evidence{silent: 600 * s}, silent},
		{"no kernel: a write that moves", evidence{silent: 600 * s, writing: 21 * s, http2: true}, silent},
		{"no kernel: a write that does not", evidence{silent: 600 * s, writing: 23 * s, http2: true}, dead},
		{"no kernel: a write over HTTP/1", evidence{silent: 600 * s, writing: 600 * s}, silent},
	} {
		if got := tt.e.verdict(defaultWriteTimeout); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// memNet is a network inside a synctest bubble: what is dialed there has no
// kernel to ask, as on systems without TCP_INFO. It serves HTTP/2 in the
// clear.
type memNet struct {
	server *http.Server
	conns  chan net.Conn
	dialer faultnet.Dialer
}

func newMemNet(h http.HandlerFunc) *memNet {
	m := &memNet{conns: make(chan net.Conn), server: &http.Server{Handler: h, Protocols: new(http.Protocols)}}
	m.server.Protocols.SetUnencryptedHTTP2(true)
	m.dialer.Dial = func(context.Context, string, string) (net.Conn, error) {
		here, there := net.Pipe()
		m.conns <- there
		return here, nil
	}
	go m.server.Serve(m)
	return m
}

func (m *memNet) Accept() (net.Conn, error) {
	if c, ok := <-m.conns; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (m *memNet) Close() error   { return nil }
func (m *memNet) Addr() net.Addr { return &net.TCPAddr{} }

func (m *memNet) client(o Options) *http.Client {
	o.Base = &http.Transport{DialContext: m.dialer.DialContext, Protocols: new(http.Protocols)}
	o.Base.Protocols.SetUnencryptedHTTP2(true)
	return &http.Client{Transport: o.NewTransport()}
}

// end closes all, so that the bubble can end.
func (m *memNet) end(c *http.Client) {
	c.Transport.(*Transport).CloseConnections()
	close(m.conns)
	m.server.Close()
	m.dialer.CloseAll()
}

const memURL = "http://example.test/"

// A stream that says nothing for minutes, on a living path, stays; the PINGs
// under it are answered.
func TestSilentStreamStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemNet(func(w http.ResponseWriter, r *http.Request) {
			w.(http.Flusher).Flush()
			time.Sleep(30 * time.Minute)
			io.WriteString(w, "event")
		})
		c := m.client(Options{})
		defer m.end(c)
		resp, err := c.Get(memURL)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(b) != "event" || err != nil || m.dialer.Dials() != 1 {
			t.Errorf("%q, %v, %d dials", b, err, m.dialer.Dials())
		}
	})
}

// Where there is no kernel to ask, the unanswered PING finds a black hole, and
// the requests on it are rescued.
func TestPingFindsBlackHole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemNet(ok)
		c := m.client(Options{})
		defer m.end(c)
		mustGet(t, c, memURL)
		m.dialer.Last().Blackhole()
		start := time.Now()
		mustGet(t, c, memURL)
		if took := time.Since(start); took < defaultPingTimeout || took > 25*time.Second || m.dialer.Dials() != 2 {
			t.Errorf("rescued after %v by %d dials", took, m.dialer.Dials())
		}
	})
}

// A write that makes no progress is given up after Health.WriteTimeout, if no
// PING could tell before.
func TestStalledWriteWithoutKernel(t *testing.T) {
	for _, tt := range []struct {
		name    string
		disable bool
	}{{"watched", false}, {"Health.Disable", true}} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMemNet(ok)
				o := Options{Health: Health{PingInterval: time.Hour, WriteTimeout: 30 * time.Second}}
				if tt.disable {
					o.Health = Health{Disable: true}
				}
				c := m.client(o)
				defer m.end(c)
				mustGet(t, c, memURL)
				m.dialer.Last().HoldWrites()
				start := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				req, _ := http.NewRequestWithContext(ctx, "GET", memURL, nil)
				resp, err := c.Do(req)
				if tt.disable {
					if err == nil {
						t.Errorf("rescued after %v", time.Since(start))
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				drain(resp)
				if took := time.Since(start); took < 30*time.Second || took > 31*time.Second {
					t.Errorf("rescued after %v, want 30 s", took)
				}
			})
		})
	}
}

// A Registry at rest has no goroutine.
func TestWatchRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemNet(ok)
		c := m.client(Options{})
		defer m.end(c)
		mustGet(t, c, memURL)
		reg := c.Transport.(*Transport).reg
		if !reg.watching.Load() {
			t.Error("nobody watches a connection that was just written to")
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if reg.watching.Load() {
			t.Error("the watch goes on though everything was answered")
		}
	})
}

// Many writers and the watch agree on who is listed, or an eviction is missed.
func TestWatchListRace(t *testing.T) {
	var r Registry
	tr := Options{Registry: &r}.NewTransport()
	conns := make([]*conn, 50)
	for i := range conns {
		conns[i] = r.track(new(restConn), "example.test:443", tr)
	}
	var wg sync.WaitGroup
	for _, c := range conns {
		wg.Go(func() {
			for range 200 {
				c.wait(now())
				c.wrote.Add(1)
				runtime.Gosched()
				c.unanswered.Store(0)
			}
			// The last write is never answered.
			c.proto.Store(uint32(isHTTP2))
			c.wait(now() - int64(time.Minute))
			c.unanswered.Store(now() - int64(time.Minute))
			c.writing.Store(now() - int64(time.Minute))
		})
	}
	wg.Wait()
	for i, c := range conns {
		eventually(t, "every one evicted", func() bool { return c.evicted.Load() })
		if d := c.fate.Load(); d.kind != KindSilent {
			t.Errorf("%d: %v", i, d)
		}
	}
	if n := tr.Stats().Evicted; n != int64(len(conns)) {
		t.Errorf("%d evictions told, want %d", n, len(conns))
	}
}
