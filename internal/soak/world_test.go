package soak

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
)

// world is one soak: servers, clients, and the book.
type world struct {
	seed    int64
	began   time.Time
	origins []*origin
	clients []*client
	until   rule // stop when this one was broken; -1: none
	over    chan struct{}
	closed  chan struct{}
	stop    func()
	ctx     context.Context // of all requests
	cancel  context.CancelFunc
	late    time.Duration // see lateClose

	counters struct {
		sent, succeeded, failed, canceled, cut, faults, skipped, evicted, retried, unfair atomic.Int64
		byKind                                                                            [faultKinds]atomic.Int64
	}
	nextID atomic.Uint64
	took   time.Duration

	mu         sync.Mutex
	calls      map[uint64]*call
	refused    map[uint64]bool
	records    map[net.Addr]*connRecord
	byAddr     map[string]*connRecord
	pending    map[string][]fault // of connections whose dial has not returned
	recent     []fault
	violations []violation
	counts     [rules]int
}

// fault is one that was done.
type fault struct {
	at   time.Duration
	kind faultKind
	text string

	fresh bool // it struck a connection on which nothing had been answered
}

func (f fault) String() string { return fmt.Sprintf("%v %s", f.at, f.text) }

// connRecord is the book's page on a connection.
type connRecord struct {
	w        *world
	c        *client
	conn     *faultnet.Conn
	local    string
	addr     string
	at       time.Duration
	answers  int     // guarded by w.mu
	faults   []fault // guarded by w.mu
	closedAt time.Duration
}

func (r *connRecord) pair() string { return r.local + "->" + r.addr }

// pairOf is the pair of c, which is the server's end.
func pairOf(c net.Conn) string { return c.RemoteAddr().String() + "->" + c.LocalAddr().String() }

func (r *connRecord) touched() bool {
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	return len(r.faults) > 0
}

func (r *connRecord) text() string {
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	return fmt.Sprintf("%s->%s of %v, %d answers, faults %v", r.local, r.addr, r.at, r.answers, r.faults)
}

func newWorld(seed int64) *world {
	w := &world{
		seed: seed, began: time.Now(), until: -1, late: lateClose,
		over: make(chan struct{}), closed: make(chan struct{}),
		calls: make(map[uint64]*call), refused: make(map[uint64]bool),
		records: make(map[net.Addr]*connRecord), byAddr: make(map[string]*connRecord), pending: make(map[string][]fault),
	}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.stop = sync.OnceFunc(func() {
		close(w.over)
		if w.until >= 0 {
			w.cancel()
		}
	})
	w.origins = []*origin{
		newOrigin(w, "h2", true, true, false),
		newOrigin(w, "h2 too", true, true, false),
		newOrigin(w, "h2, few streams", true, true, true),
		newOrigin(w, "http/1.1, TLS", false, true, false),
		newOrigin(w, "http/1.1", false, false, false),
		newPeer(w),
	}
	return w
}

func (w *world) now() time.Duration { return time.Since(w.began).Round(10 * time.Microsecond) }

func (w *world) clientTLS() *tls.Config {
	leaf, err := x509.ParseCertificate(faultnet.ClientCert().Certificate[0])
	if err != nil {
		panic(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return &tls.Config{RootCAs: pool}
}

// note puts a fault on the record.
func (w *world) note(what string, kind faultKind, target string) fault {
	f := fault{at: w.now(), kind: kind, text: what + ": " + target}
	w.counters.faults.Add(1)
	w.counters.byKind[kind].Add(1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.recent) >= 400 {
		w.recent = append(w.recent[:0], w.recent[200:]...)
	}
	w.recent = append(w.recent, f)
	return f
}

// hit marks a connection, by its pair of addresses, as touched. (Two to different
// servers may have the same port here.)
func (w *world) hit(pair string, f fault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.byAddr[pair]; r != nil && r.closedAt == 0 {
		f.fresh = r.answers == 0
		r.faults = append(r.faults, f)
		return
	}
	f.fresh = true
	w.pending[pair] = append(w.pending[pair], f)
}

// answered reports whether something has been answered on a connection.
func (w *world) answered(pair string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.byAddr[pair]
	return r != nil && r.answers > 0
}

// ran is called by a server that begins to run a request.
func (w *world) ran(id uint64, o *origin, from string) *call {
	w.mu.Lock()
	cl := w.calls[id]
	w.mu.Unlock()
	if cl == nil {
		return nil
	}
	cl.mu.Lock()
	cl.runs++
	again := cl.runs > 1 && !cl.idempotent
	cl.addLocked("runs at %s, came from %s (run %d)", o.name, from, cl.runs)
	cl.mu.Unlock()
	if again {
		w.violate(ruleOnce, cl, nil, "a %s without an Idempotency-Key has run %d times", cl.method, cl.runs)
	}
	return cl
}

// refuse reports whether a request has not been refused before.
func (w *world) refuse(id uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refused[id] {
		return false
	}
	w.refused[id] = true
	return true
}

// A client is a transport under test, its connections and its workers.
type client struct {
	w        *world
	name     string
	index    int
	rt       http.RoundTripper
	deadconn *deadconn.Transport // nil: not ours
	reg      *deadconn.Registry
	owns     bool // NewTransport
	foreign  bool // plain Wrap

	mu   sync.Mutex
	live []*connRecord // guarded by mu
}

func (w *world) addClient(name string, make makeClient) {
	c := &client{w: w, name: name, index: len(w.clients)}
	make(c)
	w.clients = append(w.clients, c)
}

func (c *client) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	raw, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	fc := faultnet.NewConn(raw)
	w := c.w
	r := &connRecord{w: w, c: c, conn: fc, local: raw.LocalAddr().String(), addr: addr, at: w.now()}
	w.mu.Lock()
	r.faults = w.pending[r.pair()]
	delete(w.pending, r.pair())
	w.records[fc.LocalAddr()] = r
	w.byAddr[r.pair()] = r
	w.mu.Unlock()
	c.mu.Lock()
	c.live = append(c.live, r)
	c.mu.Unlock()
	return fc, nil
}

// openConns returns the connections that their user has not closed, and forgets
// the others after a while.
func (c *client) openConns() (open []*connRecord) {
	c.mu.Lock()
	defer c.mu.Unlock()
	rest := c.live[:0]
	for _, r := range c.live {
		if !r.conn.Closed() {
			open = append(open, r)
			rest = append(rest, r)
			continue
		}
		now := c.w.now()
		c.w.mu.Lock()
		if r.closedAt == 0 {
			r.closedAt = now
		}
		old := now-r.closedAt > 20*time.Second
		if old {
			delete(c.w.records, r.conn.LocalAddr())
			if c.w.byAddr[r.pair()] == r {
				delete(c.w.byAddr, r.local)
			}
		}
		c.w.mu.Unlock()
		if !old {
			rest = append(rest, r)
		}
	}
	clear(c.live[len(rest):])
	c.live = rest
	return open
}

func (c *client) anyConn() *connRecord {
	for _, r := range c.openConns() {
		if !r.touched() {
			return r
		}
	}
	return nil
}

func (c *client) hooks() *deadconn.Hooks {
	w := c.w
	return &deadconn.Hooks{
		ConnEvicted: func(info deadconn.ConnEvictedInfo) {
			w.counters.evicted.Add(1)
			w.mu.Lock()
			r := w.records[info.LocalAddr]
			w.mu.Unlock()
			switch {
			case r == nil:
				w.violate(ruleEviction, nil, nil, "%s: evicted a connection that nobody dialed: %+v", c.name, info)
			case !r.touched():
				w.violate(ruleEviction, nil, r, "%s: evicted a connection that no fault had touched: %s: %v", c.name, info.Cause, info.Err)
			}
		},
		RequestRetried: func(info deadconn.RequestRetriedInfo) {
			w.counters.retried.Add(1)
			if cl, _ := info.Context.Value(callKey{}).(*call); cl != nil {
				cl.add("sent again after %s, unsent %v, evicted %v: %v", info.Kind, info.Unsent, info.Evicted, info.Err)
			}
		},
	}
}

// run sends traffic and does the faults of plan for d.
func (w *world) run(d time.Duration, plan []plannedFault) {
	warmUp := make(chan struct{})
	var workers, helpers sync.WaitGroup
	for _, c := range w.clients {
		for i := range 11 {
			workers.Go(func() { c.work(i, i >= 8) })
		}
	}
	end := time.AfterFunc(d, w.stop)
	defer end.Stop()
	helpers.Go(func() { w.doPlan(plan) })
	helpers.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-tick.C:
				w.sweep(w.late)
			case <-warmUp:
				return
			}
		}
	})
	<-w.over
	w.took = time.Since(w.began)
	// The rest have had the time for a rescue: what still hangs may hang.
	rest := time.AfterFunc(10*time.Second, w.cancel)
	defer rest.Stop()
	workers.Wait()
	close(warmUp)
	helpers.Wait()
}

func (w *world) doPlan(plan []plannedFault) {
	for _, p := range plan {
		t := time.NewTimer(time.Until(w.began.Add(p.at)))
		select {
		case <-t.C:
			w.do(p)
		case <-w.over:
			t.Stop()
			return
		}
	}
}

var canBlackholeSocket = sync.OnceValue(func() bool {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return false
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		return false
	}
	defer c.Close()
	return faultnet.BlackholeSocket(c) == nil
})

// do does one fault, if something is there for it.
func (w *world) do(p plannedFault) {
	if p.kind.ofServer() {
		o := w.origins[p.pick%5]
		f := w.note(p.kind.String(), p.kind, o.name)
		switch p.kind {
		case shutdown:
			o.succeed(f)
		default:
			o.kill("", p.kind == resetConns, f)
		}
		return
	}
	c := w.clients[p.client]
	var targets []*connRecord
	for _, r := range c.openConns() {
		w.mu.Lock()
		ok := r.answers > 0 && len(r.faults) == 0
		w.mu.Unlock()
		o := w.origin(r.addr)
		if p.kind.needsHTTP2() && !o.http2 || o.peer != nil && (p.kind == serverFIN || p.kind == serverRST) {
			ok = false
		}
		if ok {
			targets = append(targets, r)
		}
	}
	if len(targets) == 0 || p.kind == kernelBlackhole && !canBlackholeSocket() {
		w.counters.skipped.Add(1)
		return
	}
	r := targets[p.pick%len(targets)]
	f := w.note(p.kind.String(), p.kind, fmt.Sprintf("%s: %s->%s (%s)", c.name, r.local, r.addr, w.origin(r.addr).name))
	if p.kind != serverFIN && p.kind != serverRST { // kill does it
		w.hit(r.pair(), f)
	}
	switch p.kind {
	case closeUnderneath:
		r.conn.CloseUnderneath()
	case writeClosed:
		r.conn.FailWrites(net.ErrClosed)
	case writeEPIPE:
		r.conn.FailWrites(syscall.EPIPE)
	case writeReset:
		r.conn.FailWrites(syscall.ECONNRESET)
	case linger0:
		r.conn.SetLinger0AndClose()
	case reset:
		r.conn.Reset()
	case blackhole:
		r.conn.Blackhole()
	case holdWrites:
		r.conn.HoldWrites()
	case kernelBlackhole:
		faultnet.BlackholeSocket(r.conn)
	case serverFIN, serverRST:
		w.origin(r.addr).kill(r.pair(), p.kind == serverRST, f)
	}
}

func (w *world) origin(addr string) *origin {
	for _, o := range w.origins {
		if strings.HasSuffix(o.url, addr) {
			return o
		}
	}
	return nil
}

// deadline is the requests'. What is silent is found dead within half of it.
const deadline = 15 * time.Second

// call is one request, and what was seen of it.
type call struct {
	c          *client
	o          *origin
	id         uint64
	method     string
	what       string
	idempotent bool
	replayable bool
	start      time.Duration
	done       atomic.Int64 // when RoundTrip had returned and the response was read; 0: not yet

	mu     sync.Mutex // taken before world.mu, never after
	gots   []got
	events []string
	runs   int
	bodies []*countedBody
}

type callKey struct{}

func (cl *call) add(format string, args ...any) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	cl.addLocked(format, args...)
}

func (cl *call) addLocked(format string, args ...any) {
	if len(cl.events) < 60 {
		cl.events = append(cl.events, fmt.Sprintf("%v ", cl.c.w.now())+fmt.Sprintf(format, args...))
	}
}

func (cl *call) history() string {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	var b strings.Builder
	fmt.Fprintf(&b, "  request %d of %q to %q at %v: %s %s\n", cl.id, cl.c.name, cl.o.name, cl.start, cl.method, cl.what)
	for _, e := range cl.events {
		fmt.Fprintf(&b, "    %s\n", e)
	}
	seen := map[*connRecord]bool{}
	for _, g := range cl.gots {
		if !seen[g.r] {
			seen[g.r] = true
			fmt.Fprintf(&b, "    connection %s\n", g.r.text())
		}
	}
	return b.String()
}

func (cl *call) trace() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) {
			r := cl.c.w.recordOf(info.Conn)
			if r == nil {
				return
			}
			cl.mu.Lock()
			defer cl.mu.Unlock()
			cl.gots = append(cl.gots, got{r, cl.c.w.now(), info.Reused})
			cl.addLocked("got %s, reused %v", r.local, info.Reused)
		},
		WroteHeaders: func() { cl.add("wrote header") },
		WroteRequest: func(info httptrace.WroteRequestInfo) { cl.add("wrote request, %v", info.Err) },
	}
}

func (w *world) recordOf(c net.Conn) *connRecord {
	for range 8 {
		if fc, ok := c.(*faultnet.Conn); ok {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.records[fc.LocalAddr()]
		}
		u, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = u.NetConn()
	}
	return nil
}

// countedBody is a request body that counts its closes.
type countedBody struct {
	stream
	cl     *call
	closes atomic.Int32
}

func (b *countedBody) Read(p []byte) (int, error) {
	if b.closes.Load() > 0 {
		return 0, http.ErrBodyReadAfterClose
	}
	return b.stream.Read(p)
}

func (b *countedBody) Close() error {
	if n := b.closes.Add(1); n > 1 {
		b.cl.c.w.violate(ruleBody, b.cl, nil, "a request body was closed %d times", n)
	}
	return nil
}

// unclosed returns how many of the bodies that cl gave out are not closed.
func (cl *call) unclosed() (n int) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	for _, b := range cl.bodies {
		if b.closes.Load() == 0 {
			n++
		}
	}
	return n
}

func (cl *call) newBody(size int) *countedBody {
	b := &countedBody{stream: stream{id: cl.id, left: size}, cl: cl}
	cl.mu.Lock()
	cl.bodies = append(cl.bodies, b)
	cl.mu.Unlock()
	return b
}

// work sends one request after another until the world is over.
func (c *client) work(n int, slow bool) {
	r := rand.New(rand.NewPCG(uint64(c.w.seed), uint64(c.index)<<8|uint64(n)))
	for {
		select {
		case <-c.w.over:
			return
		default:
		}
		c.one(r, slow)
		if !slow {
			time.Sleep(time.Duration(r.IntN(4000)) * time.Microsecond)
		}
	}
}

// one sends one request and checks what comes of it. What is sent depends on r
// alone.
func (c *client) one(r *rand.Rand, slow bool) {
	w := c.w
	cl := &call{c: c, o: w.origins[r.IntN(len(w.origins))], start: w.now(), id: w.nextID.Add(1)}
	peer := cl.o.peer != nil

	cl.method = [...]string{"GET", "GET", "GET", "HEAD", "DELETE", "PUT", "POST", "POST", "POST", "PATCH"}[r.IntN(10)]
	if peer && cl.method == "HEAD" {
		cl.method = "GET"
	}
	key := (cl.method == "POST" || cl.method == "PATCH") && r.IntN(3) == 0
	size := []int{0, 100, 4000, 40_000}[r.IntN(4)]
	length, getBody := 0, r.IntN(2) == 0
	switch cl.method {
	case "PUT", "POST", "PATCH":
		length = []int{0, 0, 100, 4000, 40_000}[r.IntN(5)]
	}
	mode, sleep := "", 0
	if slow && !peer {
		big := []int{300_000, 2_000_000}[r.IntN(2)]
		switch r.IntN(5) {
		case 0: // a slow server, now and then slower than it takes to be proven dead
			sleep = 200 + r.IntN(1500)
			if r.IntN(5) == 0 {
				sleep = 4000
			}
		case 1:
			mode, size, sleep = "stream", 5000, 2+r.IntN(60)
		case 2:
			size = big
		case 3:
			cl.method, length = []string{"PUT", "POST"}[r.IntN(2)], big
			key = key && cl.method == "POST"
		case 4: // an upload that the server holds back
			cl.method, length = []string{"PUT", "POST"}[r.IntN(2)], big
			key = key && cl.method == "POST"
			mode, sleep = "hold", 500+r.IntN(3000)
		}
	} else if cl.o.http2 && !peer && length > 0 && r.IntN(10) == 0 {
		mode = "early"
	}
	if peer {
		size, length = min(size, 4000), min(length, 4000)
	}
	if cl.method == "HEAD" || cl.method == "GET" || cl.method == "DELETE" {
		length = 0
	}
	cancelAfter := time.Duration(0)
	if r.IntN(12) == 0 {
		cancelAfter = time.Duration(r.ExpFloat64()*5000) * time.Microsecond
		if slow {
			cancelAfter *= 30
		}
	}
	unknown := r.IntN(4) == 0 // length
	cl.idempotent = cl.method != "POST" && cl.method != "PATCH" || key
	cl.replayable = length == 0 || getBody
	cl.what = fmt.Sprintf("body %d (GetBody %v, length unknown %v), key %v, response %d, mode %q, sleep %d ms, cancel %v",
		length, getBody, unknown, key, size, mode, sleep, cancelAfter)

	ctx, cancel := context.WithTimeout(context.WithValue(w.ctx, callKey{}, cl), deadline)
	defer cancel()
	if cancelAfter > 0 {
		t := time.AfterFunc(cancelAfter, cancel)
		defer t.Stop()
	}
	ctx = httptrace.WithClientTrace(ctx, cl.trace())
	u, _ := url.Parse(cl.o.url + "/soak")
	req := (&http.Request{Method: cl.method, URL: u, Host: u.Host, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{
		"X-Id": {strconv.FormatUint(cl.id, 10)}, "X-Size": {strconv.Itoa(size)}, "X-Sleep": {strconv.Itoa(sleep)},
		"X-Mode": {mode}, "X-Length": {strconv.Itoa(length)},
	}}).WithContext(ctx)
	if key {
		req.Header["Idempotency-Key"] = []string{req.Header.Get("X-Id")}
	}
	if length > 0 {
		req.Body = cl.newBody(length)
		req.ContentLength = int64(length)
		if unknown {
			req.ContentLength = -1
		}
		if getBody {
			req.GetBody = func() (io.ReadCloser, error) {
				cl.add("GetBody")
				return cl.newBody(length), nil
			}
		}
	}
	if cl.replayable {
		req.Header.Set("X-Replayable", "1")
	}
	before := *req

	w.mu.Lock()
	w.calls[cl.id] = cl
	w.mu.Unlock()
	w.counters.sent.Add(1)
	resp, err := c.rt.RoundTrip(req)
	cl.add("RoundTrip: %v", err)
	if req.Body != before.Body || req.Context() != before.Context() || req.Method != before.Method || req.URL != before.URL {
		w.violate(ruleAnswer, cl, nil, "the request was changed")
	}
	switch {
	case resp != nil && err != nil || resp == nil && err == nil:
		w.violate(ruleAnswer, cl, nil, "RoundTrip returned %v and %v", resp, err)
	case err == nil:
		c.read(ctx, cl, req, resp, size)
	case ctx.Err() == context.Canceled:
		w.counters.canceled.Add(1)
	default:
		w.counters.failed.Add(1)
		if r, why, broken := cl.judge(err); broken {
			w.violate(r, cl, nil, "%s failed, and %s: %v", cl.method, why, err)
		} else if cl.idempotent && cl.replayable {
			w.counters.unfair.Add(1)
			if os.Getenv("SOAK_EXCUSED") != "" {
				fmt.Printf("EXCUSED %v\n%s", err, cl.history())
			}
		}
	}
	cl.done.Store(int64(w.now()))
}

// read checks a response.
func (c *client) read(ctx context.Context, cl *call, req *http.Request, resp *http.Response, size int) {
	w := c.w
	defer resp.Body.Close()
	if cl.method == "HEAD" {
		size = 0
	}
	if resp.Request != req && c.deadconn != nil { // net/http returns its own
		w.violate(ruleAnswer, cl, nil, "Response.Request is not the caller's")
	}
	if got := resp.Header.Get("X-Id"); resp.StatusCode != 200 || got != strconv.FormatUint(cl.id, 10) {
		w.violate(ruleAnswer, cl, nil, "status %d, id %q", resp.StatusCode, got)
		return
	}
	n, err := verify(resp.Body, cl.id)
	cl.add("read %d bytes: %v", n, err)
	switch {
	case errors.Is(err, errWrongBytes) || n > size:
		w.violate(ruleAnswer, cl, nil, "the response is another's after %d bytes", n)
	case err == nil && n != size:
		w.violate(ruleAnswer, cl, nil, "the response has %d bytes of %d and no error", n, size)
	case err == nil:
		w.counters.succeeded.Add(1)
		cl.mu.Lock()
		if len(cl.gots) > 0 {
			r := cl.gots[len(cl.gots)-1].r
			w.mu.Lock()
			r.answers++
			w.mu.Unlock()
		}
		cl.mu.Unlock()
	case ctx.Err() == context.Canceled:
		w.counters.canceled.Add(1)
	default:
		w.counters.cut.Add(1)
		cl.mu.Lock()
		touched := len(cl.touchedLocked()) > 0
		cl.mu.Unlock()
		if !touched {
			w.violate(ruleUntouched, cl, nil, "its response ended after %d of %d bytes, and no fault had touched its connection: %v", n, size, err)
		}
	}
}

// sweep closes the book on requests that have been done for so long.
func (w *world) sweep(since time.Duration) {
	now := w.now()
	w.mu.Lock()
	var old []*call
	for id, cl := range w.calls {
		if done := cl.done.Load(); done != 0 && now-time.Duration(done) >= since {
			old = append(old, cl)
			delete(w.calls, id)
			delete(w.refused, id)
		}
	}
	w.mu.Unlock()
	for _, cl := range old {
		if n := cl.unclosed(); n > 0 {
			w.violate(ruleBody, cl, nil, "%d of its bodies were not closed in %v", n, w.late)
		}
	}
	for _, c := range w.clients {
		c.openConns()
	}
}

// settle waits until nothing is under way and checks what is left.
func (w *world) settle() {
	unclosed := func() bool {
		w.mu.Lock()
		all := slices.Collect(maps.Values(w.calls))
		w.mu.Unlock()
		for _, cl := range all {
			if cl.unclosed() > 0 {
				return true
			}
		}
		return false
	}
	for end := time.Now().Add(w.late); unclosed() && time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond)
	}
	w.sweep(0)
	for _, c := range w.clients {
		if c.reg == nil {
			continue
		}
		// What the Registry counts is what is open.
		n, open := 0, 0
		wait(10*time.Second, func() bool { n, open = c.reg.Len(), len(c.openConns()); return n == open })
		if n != open {
			w.violate(ruleSettled, nil, nil, "%s: Registry.Len is %d, %d connections are open", c.name, n, open)
		}
	}
	for _, c := range w.clients {
		if c.deadconn != nil {
			c.deadconn.CloseConnections()
		}
		if ci, ok := c.rt.(interface{ CloseIdleConnections() }); ok {
			ci.CloseIdleConnections()
		}
	}
	for _, c := range w.clients {
		open, n := 0, 0
		wait(10*time.Second, func() bool {
			if c.reg != nil {
				n = c.reg.Len()
			}
			open = len(c.openConns())
			return open == 0 && n == 0
		})
		if c.deadconn != nil && (open > 0 || n > 0) {
			var texts []string
			for _, r := range c.openConns() {
				texts = append(texts, r.text())
			}
			w.violate(ruleSettled, nil, nil, "%s: after CloseConnections Registry.Len is %d, %d connections are open: %s", c.name, n, open, strings.Join(texts, "; "))
		}
	}
}

func wait(d time.Duration, cond func() bool) {
	for end := time.Now().Add(d); !cond() && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
	}
}

func (w *world) close() {
	close(w.closed)
	for _, c := range w.clients {
		for _, r := range c.openConns() {
			r.conn.Close()
		}
	}
	for _, o := range w.origins {
		o.close()
	}
}

func (w *world) report(t *testing.T) {
	t.Helper()
	k := &w.counters
	t.Logf("seed %d: %v: %d requests (%.0f/s), %d succeeded, %d canceled, %d failed (%d of them idempotent that met two faults), %d responses cut; %d faults (%d more had no target); %d sent again, %d evictions",
		w.seed, w.took.Round(time.Millisecond), k.sent.Load(), float64(k.sent.Load())/w.took.Seconds(), k.succeeded.Load(), k.canceled.Load(), k.failed.Load(), k.unfair.Load(), k.cut.Load(), k.faults.Load(), k.skipped.Load(), k.retried.Load(), k.evicted.Load())
	var b strings.Builder
	for i := range k.byKind {
		fmt.Fprintf(&b, "%v %d, ", faultKind(i), k.byKind[i].Load())
	}
	t.Log("faults: " + strings.TrimSuffix(b.String(), ", "))
	for _, c := range w.clients {
		if c.deadconn != nil {
			t.Logf("%s: %+v", c.name, c.deadconn.Stats())
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for r, n := range w.counts {
		if n > 0 {
			t.Errorf("seed %d: %q was violated %d times", w.seed, rule(r), n)
		}
	}
	for _, v := range w.violations {
		t.Error(v.text)
	}
}
