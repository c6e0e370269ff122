package soak

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// An origin is a server. Its listener lives as long as the world, so that a new
// connection can always be had; the http.Servers behind it come and go.
type origin struct {
	w     *world
	name  string
	url   string
	http2 bool
	tls   bool
	few   bool // streams on one connection
	ln    net.Listener
	peer  *faultnet.Peer // instead of ln

	mu    sync.Mutex
	gen   *generation
	conns map[*serverConn]struct{}
	wg    sync.WaitGroup
}

// generation is one http.Server, and its listener.
type generation struct {
	o       *origin
	srv     *http.Server
	ch      chan net.Conn
	done    chan struct{}
	once    sync.Once
	closing *fault // guarded by o.mu
}

func (g *generation) Accept() (net.Conn, error) {
	select {
	case c := <-g.ch:
		return c, nil
	case <-g.done:
		return nil, net.ErrClosed
	}
}

func (g *generation) Close() error   { g.once.Do(func() { close(g.done) }); return nil }
func (g *generation) Addr() net.Addr { return g.o.ln.Addr() }

// serverConn is the server's end of a connection.
type serverConn struct {
	*net.TCPConn
	o   *origin
	gen *generation // guarded by o.mu
}

func (c *serverConn) Close() error {
	c.o.mu.Lock()
	delete(c.o.conns, c)
	c.o.mu.Unlock()
	return c.TCPConn.Close()
}

func newOrigin(w *world, name string, http2, tls, few bool) *origin {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	o := &origin{w: w, name: name, http2: http2, tls: tls, few: few, ln: ln, conns: make(map[*serverConn]struct{})}
	o.url = "http://" + ln.Addr().String()
	if tls {
		o.url = "https://" + ln.Addr().String()
	}
	o.gen = o.newGeneration()
	o.wg.Go(o.accept)
	return o
}

func (o *origin) newGeneration() *generation {
	g := &generation{o: o, ch: make(chan net.Conn), done: make(chan struct{})}
	p := new(http.Protocols)
	p.SetHTTP1(!o.http2)
	p.SetHTTP2(o.http2)
	g.srv = &http.Server{
		Handler:   http.HandlerFunc(o.serve),
		Protocols: p,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{faultnet.ClientCert()}},
		ErrorLog:  log.New(io.Discard, "", 0),
	}
	if o.few {
		g.srv.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 4}
	}
	o.wg.Go(func() {
		if o.tls {
			g.srv.ServeTLS(g, "", "")
			return
		}
		g.srv.Serve(g)
	})
	return g
}

func (o *origin) accept() {
	for {
		raw, err := o.ln.Accept()
		if err != nil {
			return
		}
		c := &serverConn{TCPConn: raw.(*net.TCPConn), o: o}
		for handed := false; !handed; {
			o.mu.Lock()
			g := o.gen
			c.gen = g
			o.conns[c] = struct{}{}
			o.mu.Unlock()
			select {
			case g.ch <- c:
				handed = true
			case <-g.done:
			}
			o.mu.Lock()
			late := g.closing
			o.mu.Unlock()
			if handed && late != nil { // it may have come after the marking
				o.w.hit(pairOf(c), *late)
			}
		}
	}
}

// succeed replaces the http.Server, the old one finishing what it has.
func (o *origin) succeed(f fault) {
	next := o.newGeneration()
	o.mu.Lock()
	old := o.gen
	o.gen = next
	old.closing = &f
	for c := range o.conns {
		if c.gen == old {
			o.w.hit(pairOf(c), f)
		}
	}
	o.mu.Unlock()
	o.wg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		old.srv.Shutdown(ctx)
		old.srv.Close()
	})
}

// kill closes connections that have answered a request, all or that pair. One
// that dies before counts as a refusal, and nothing is to be sent again.
func (o *origin) kill(pair string, rst bool, f fault) (n int) {
	o.mu.Lock()
	var all []*serverConn
	for c := range o.conns {
		if a := pairOf(c); o.w.answered(a) && (pair == "" || pair == a) {
			o.w.hit(a, f)
			all = append(all, c)
		}
	}
	o.mu.Unlock()
	for _, c := range all {
		if rst {
			c.SetLinger(0)
		}
		c.TCPConn.Close()
	}
	return len(all)
}

func (o *origin) close() {
	if o.peer != nil {
		o.peer.Close()
		return
	}
	o.ln.Close()
	o.mu.Lock()
	g := o.gen
	o.mu.Unlock()
	g.srv.Close()
	o.wg.Wait()
}

// serve does what the request's header asks for.
func (o *origin) serve(rw http.ResponseWriter, req *http.Request) {
	h := req.Header
	id, _ := strconv.ParseUint(h.Get("X-Id"), 10, 64)
	size, _ := strconv.Atoi(h.Get("X-Size"))
	sleep, _ := strconv.Atoi(h.Get("X-Sleep"))
	length, _ := strconv.Atoi(h.Get("X-Length"))
	cl := o.w.ran(id, o, req.RemoteAddr)
	nap := func(d time.Duration) bool {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
			return true
		case <-req.Context().Done():
			return false
		case <-o.w.closed:
			return false
		}
	}
	if h.Get("X-Mode") == "hold" && !nap(time.Duration(sleep)*time.Millisecond) {
		return
	}
	if h.Get("X-Mode") != "early" {
		switch n, err := verify(req.Body, id); {
		case errors.Is(err, errWrongBytes) || err == nil && n != length:
			o.w.violate(ruleAnswer, cl, nil, "the server got a body of %d bytes (%v), not its own %d", n, err, length)
		case err != nil:
			return // the connection is gone, or the caller
		}
	}
	if h.Get("X-Mode") == "" && sleep > 0 && !nap(time.Duration(sleep)*time.Millisecond) {
		return
	}
	rw.Header().Set("X-Id", h.Get("X-Id"))
	if h.Get("X-Mode") != "stream" {
		rw.Header().Set("Content-Length", strconv.Itoa(size))
	}
	rw.WriteHeader(200)
	if req.Method == "HEAD" {
		return
	}
	src := &stream{id: id, left: size}
	if h.Get("X-Mode") != "stream" {
		io.Copy(rw, src)
		return
	}
	buf := make([]byte, max(1, size/20))
	for src.left > 0 {
		n, _ := src.Read(buf)
		if _, err := rw.Write(buf[:n]); err != nil || http.NewResponseController(rw).Flush() != nil {
			return
		}
		if !nap(time.Duration(sleep) * time.Millisecond) {
			panic(http.ErrAbortHandler)
		}
	}
}

// newPeer is an origin of scripted frames: refused streams, and GOAWAYs.
func newPeer(w *world) *origin {
	o := &origin{w: w, name: "peer", http2: true, tls: true}
	p, err := faultnet.NewPeer(o.script)
	if err != nil {
		panic(err)
	}
	o.peer, o.url = p, p.URL()
	return o
}

func (o *origin) script(pc *faultnet.PeerConn) {
	r := rand.New(rand.NewPCG(uint64(o.w.seed), uint64(pc.N)))
	addr := pairOf(pc.Conn)
	for n := 0; ; n++ {
		req, err := pc.ReadRequest()
		if err != nil {
			return
		}
		id, _ := strconv.ParseUint(req.Header.Get("X-Id"), 10, 64)
		size, _ := strconv.Atoi(req.Header.Get("X-Size"))
		length, _ := strconv.Atoi(req.Header.Get("X-Length"))
		roll := r.IntN(200)
		if n == 0 {
			roll = 199 // only what is in a pool may break
		}
		if roll < 10 && (req.EndStream || req.Header.Get("X-Replayable") != "") && o.w.refuse(id) {
			pc.Reset(req.StreamID, http2.ErrCodeRefusedStream)
			continue
		}
		if roll == 10 { // graceful, and this one unprocessed
			o.w.hit(addr, o.w.note("GOAWAY below it", shutdown, addr))
			pc.GoAway(req.StreamID-2, http2.ErrCodeNo, "")
			return
		}
		cl := o.w.ran(id, o, addr)
		if !req.EndStream {
			body, err := pc.ReadBody(req.StreamID)
			if err != nil {
				continue
			}
			if n, err := verify(io.NopCloser(&readString{body}), id); err != nil || n != length {
				o.w.violate(ruleAnswer, cl, nil, "the peer got a body of %d bytes, not its own %d", n, length)
			}
		}
		if roll == 11 { // processed, and never answered
			o.w.hit(addr, o.w.note("GOAWAY and closed", shutdown, addr))
			pc.GoAway(req.StreamID, http2.ErrCodeInternal, "")
			return
		}
		if roll == 12 {
			o.w.hit(addr, o.w.note("GOAWAY above it", shutdown, addr))
			pc.GoAway(req.StreamID, http2.ErrCodeNo, "")
		}
		body, _ := io.ReadAll(&stream{id: id, left: size})
		pc.RespondHeaders(req.StreamID, 200, hpack.HeaderField{Name: "x-id", Value: req.Header.Get("X-Id")})
		pc.Data(req.StreamID, string(body), true)
		if roll == 12 {
			return
		}
	}
}

type readString struct{ s string }

func (r *readString) Read(p []byte) (int, error) {
	if r.s == "" {
		return 0, io.EOF
	}
	n := copy(p, r.s)
	r.s = r.s[n:]
	return n, nil
}

// stream gives bytes that only this id has, at each position.
type stream struct {
	id   uint64
	at   int
	left int
}

func block(id uint64, n int) (b [8]byte) {
	x := id*0x9e3779b97f4a7c15 + uint64(n)*0xbf58476d1ce4e5b9
	x ^= x >> 31
	x *= 0x94d049bb133111eb
	binary.LittleEndian.PutUint64(b[:], x^x>>29)
	return b
}

func (s *stream) Read(p []byte) (n int, err error) {
	if s.left == 0 {
		return 0, io.EOF
	}
	p = p[:min(len(p), s.left)]
	for n < len(p) {
		b := block(s.id, s.at/8)
		k := copy(p[n:], b[s.at%8:])
		n += k
		s.at += k
	}
	s.left -= n
	return n, nil
}

var errWrongBytes = errors.New("not the bytes of this id")

// verify reads r to its end and compares.
func verify(r io.Reader, id uint64) (n int, err error) {
	buf, want := make([]byte, 16<<10), make([]byte, 16<<10)
	s := &stream{id: id, left: 1 << 40}
	for {
		k, err := r.Read(buf)
		s.Read(want[:k])
		if string(buf[:k]) != string(want[:k]) {
			return n, errWrongBytes
		}
		n += k
		switch {
		case err == io.EOF:
			return n, nil
		case err != nil:
			return n, err
		}
	}
}
