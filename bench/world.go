package bench

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// The kinds of request.
const (
	get    = "GET"
	put    = "PUT"   // idempotent, GetBody
	post   = "POST"  // GetBody
	stream = "POST*" // a body without GetBody
)

var kinds = []string{get, put, post, stream}

// A Request is the record of one.
type Request struct {
	Kind    string
	At      time.Duration // its start, since the first fault
	Took    time.Duration
	Err     string // empty: answered, body whole
	Victim  bool   // in flight at a fault, or the first one after it
	Healthy bool   // no fault touched its connection
	Ran     int    // how often the server acted on it; POSTs only
	id      string
	wait    time.Duration
}

func idempotent(kind string) bool { return kind == get || kind == put }

// A world is one cell while it runs: a contestant, a server, the record.
type world struct {
	client *http.Client
	rt     http.RoundTripper
	dialer *faultnet.Dialer
	srv    *server
	target atomic.Pointer[string] // where new connections go

	deadline time.Duration

	mu       sync.Mutex
	requests []*Request
	flying   map[*Request]bool
	start    time.Time
	fault    time.Time // the newest
	first    time.Time // the first
	dials0   int       // at the first fault
	pending  bool      // no success since the newest fault
	fresh    bool      // no request since the newest fault
	firstOK  []time.Duration
	executed map[string]int // POSTs by id
	nextID   atomic.Int64
	cleanups []func()
}

func serverTLS() *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{faultnet.ClientCert()}} // it is the servers' too
}

func clientTLS() *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(faultnet.ClientCert().Leaf)
	return &tls.Config{RootCAs: pool, ServerName: "example.test"}
}

// newWorld makes a world whose server listens on l, nil for loopback, and is
// reached by dial, nil for net.Dialer's.
func newWorld(c Contestant, l net.Listener, dial func(context.Context, string, string) (net.Conn, error)) (*world, error) {
	w := &world{
		deadline: 10 * time.Second,
		flying:   make(map[*Request]bool),
		executed: make(map[string]int),
		start:    time.Now(),
	}
	if l == nil {
		var err error
		if l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			return nil, err
		}
	}
	if dial == nil {
		dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	}
	w.srv = serve(l, w)
	w.to(l.Addr().String())
	w.dialer = &faultnet.Dialer{Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return dial(ctx, network, *w.target.Load())
	}}
	w.rt = c.New(Env{Dial: w.dialer.DialContext, TLS: clientTLS()})
	w.client = &http.Client{Transport: w.rt}
	return w, nil
}

func (w *world) to(addr string) { w.target.Store(&addr) }

// cleanup registers f for close, the newest first.
func (w *world) cleanup(f func()) { w.cleanups = append(w.cleanups, f) }

func (w *world) close() {
	w.dialer.CloseAll()
	w.srv.close()
	for _, f := range slices.Backward(w.cleanups) {
		f()
	}
	w.client.CloseIdleConnections()
}

// open returns the client's open connections.
func (w *world) open() []*faultnet.Conn {
	return slices.DeleteFunc(w.dialer.Conns(), func(c *faultnet.Conn) bool { return c == nil || c.Closed() })
}

// strike notes a fault and makes it.
func (w *world) strike(f func()) {
	w.mu.Lock()
	w.fault = time.Now()
	if w.first.IsZero() {
		w.first = w.fault
		w.dials0 = w.dialer.Dials()
	}
	if w.pending {
		w.firstOK = append(w.firstOK, -1)
	}
	w.pending, w.fresh = true, true
	for r := range w.flying {
		r.Victim = true
	}
	w.mu.Unlock()
	f()
}

// ask says what a request is like.
type ask struct {
	kind    string
	host    string
	query   string
	wait    time.Duration // how long the server takes
	healthy bool
	victim  bool             // it meets the fault, whichever request came first
	body    func() io.Reader // nil: a few bytes
}

// do sends a request and waits for its end.
func (w *world) do(a ask) *Request {
	r := &Request{Kind: a.kind, Healthy: a.healthy, Victim: a.victim, wait: a.wait}
	id := strconv.FormatInt(w.nextID.Add(1), 10)
	r.id = id
	ctx, cancel := context.WithTimeout(context.Background(), w.deadline)
	defer cancel()
	host := a.host
	if host == "" {
		host = "example.test"
	}
	req, err := http.NewRequestWithContext(ctx, a.kind[:min(4, len(a.kind))], "https://"+host+"/?wait="+a.wait.String()+a.query, nil)
	if err != nil {
		panic(err)
	}
	req.Header.Set("X-Id", id)
	if a.kind != get {
		body := a.body
		if body == nil {
			body = func() io.Reader { return bytes.NewReader([]byte("a body of a few bytes")) }
		}
		req.Body = io.NopCloser(body())
		req.ContentLength = -1
		if a.body == nil {
			req.ContentLength = 21
		}
		if a.kind != stream {
			req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(body()), nil }
		}
	}

	w.mu.Lock()
	start := time.Now()
	if w.fresh && !a.healthy {
		r.Victim, w.fresh = true, false
	}
	w.requests = append(w.requests, r)
	w.flying[r] = true
	w.mu.Unlock()

	err = w.exchange(req)

	w.mu.Lock()
	defer w.mu.Unlock()
	end := time.Now()
	r.Took = end.Sub(start)
	delete(w.flying, r)
	if err != nil {
		r.Err = err.Error()
	} else if w.pending && !a.healthy {
		w.firstOK = append(w.firstOK, end.Sub(w.fault))
		w.pending = false
	}
	r.At = start.Sub(w.start)
	return r
}

func (w *world) exchange(req *http.Request) error {
	resp, err := w.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// load sends a request every interval for d, whatever becomes of the others,
// and waits for all of them.
func (w *world) load(d, interval time.Duration, next func(i int) ask) {
	var wg sync.WaitGroup
	tick := time.NewTicker(interval)
	defer tick.Stop()
	end := time.Now().Add(d)
	for i := 0; time.Now().Before(end); i++ {
		wg.Go(func() { w.do(next(i)) })
		<-tick.C
	}
	wg.Wait()
}

// ran notes that the server has acted on a request.
func (w *world) ran(method, id string) {
	if method != http.MethodPost {
		return
	}
	w.mu.Lock()
	w.executed[id]++
	w.mu.Unlock()
}

// A server is a net/http server that a world's requests go to.
type server struct {
	srv  *http.Server
	l    net.Listener
	mu   sync.Mutex
	open map[net.Conn]bool
}

func serve(l net.Listener, w *world) *server {
	s := &server{l: l, open: make(map[net.Conn]bool)}
	s.srv = &http.Server{
		TLSConfig: serverTLS(),
		ErrorLog:  log.New(io.Discard, "", 0), // broken connections are the point here
		Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			q := r.URL.Query()
			wait, _ := time.ParseDuration(q.Get("wait"))
			w.ran(r.Method, r.Header.Get("X-Id"))
			if q.Has("early") { // a long poll: the header now, the rest later
				rw.WriteHeader(http.StatusOK)
				http.NewResponseController(rw).Flush()
			}
			if !q.Has("held") {
				io.Copy(io.Discard, r.Body)
			}
			if wait > 0 {
				select {
				case <-time.After(wait):
				case <-r.Context().Done():
					return
				}
			}
			if q.Has("held") { // an upload that is not read for a while
				io.Copy(io.Discard, r.Body)
			}
			fmt.Fprintln(rw, "done")
		}),
	}
	go s.srv.ServeTLS(trackingListener{l, s}, "", "")
	return s
}

func (s *server) close() { s.srv.Close() }

// conns takes the open connections.
func (s *server) conns() []net.Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []net.Conn
	for c := range s.open {
		all = append(all, c)
	}
	clear(s.open)
	return all
}

// kill ends every connection: a FIN and nothing before it.
func (s *server) kill() {
	for _, c := range s.conns() {
		c.Close()
	}
}

// reset ends every connection by an RST.
func (s *server) reset() {
	for _, c := range s.conns() {
		if t, ok := c.(*net.TCPConn); ok {
			t.SetLinger(0)
		}
		c.Close()
	}
}

type trackingListener struct {
	net.Listener
	s *server
}

func (l trackingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.s.mu.Lock()
	l.s.open[c] = true
	l.s.mu.Unlock()
	return trackedConn{c, l.s}, nil
}

type trackedConn struct {
	net.Conn
	s *server
}

func (c trackedConn) Close() error {
	c.s.mu.Lock()
	delete(c.s.open, c.Conn)
	c.s.mu.Unlock()
	return c.Conn.Close()
}
