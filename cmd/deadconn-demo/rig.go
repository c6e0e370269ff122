package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
)

type conn = faultnet.Conn

// A way is one way to send requests.
type way struct {
	name string
	new  func(addr string, base *http.Transport) http.RoundTripper // addr: the server's
}

var ways = []way{
	{plain, func(_ string, b *http.Transport) http.RoundTripper { return b }},
	{owned, func(_ string, b *http.Transport) http.RoundTripper {
		return deadconn.Options{Base: b, Health: health}.NewTransport()
	}},
	{wrapped, func(_ string, b *http.Transport) http.RoundTripper { return deadconn.Wrap(b) }},
}

// A rig is a server, a client, and the connections between them. It keeps the
// record of what becomes of the requests.
type rig struct {
	server *faultnet.Server
	dialer *faultnet.Dialer
	client *http.Client

	hold sync.WaitGroup // requests under way

	mu      sync.Mutex
	gate    chan struct{}  // requests to /hold wait for it
	arrived chan struct{}  // gets one for each of them
	runs    map[string]int // how often the server ran each POST
	posts   int
	rec     record
}

// A record is what became of the requests of one client in one scenario.
type record struct {
	requests, failed int
	breaks           int
	twice            int   // POSTs that the server ran twice
	first            error // the first failure

	broken    time.Time     // the last break
	back      bool          // requests got through after it
	recovered time.Duration // the longest it took until they did
}

func newRig(s scenario, w way) (*rig, error) {
	r := &rig{dialer: new(faultnet.Dialer), runs: make(map[string]int)}
	r.server = faultnet.NewServer(http.HandlerFunc(r.serve))
	timeout := s.timeout
	if timeout == 0 {
		timeout = longTimeout
	}
	r.client = &http.Client{
		Timeout: timeout,
		Transport: w.new(r.server.Addr(), &http.Transport{
			DialContext:       r.dialer.DialContext,
			TLSClientConfig:   r.server.ClientTLS(),
			ForceAttemptHTTP2: true,
		}),
	}
	// One request beforehand, so that there is a connection to break.
	resp, err := r.client.Get(r.server.URL)
	if err != nil {
		r.close()
		return nil, fmt.Errorf("the first request, before anything was broken: %w", err)
	}
	defer resp.Body.Close()
	if resp.ProtoMajor != 2 {
		r.close()
		return nil, fmt.Errorf("the client speaks %s, not HTTP/2", resp.Proto)
	}
	return r, nil
}

// counters returns what deadconn has counted so far; nil: it is not used.
func (r *rig) counters() *counters {
	if t, ok := r.client.Transport.(*deadconn.Transport); ok {
		return count(t.Stats())
	}
	return nil
}

func (r *rig) close() {
	r.client.CloseIdleConnections()
	r.dialer.CloseAll()
	r.server.Close()
}

func (r *rig) serve(w http.ResponseWriter, req *http.Request) {
	switch req.URL.Path {
	case "/hold":
		r.mu.Lock()
		gate, arrived := r.gate, r.arrived
		r.mu.Unlock()
		select {
		case arrived <- struct{}{}:
		default: // sent again: it has been counted
		}
		select {
		case <-gate:
		case <-req.Context().Done():
		}
	case "/slow":
		d, _ := time.ParseDuration(req.URL.RawQuery)
		select {
		case <-time.After(d):
		case <-req.Context().Done():
		}
	case "/post":
		r.mu.Lock()
		r.runs[req.URL.RawQuery]++
		if r.runs[req.URL.RawQuery] == 2 {
			r.rec.twice++
		}
		r.mu.Unlock()
	}
	io.WriteString(w, "ok")
}

// kill breaks the connection in use.
func (r *rig) kill(how func(*conn)) {
	conns := r.dialer.Conns()
	for i := len(conns) - 1; i >= 0; i-- {
		if !conns[i].Closed() {
			r.broke()
			how(conns[i])
			return
		}
	}
}

// reset makes the server's kernel send an RST.
func (r *rig) reset() {
	r.broke()
	r.server.ResetConns()
}

func (r *rig) broke() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.breaks++
	r.rec.broken = time.Now()
	r.rec.back = false
}

// get sends n GETs, one after the other; post POSTs.
func (r *rig) get(n int) {
	for range n {
		r.send("GET", "/")
	}
}

func (r *rig) post(n int) {
	for range n {
		r.posts++
		r.send("POST", fmt.Sprint("/post?", r.posts))
	}
}

// start sends n GETs at the same time and does not wait for them.
func (r *rig) start(n int) {
	for range n {
		r.hold.Go(func() { r.send("GET", "/") })
	}
}

// steady sends a GET every 0.1 s, n of them, and waits for them all.
func (r *rig) steady(n int) {
	for range n {
		r.start(1)
		time.Sleep(100 * time.Millisecond)
	}
	r.hold.Wait()
}

// slow sends n GETs at the same time that the server takes its time for.
func (r *rig) slow(n int, d time.Duration) {
	for range n {
		r.hold.Go(func() { r.send("GET", "/slow?"+d.String()) })
	}
	r.hold.Wait()
}

// inFlight sends n GETs, does what is to be done when the server has them all
// and has answered none, and waits for them all.
func (r *rig) inFlight(n int, do func()) {
	gate, arrived := make(chan struct{}), make(chan struct{}, n)
	r.mu.Lock()
	r.gate, r.arrived = gate, arrived
	r.mu.Unlock()
	for range n {
		r.hold.Go(func() { r.send("GET", "/hold") })
	}
	late := time.After(longTimeout)
wait:
	for range n {
		select {
		case <-arrived:
		case <-late: // the requests' own failures tell
			break wait
		}
	}
	do()
	close(gate)
	r.hold.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rec.back { // for a burst, being back means having answered all of it
		r.rec.recovered = max(r.rec.recovered, time.Since(r.rec.broken))
	}
}

// send sends one request and records what becomes of it.
func (r *rig) send(method, path string) {
	err := r.roundTrip(method, path)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.requests++
	if err != nil {
		r.rec.failed++
		if r.rec.first == nil {
			r.rec.first = err
		}
		return
	}
	if r.rec.breaks > 0 && !r.rec.back {
		r.rec.back = true
		r.rec.recovered = max(r.rec.recovered, time.Since(r.rec.broken))
	}
}

func (r *rig) roundTrip(method, path string) error {
	var body io.Reader
	if method == "POST" {
		body = strings.NewReader("an order")
	}
	req, err := http.NewRequestWithContext(context.Background(), method, r.server.URL+path, body)
	if err != nil {
		return err
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}
