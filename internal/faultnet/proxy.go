package faultnet

import (
	"cmp"
	"context"
	"io"
	"net"
	"sync"
	"syscall"
	"time"
)

// A Proxy is a TCP proxy on loopback in front of a target.
//
// Pass, Discard and Stall act on the connections that are live at the time of
// the call; those accepted later pass, unless [Proxy.AllConns] was asked for.
// Delay acts on all connections.
type Proxy struct {
	target     string
	ln         net.Listener
	bufferSize int

	ctx    context.Context // done when Close is called
	cancel context.CancelFunc
	wg     sync.WaitGroup // accept loop and one for each link

	mu       sync.Mutex
	accepted int
	live     map[*link]struct{}
	all      bool
	mode     mode // the latest one, for new connections if all
	delay    time.Duration
}

// A ProxyOption changes what [NewProxy] makes.
type ProxyOption func(*Proxy)

// SmallBuffers gives the sockets of the proxy buffers of a few KiB, so that
// after Stall a sender's window shuts soon.
func SmallBuffers() ProxyOption {
	return func(p *Proxy) { p.bufferSize = 4 << 10 }
}

// NewProxy starts a proxy in front of target, a host:port.
func NewProxy(target string, opts ...ProxyOption) (*Proxy, error) {
	p := &Proxy{target: target, live: make(map[*link]struct{})}
	for _, o := range opts {
		o(p)
	}
	var lc net.ListenConfig
	if p.bufferSize > 0 {
		// Set on the listener, before any handshake, because a window that was
		// announced once is not taken back.
		lc.Control = func(_, _ string, raw syscall.RawConn) error {
			return setBuffers(raw, p.bufferSize)
		}
	}
	ln, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p.ln = ln
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.wg.Add(1)
	go p.accept()
	return p, nil
}

// Addr returns the address of the proxy, as host:port.
func (p *Proxy) Addr() string { return p.ln.Addr().String() }

// Conns returns how many connections were accepted so far.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// Live returns how many connections are being proxied now.
func (p *Proxy) Live() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.live)
}

// Close stops listening, closes all connections and waits for them to end.
func (p *Proxy) Close() error {
	p.cancel()
	err := p.ln.Close()
	for _, l := range p.links() {
		l.end(net.Conn.Close)
	}
	p.wg.Wait()
	return err
}

// Pass makes bytes go through again. After Stall nothing is missing; after
// Discard there is a gap.
func (p *Proxy) Pass() { p.setMode(pass) }

// Discard keeps reading on both sides and drops everything, so that the kernel
// here acknowledges what never arrives. The end of one side is kept from the
// other.
func (p *Proxy) Discard() { p.setMode(discard) }

// Stall stops reading on both sides, so that the senders' windows shut. What
// was read already waits for Pass.
func (p *Proxy) Stall() { p.setMode(stall) }

// AllConns says whether the mode set last also applies to the connections
// accepted from now on.
func (p *Proxy) AllConns(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = on
}

// Delay makes everything that is read from now on arrive later by d, each way,
// on all connections. It is a latency: it does not bound the throughput.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// FIN half-closes all live connections towards the client, as if the target
// had ended its side. What the target still sends is dropped; what the client
// sends still arrives.
func (p *Proxy) FIN() {
	for _, l := range p.links() {
		l.finish()
	}
}

// RST resets all live connections (SO_LINGER 0), towards both sides.
func (p *Proxy) RST() {
	for _, l := range p.links() {
		l.end(closeWithRST)
	}
}

func (p *Proxy) setMode(m mode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode = m
	for l := range p.live {
		l.setMode(m)
	}
}

func (p *Proxy) links() []*link {
	p.mu.Lock()
	defer p.mu.Unlock()
	links := make([]*link, 0, len(p.live))
	for l := range p.live {
		links = append(links, l)
	}
	return links
}

func (p *Proxy) latency() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.delay
}

func (p *Proxy) accept() {
	defer p.wg.Done()
	for {
		c, err := p.ln.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		p.accepted++
		p.mu.Unlock()
		p.wg.Add(1)
		go func() {
			defer p.wg.Done()
			p.serve(c.(*net.TCPConn))
		}()
	}
}

func (p *Proxy) serve(client *net.TCPConn) {
	raw, err := new(net.Dialer).DialContext(p.ctx, "tcp", p.target)
	if err != nil {
		closeWithRST(client) // as a target that refuses
		return
	}
	server := raw.(*net.TCPConn)
	if p.bufferSize > 0 {
		for _, c := range []*net.TCPConn{client, server} {
			c.SetReadBuffer(p.bufferSize)
			c.SetWriteBuffer(p.bufferSize)
		}
	}
	l := &link{
		client:  client,
		server:  server,
		latency: p.latency,
		chunk:   cmp.Or(p.bufferSize, 32<<10),
		over:    make(chan struct{}),
		changed: make(chan struct{}),
	}

	p.mu.Lock()
	if p.all {
		l.mode = p.mode
	}
	p.live[l] = struct{}{}
	p.mu.Unlock()
	if p.ctx.Err() != nil {
		// Close may have looked for its links before this one was in.
		l.end(net.Conn.Close)
	}

	l.run()

	p.mu.Lock()
	delete(p.live, l)
	p.mu.Unlock()
}

type mode uint8

const (
	pass mode = iota
	discard
	stall
)

// A link is one proxied connection.
type link struct {
	client, server *net.TCPConn
	latency        func() time.Duration
	chunk          int // the most to read at once

	over    chan struct{} // closed by end
	endOnce sync.Once

	mu       sync.Mutex
	mode     mode
	changed  chan struct{} // closed and replaced whenever mode changes
	finished bool          // the client was sent a FIN: nothing can follow
}

// A piece is what one Read gave, on its way to the other side.
type piece struct {
	data []byte
	err  error // ends the direction: io.EOF or worse
	due  time.Time
}

// run copies in both directions until both have ended or end is called.
func (l *link) run() {
	var wg sync.WaitGroup
	for _, d := range []struct{ src, dst *net.TCPConn }{{l.client, l.server}, {l.server, l.client}} {
		// Behind a latency many pieces are on their way at once.
		way := make(chan piece, 64)
		wg.Go(func() { l.take(d.src, way) })
		wg.Go(func() { l.deliver(way, d.dst) })
	}
	wg.Wait()
	l.end(net.Conn.Close)
}

// take reads from src until it ends.
func (l *link) take(src net.Conn, way chan<- piece) {
	defer close(way)
	buf := make([]byte, l.chunk)
	for {
		n, err := src.Read(buf)
		m, ok := l.await()
		if !ok {
			return
		}
		if m == pass {
			p := piece{append([]byte(nil), buf[:n]...), err, time.Now().Add(l.latency())}
			select {
			case way <- p:
			case <-l.over:
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// deliver writes to dst what comes along the way.
func (l *link) deliver(way <-chan piece, dst *net.TCPConn) {
	for p := range way {
		if !l.sleepUntil(p.due) {
			continue // over: only wait for take to end
		}
		m, ok := l.await()
		if !ok || m == discard {
			continue
		}
		if len(p.data) > 0 {
			if _, err := dst.Write(p.data); err != nil {
				if dst == l.client && l.isFinished() {
					continue // no error: the proxy itself has shut this way
				}
				// One side is gone: so is the connection.
				l.end(closeWithRST)
				continue
			}
		}
		switch p.err {
		case nil:
		case io.EOF:
			dst.CloseWrite()
		default:
			l.end(closeWithRST)
		}
	}
}

// await waits for the end of a stall and returns the mode then; ok is false
// when the link is over.
func (l *link) await() (m mode, ok bool) {
	for {
		l.mu.Lock()
		m, changed := l.mode, l.changed
		l.mu.Unlock()
		if m != stall {
			return m, !isClosed(l.over)
		}
		select {
		case <-changed:
		case <-l.over:
			return m, false
		}
	}
}

func (l *link) setMode(m mode) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mode = m
	close(l.changed)
	l.changed = make(chan struct{})
}

// sleepUntil reports whether the link is not over by then.
func (l *link) sleepUntil(due time.Time) bool {
	d := time.Until(due)
	if d <= 0 {
		return !isClosed(l.over)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-l.over:
		return false
	}
}

func (l *link) finish() {
	l.mu.Lock()
	l.finished = true
	l.mu.Unlock()
	l.client.CloseWrite()
}

func (l *link) isFinished() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.finished
}

// end closes both sides by closeConn. Only the first call counts.
func (l *link) end(closeConn func(net.Conn) error) {
	l.endOnce.Do(func() {
		close(l.over)
		closeConn(l.client)
		closeConn(l.server)
	})
}
