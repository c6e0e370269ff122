package deadconn

import (
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// The cost of deadconn, beside the bare transport in the same run. README.md
// says how its table is made from these.

// noBase answers without a network, so that what is measured is ours.
type noBase struct{ resp http.Response }

func (b *noBase) RoundTrip(*http.Request) (*http.Response, error) { return &b.resp, nil }

func BenchmarkWrapNoBase(b *testing.B) {
	req, _ := http.NewRequest("GET", "https://example.test/", nil)
	base := &noBase{}
	for _, bb := range []struct {
		name string
		rt   http.RoundTripper
	}{{"bare", base}, {"Wrap", Wrap(base)}} {
		b.Run(bb.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := bb.rt.RoundTrip(req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// benchWays are bare and ours, each with a connection of its own to a server.
func benchWays(tb testing.TB) (url string, rts map[string]http.RoundTripper) {
	s := faultnet.NewServer(http.HandlerFunc(ok))
	tb.Cleanup(s.Close)
	rts = make(map[string]http.RoundTripper)
	for _, w := range []way{bare, owned, wrapped} {
		tr := w.new(&http.Transport{TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true})
		rts[w.name] = tr
		tb.Cleanup(func() { closeIdle(tr) })
	}
	return s.URL, rts
}

func roundTrip(tb testing.TB, rt http.RoundTripper, req *http.Request) {
	resp, err := rt.RoundTrip(req)
	if err != nil {
		tb.Fatal(err)
	}
	io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
}

// BenchmarkGET pairs a bare request with one of ours in each iteration, since
// the machine's own pace changes by more than what is measured, and compares
// the medians.
func BenchmarkGET(b *testing.B) {
	url, rts := benchWays(b)
	for _, name := range []string{owned.name, wrapped.name} {
		b.Run(name, func(b *testing.B) {
			req, _ := http.NewRequest("GET", url, nil)
			pair := [2]http.RoundTripper{rts[bare.name], rts[name]}
			for _, rt := range pair {
				roundTrip(b, rt, req)
			}
			var took [2][]time.Duration
			for i := 0; b.Loop(); i++ {
				for k := range pair {
					k = (k + i) % 2
					start := time.Now()
					roundTrip(b, pair[k], req)
					took[k] = append(took[k], time.Since(start))
				}
			}
			bareTook, oursTook := median(took[0]), median(took[1])
			b.ReportMetric(float64(bareTook), "bare-ns/op")
			b.ReportMetric(float64(oursTook), "ours-ns/op")
			b.ReportMetric(float64(oursTook)/float64(bareTook), "ratio")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

func BenchmarkGETParallel(b *testing.B) {
	url, rts := benchWays(b)
	for _, name := range []string{bare.name, owned.name} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetParallelism(64 / runtime.GOMAXPROCS(0))
			b.RunParallel(func(pb *testing.PB) {
				req, _ := http.NewRequest("GET", url, nil)
				for pb.Next() {
					roundTrip(b, rts[name], req)
				}
			})
		})
	}
}

// NewTransport adds no allocation to a GET.
func TestAllocsNewTransport(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	url, rts := benchWays(t)
	req, _ := http.NewRequest("GET", url, nil)
	allocs := func(name string) float64 {
		roundTrip(t, rts[name], req)
		roundTrip(t, rts[name], req)
		return testing.AllocsPerRun(2000, func() { roundTrip(t, rts[name], req) })
	}
	// The average is cut to a whole number, and the server's are in it.
	if b, o := allocs(bare.name), allocs(owned.name); o > b {
		t.Errorf("%v allocations a GET, net/http alone has %v", o, b)
	}
}

// Wrap allocates its notes on the attempt, their two hooks, a context and a
// copy of the request.
func TestAllocsWrap(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	req, _ := http.NewRequest("GET", "https://example.test/", nil)
	rt := Wrap(&noBase{})
	if n := testing.AllocsPerRun(1000, func() { rt.RoundTrip(req) }); n > 5 {
		t.Errorf("%v allocations, want at most 5", n)
	}
}

// restConn is a connection at rest.
type restConn struct {
	net.Conn
	addr net.TCPAddr
}

func (c *restConn) LocalAddr() net.Addr  { return &c.addr }
func (c *restConn) RemoteAddr() net.Addr { return &c.addr }
func (c *restConn) Close() error         { return nil }

const many = 100_000

func manyConns(r *Registry, n int) []*conn {
	conns := make([]*conn, n)
	for i := range conns {
		conns[i] = r.track(new(restConn), "example.test:443", nil)
	}
	return conns
}

// A tracked connection costs at most 256 bytes of ours.
func TestConnSize(t *testing.T) {
	var before, after runtime.MemStats
	var r Registry
	raw := make([]restConn, many)
	conns := make([]*conn, many)
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range conns {
		conns[i] = r.track(&raw[i], "example.test:443", nil)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	each := float64(after.HeapAlloc-before.HeapAlloc) / many
	t.Logf("conn is %d bytes; %.0f bytes of heap each", unsafe.Sizeof(conn{}), each)
	if each > 256 {
		t.Errorf("%.0f bytes each, want at most 256", each)
	}
	runtime.KeepAlive(conns)
}

func BenchmarkTrack(b *testing.B) {
	var r Registry
	manyConns(&r, many)
	raw := new(restConn)
	b.ReportAllocs()
	for b.Loop() {
		r.untrack(r.track(raw, "example.test:443", nil))
	}
}

func BenchmarkEvict(b *testing.B) {
	var r Registry
	conns := manyConns(&r, many)
	i := 0
	for b.Loop() {
		if i == len(conns) {
			b.StopTimer()
			conns, i = manyConns(&r, many), 0
			b.StartTimer()
		}
		conns[i].evict(KindReset, net.ErrClosed)
		conns[i].Close()
		i++
	}
}

// BenchmarkCheckout is what asking the socket costs a request.
func BenchmarkCheckout(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			defer c.Close()
			io.Copy(io.Discard, c)
		}
	}()
	var r Registry
	nc, err := r.DialContext(b.Context(), "tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	defer nc.Close()
	c := nc.(*conn)
	b.ReportAllocs()
	for b.Loop() {
		if c.hungUp() {
			b.Fatal("hung up")
		}
	}
}
