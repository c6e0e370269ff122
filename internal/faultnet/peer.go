package faultnet

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// A Peer is an HTTP/2 server on loopback whose every frame is scripted.
type Peer struct {
	script    func(*PeerConn)
	ln        net.Listener
	cleartext bool
	settings  []http2.Setting

	ctx    context.Context // done when Close is called
	cancel context.CancelFunc
	wg     sync.WaitGroup // accept loop and one for each connection
	conns  connSet
}

// A PeerOption changes what [NewPeer] makes.
type PeerOption func(*Peer)

// PeerNoTLS makes the peer speak HTTP/2 without TLS, with prior knowledge.
func PeerNoTLS() PeerOption {
	return func(p *Peer) { p.cleartext = true }
}

// PeerSettings are sent in the first SETTINGS frame of each connection.
func PeerSettings(s ...http2.Setting) PeerOption {
	return func(p *Peer) { p.settings = append(p.settings, s...) }
}

// NewPeer starts a peer. For each connection script runs on a goroutine of its
// own, after the TLS handshake and the exchange of SETTINGS. When script
// returns, the connection is shut with [PeerConn.FIN] and drained, so that
// what was sent still arrives.
//
// A script that waits for something else than its connection must also watch
// [PeerConn.Done], or Close waits for ever.
func NewPeer(script func(c *PeerConn), opts ...PeerOption) (*Peer, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Peer{script: script, ln: ln}
	for _, o := range opts {
		o(p)
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.wg.Add(1)
	go p.accept()
	return p, nil
}

// URL returns the address of the peer as a URL without a path.
func (p *Peer) URL() string {
	if p.cleartext {
		return "http://" + p.Addr()
	}
	return "https://" + p.Addr()
}

// Addr returns the address of the peer, as host:port.
func (p *Peer) Addr() string { return p.ln.Addr().String() }

// CertPool returns a pool with which clients verify the peer.
func (p *Peer) CertPool() *x509.CertPool { return certPool() }

// ClientTLS returns a new configuration for clients of the peer.
func (p *Peer) ClientTLS() *tls.Config { return &tls.Config{RootCAs: certPool()} }

// Conns returns how many connections were accepted so far.
func (p *Peer) Conns() int { return p.conns.count() }

// Close stops listening, closes all connections and waits for the scripts to
// return.
func (p *Peer) Close() error {
	p.cancel()
	err := p.ln.Close()
	p.wg.Wait()
	return err
}

func (p *Peer) accept() {
	defer p.wg.Done()
	for n := 0; ; n++ {
		c, err := p.ln.Accept()
		if err != nil {
			return
		}
		raw := p.conns.add(c)
		p.wg.Add(1)
		go func() {
			defer p.wg.Done()
			defer raw.Close()
			stop := context.AfterFunc(p.ctx, func() { raw.Close() })
			defer stop()
			p.serve(raw, n)
		}()
	}
}

func (p *Peer) serve(raw net.Conn, n int) {
	c := &PeerConn{Conn: raw, N: n, raw: raw, done: p.ctx.Done(), streams: make(map[uint32]*peerStream)}
	if !p.cleartext {
		t := tls.Server(raw, &tls.Config{
			Certificates: []tls.Certificate{certificate()},
			NextProtos:   []string{http2.NextProtoTLS},
		})
		if t.Handshake() != nil || t.ConnectionState().NegotiatedProtocol != http2.NextProtoTLS {
			return
		}
		c.Conn = t
	}
	if c.greet(p.settings) != nil {
		return
	}
	p.script(c)
	c.FIN()
	c.Silence()
}

// A PeerConn is one connection of a [Peer], as its script sees it.
//
// Methods that write may be called from several goroutines; those that read
// (ReadRequest, ReadBody, PingsOnly, Silence) from one at a time. Errors of
// writing mean that the client is gone; most scripts can ignore them.
type PeerConn struct {
	// Framer reads and writes on Conn. A script that uses it to write must not
	// have another goroutine in a writing method.
	Framer *http2.Framer

	// Conn is the *tls.Conn, or the TCP connection without TLS.
	Conn net.Conn

	// N says which connection of the Peer this is, from 0.
	N int

	raw  net.Conn // below TLS
	done <-chan struct{}

	// The fields below belong to the reading goroutine.
	streams  map[uint32]*peerStream
	requests []*PeerRequest // not yet returned by ReadRequest
	acked    bool           // the client has acknowledged a SETTINGS frame

	wmu         sync.Mutex // guards writing with Framer, and the fields below
	headers     bytes.Buffer
	encoder     *hpack.Encoder
	ignorePings bool
	keepWindow  bool
}

type peerStream struct {
	body  []byte
	ended bool // by END_STREAM or RST_STREAM
	err   error
}

// A PeerRequest is the HEADERS frame (with its CONTINUATIONs) of a request.
type PeerRequest struct {
	StreamID  uint32
	Method    string
	Path      string
	Authority string
	Scheme    string
	Header    http.Header // without the pseudo-header fields
	EndStream bool        // there is no body
}

// greet reads the client's preface and SETTINGS, sends the peer's and
// acknowledges the client's. The client's own acknowledgement comes later.
func (c *PeerConn) greet(settings []http2.Setting) error {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(c.Conn, preface); err != nil {
		return err
	}
	if string(preface) != http2.ClientPreface {
		return errors.New("faultnet: no HTTP/2 preface")
	}
	c.Framer = http2.NewFramer(c.Conn, c.Conn)
	c.Framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	c.encoder = hpack.NewEncoder(&c.headers)
	if err := c.Settings(settings...); err != nil {
		return err
	}
	f, err := c.Framer.ReadFrame()
	if err != nil {
		return err
	}
	if s, ok := f.(*http2.SettingsFrame); !ok || s.IsAck() {
		return errors.New("faultnet: no SETTINGS after the preface")
	}
	return c.write(c.Framer.WriteSettingsAck)
}

// write runs f, which writes with Framer, alone.
func (c *PeerConn) write(f func() error) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	return f()
}

// Done returns a channel that is closed when the Peer is being closed.
func (c *PeerConn) Done() <-chan struct{} { return c.done }

// IgnorePings says whether PINGs stay without an answer from now on.
func (c *PeerConn) IgnorePings(on bool) {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.ignorePings = on
}

// KeepWindow says whether flow control stays closed from now on: DATA is read,
// but its window is not given back, so that an upload comes to a halt.
func (c *PeerConn) KeepWindow(on bool) {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.keepWindow = on
}

// Settings sends a SETTINGS frame.
func (c *PeerConn) Settings(s ...http2.Setting) error {
	return c.write(func() error { return c.Framer.WriteSettings(s...) })
}

// ReadRequest reads until the next request. Meanwhile it answers PINGs, unless
// told otherwise, acknowledges SETTINGS, collects the DATA of all streams and
// gives the flow control back; everything else it skips.
//
// The first request is not returned before the client has acknowledged the
// peer's SETTINGS, so that no write of the client is under way then. Otherwise
// an RST could hit that write instead of the client's reader, and a FIN could
// become an RST because of bytes that nobody has read.
func (c *PeerConn) ReadRequest() (*PeerRequest, error) {
	for len(c.requests) == 0 || !c.acked {
		if err := c.readFrame(); err != nil {
			return nil, err
		}
	}
	r := c.requests[0]
	c.requests = c.requests[1:]
	return r, nil
}

// ReadBody reads until the body of a request is complete and returns it. It
// does otherwise what ReadRequest does; requests that arrive wait for that.
// After an RST_STREAM the error is an [http2.StreamError].
func (c *PeerConn) ReadBody(streamID uint32) (string, error) {
	for {
		s := c.streams[streamID]
		if s == nil {
			return "", errors.New("faultnet: no such stream")
		}
		if s.ended {
			return string(s.body), s.err
		}
		if err := c.readFrame(); err != nil {
			return string(s.body), err
		}
	}
}

func (c *PeerConn) readFrame() error {
	f, err := c.Framer.ReadFrame()
	if err != nil {
		return err
	}
	switch f := f.(type) {
	case *http2.MetaHeadersFrame:
		if s := c.streams[f.StreamID]; s != nil { // trailers
			s.ended = s.ended || f.StreamEnded()
			return nil
		}
		c.streams[f.StreamID] = &peerStream{ended: f.StreamEnded()}
		r := &PeerRequest{
			StreamID:  f.StreamID,
			Method:    f.PseudoValue("method"),
			Path:      f.PseudoValue("path"),
			Authority: f.PseudoValue("authority"),
			Scheme:    f.PseudoValue("scheme"),
			Header:    make(http.Header),
			EndStream: f.StreamEnded(),
		}
		for _, h := range f.RegularFields() {
			r.Header.Add(h.Name, h.Value)
		}
		c.requests = append(c.requests, r)
	case *http2.DataFrame:
		s := c.streams[f.StreamID]
		if s == nil {
			return nil
		}
		s.body = append(s.body, f.Data()...)
		s.ended = s.ended || f.StreamEnded()
		return c.giveBack(f.StreamID, f.Length, s.ended)
	case *http2.RSTStreamFrame:
		if s := c.streams[f.StreamID]; s != nil && !s.ended {
			s.ended, s.err = true, http2.StreamError{StreamID: f.StreamID, Code: f.ErrCode}
		}
	case *http2.PingFrame:
		return c.pong(f)
	case *http2.SettingsFrame:
		if !f.IsAck() {
			return c.write(c.Framer.WriteSettingsAck)
		}
		c.acked = true
	}
	return nil
}

// giveBack gives the flow control window for n bytes back.
func (c *PeerConn) giveBack(streamID, n uint32, ended bool) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if n == 0 || c.keepWindow {
		return nil
	}
	if !ended {
		if err := c.Framer.WriteWindowUpdate(streamID, n); err != nil {
			return err
		}
	}
	return c.Framer.WriteWindowUpdate(0, n)
}

func (c *PeerConn) pong(f *http2.PingFrame) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if f.IsAck() || c.ignorePings {
		return nil
	}
	return c.Framer.WritePing(true, f.Data)
}

// Respond answers with a status and, unless it is empty, a body.
func (c *PeerConn) Respond(streamID uint32, status int, body string) error {
	if err := c.respond(streamID, status, body == "", nil); err != nil || body == "" {
		return err
	}
	return c.Data(streamID, body, true)
}

// RespondHeaders sends HEADERS without END_STREAM.
func (c *PeerConn) RespondHeaders(streamID uint32, status int, fields ...hpack.HeaderField) error {
	return c.respond(streamID, status, false, fields)
}

func (c *PeerConn) respond(streamID uint32, status int, end bool, fields []hpack.HeaderField) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.headers.Reset()
	c.encoder.WriteField(hpack.HeaderField{Name: ":status", Value: strconv.Itoa(status)})
	for _, f := range fields {
		c.encoder.WriteField(f)
	}
	return c.Framer.WriteHeaders(http2.HeadersFrameParam{
		StreamID:      streamID,
		BlockFragment: c.headers.Bytes(),
		EndHeaders:    true,
		EndStream:     end,
	})
}

// Data sends s in DATA frames, the last one with END_STREAM if end is true. It
// does not look at the client's flow control window.
func (c *PeerConn) Data(streamID uint32, s string, end bool) error {
	const maxFrame = 16 << 10 // what every client must take
	c.wmu.Lock()
	defer c.wmu.Unlock()
	for len(s) > maxFrame {
		if err := c.Framer.WriteData(streamID, false, []byte(s[:maxFrame])); err != nil {
			return err
		}
		s = s[maxFrame:]
	}
	return c.Framer.WriteData(streamID, end, []byte(s))
}

// Reset sends RST_STREAM.
func (c *PeerConn) Reset(streamID uint32, code http2.ErrCode) error {
	return c.write(func() error { return c.Framer.WriteRSTStream(streamID, code) })
}

// GoAway sends GOAWAY. The connection stays open.
func (c *PeerConn) GoAway(lastID uint32, code http2.ErrCode, debug string) error {
	return c.write(func() error { return c.Framer.WriteGoAway(lastID, code, []byte(debug)) })
}

// Ping sends a PING.
func (c *PeerConn) Ping(data [8]byte) error {
	return c.write(func() error { return c.Framer.WritePing(false, data) })
}

// DataOnStream0 sends a DATA frame that no stream can own, a connection error
// for the client.
func (c *PeerConn) DataOnStream0() error {
	return c.write(func() error { return c.Framer.WriteRawFrame(http2.FrameData, 0, 0, []byte("x")) })
}

// Garbage sends bytes below TLS that are no TLS record.
func (c *PeerConn) Garbage() error {
	return c.write(func() error {
		_, err := io.WriteString(c.raw, "this is no TLS record, it is garbage\r\n")
		return err
	})
}

// GarbageFrame sends bytes, inside TLS, that are no frame: the length they
// begin with is beyond all bounds.
func (c *PeerConn) GarbageFrame() error {
	return c.write(func() error {
		_, err := c.Conn.Write(bytes.Repeat([]byte{0xff}, 32))
		return err
	})
}

// FIN ends the connection towards the client in an orderly way: close_notify,
// then a TCP FIN. Reading goes on.
func (c *PeerConn) FIN() error {
	if t, ok := c.Conn.(*tls.Conn); ok {
		// CloseWrite waits for a Write that is under way, which may be stuck.
		t.SetWriteDeadline(time.Now().Add(5 * time.Second))
		t.CloseWrite()
	}
	return c.FINRaw()
}

// FINRaw sends a TCP FIN without a close_notify before it. Reading goes on.
func (c *PeerConn) FINRaw() error {
	return c.raw.(interface{ CloseWrite() error }).CloseWrite()
}

// RST closes the connection with an RST (SO_LINGER 0).
func (c *PeerConn) RST() error { return closeWithRST(c.raw) }

// Silence reads and drops everything until the connection or the Peer is
// closed. Nothing is answered, not even a PING.
func (c *PeerConn) Silence() { io.Copy(io.Discard, c.raw) }

// PingsOnly answers PINGs, and nothing else, until the connection or the Peer
// is closed.
func (c *PeerConn) PingsOnly() {
	for {
		f, err := c.Framer.ReadFrame()
		var s http2.StreamError
		if errors.As(err, &s) {
			continue
		}
		if err != nil {
			return
		}
		if p, ok := f.(*http2.PingFrame); ok && c.pong(p) != nil {
			return
		}
	}
}
