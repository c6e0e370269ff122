package deadconn

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/net/http2"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// A script is fuzz input read as decisions: those that are written down, and
// then some that are drawn. Inputs are short by that, which the fuzzer would
// try to shorten for longer than it tries new ones.
type script struct {
	written []byte
	rnd     *rand.Rand
	drawn   int // how many are left
}

// newScript has at most that many drawn, none if seed is 0.
func newScript(written []byte, seed uint64, most int) *script {
	s := &script{written: written[:min(len(written), 40)], rnd: rand.New(rand.NewPCG(seed, 0))}
	if seed != 0 {
		s.drawn = s.rnd.IntN(most)
	}
	return s
}

func (s *script) more() bool { return len(s.written)+s.drawn > 0 }

// next returns a number below n, which is at most 256: 0 if there is none.
func (s *script) next(n int) int {
	switch {
	case len(s.written) > 0:
		b := s.written[0]
		s.written = s.written[1:]
		return int(b) % n
	case s.drawn > 0:
		s.drawn--
		return s.rnd.IntN(n)
	}
	return 0
}

// fuzzBubble runs f in a bubble. To wait for a lock does not count as waiting
// there, so that a deadlock would last until the test's end.
func fuzzBubble(t *testing.T, f func(t *testing.T)) {
	stuck := time.AfterFunc(time.Minute, func() { panic("deadlock, or without an end") })
	defer stuck.Stop()
	synctest.Test(t, f)
}

// FuzzEviction shows what evict.go promises, in any order of what may befall
// connections: each is closed and told of once, by whoever comes first, and
// what is closed takes nothing more.
func FuzzEviction(f *testing.F) {
	for _, s := range []string{
		"",
		"\x00\x00\x01\x00\x00\x01\x00\x00", // evicted twice
		"\x07\xff\x01\x00\x00\x03\x00\x00\x01\x01\x00\x02\x00\x00\x03\x01\x00\x00\x03\x01\x04\x00", // by all at once
		"\x03\x55\x07\x00\x00\x07\x01\x00\x00\x00\x04\x01\x00\x00\x03\x01\x00",                     // stalled, for the watch
		"\x05\x33\x04\x00\x00\x05\x01\x00\x08\x02\x00\x0b\x00\x00\x0b\x01\x00\x00\x00\x01\x02\x02", // dead by its own I/O
		"\x07\x0f\x01\x02\x00\x01\x03\x00\x01\x02\x01\x00\x00\x03\x01\x02\x00\x01\x03\x10\x03\x02", // somebody else's
		"\x07\xf0\x0a\x00\x00\x0a\x00\x10\x01\x00\x10\x09\x00\x00\x03\x00\x20\x02\x00\x00\x06\x00", // waited for
	} {
		f.Add([]byte(s), uint64(0))
	}
	for seed := range uint64(40) {
		f.Add([]byte{}, seed)
	}
	f.Fuzz(func(t *testing.T, written []byte, seed uint64) {
		s := newScript(written, seed, 400)
		fuzzBubble(t, func(t *testing.T) { newEvictions(t, s).run(s) })
	})
}

// evictions is a Registry, and all that may befall its connections.
type evictions struct {
	t         *testing.T
	reg       Registry
	own, wrap *Transport
	req       *http.Request // on all of them
	conns     []*victim
	ours      int  // how many are tracked
	reenters  bool // the hooks call back

	round, background sync.WaitGroup
}

// A victim is a connection, and what was done to it.
type victim struct {
	e      *evictions
	socket *fuzzSocket
	layer  *fuzzLayer // around socket; nil: none
	peer   net.Conn
	seen   net.Conn      // what httptrace would show, if somebody else has dialed it
	turn   chan struct{} // taken by the one that writes

	mu     sync.Mutex
	conns  map[*conn]*death // guarded by mu; more than one only if somebody else has dialed it
	blamed bool             // guarded by mu; it may be told of
	told   []Autopsy        // guarded by mu
	ended  int              // guarded by mu; how often that was told
}

// fuzzSocket is one end of a pipe, with the errors of a socket.
type fuzzSocket struct {
	net.Conn
	addr   *net.TCPAddr // its identity
	slow   bool         // Close takes its time
	gone   chan struct{}
	once   sync.Once
	closes atomic.Int32 // how often Close was called
	users  atomic.Int32 // how often of these by its user

	fails, stalls atomic.Bool // its writes
}

func (s *fuzzSocket) LocalAddr() net.Addr  { return s.addr }
func (s *fuzzSocket) RemoteAddr() net.Addr { return s.addr }

func (s *fuzzSocket) isClosed() bool {
	select {
	case <-s.gone:
		return true
	default:
		return false
	}
}

func (s *fuzzSocket) Close() error {
	s.closes.Add(1)
	if s.slow {
		time.Sleep(time.Millisecond)
	}
	err := net.ErrClosed
	s.once.Do(func() {
		close(s.gone)
		err = s.Conn.Close()
	})
	return err
}

func (s *fuzzSocket) Read(p []byte) (int, error) {
	n, err := s.Conn.Read(p)
	if err != nil && s.isClosed() {
		err = s.opError("read", net.ErrClosed)
	}
	return n, err
}

func (s *fuzzSocket) Write(p []byte) (n int, err error) {
	if s.stalls.Load() {
		<-s.gone
	}
	if !s.isClosed() && !s.fails.Load() {
		n, err = s.Conn.Write(p)
	}
	switch {
	case s.isClosed() && n < len(p):
		return n, s.opError("write", net.ErrClosed)
	case n < len(p) || err != nil:
		return n, s.opError("write", syscall.EPIPE)
	}
	return n, nil
}

func (s *fuzzSocket) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: "tcp", Source: s.addr, Addr: s.addr, Err: err}
}

// fuzzLayer is a user's own wrapper, which has to be closed too.
type fuzzLayer struct {
	net.Conn
	closed atomic.Bool
}

func (l *fuzzLayer) NetConn() net.Conn { return l.Conn }

func (l *fuzzLayer) Close() error {
	l.closed.Store(true)
	return l.Conn.Close()
}

func newEvictions(t *testing.T, s *script) *evictions {
	e := &evictions{t: t, req: request(t, "GET", "https://example.test/", nil)}
	n := 1 + s.next(8)
	flags := s.next(256)
	e.reenters = flags&1 != 0
	hooks := &Hooks{ConnTracked: func(ConnTrackedInfo) { e.reenter() }, ConnEvicted: e.tellEvicted, ConnClosed: e.tellClosed}
	e.own = Options{Base: new(http.Transport), Registry: &e.reg, Hooks: hooks}.NewTransport()
	e.wrap = Options{Registry: &e.reg, Hooks: hooks}.Wrap(new(http.Transport)).(*Transport)
	for i := range n {
		here, there := net.Pipe()
		v := &victim{e: e, peer: there, conns: make(map[*conn]*death), turn: make(chan struct{}, 1)}
		v.socket = &fuzzSocket{Conn: here, addr: &net.TCPAddr{Port: i}, gone: make(chan struct{}), slow: flags>>(i%4)&2 != 0}
		e.conns = append(e.conns, v)
		e.background.Go(func() { io.Copy(io.Discard, there) })
		switch flags >> (i % 5) & 7 {
		case 1:
			v.seen = v.socket
			continue
		case 2:
			v.seen = tls.Client(v.socket, &tls.Config{ServerName: "example.test"})
			continue
		}
		nc := net.Conn(v.socket)
		if i%2 == 1 {
			v.layer = &fuzzLayer{Conn: nc}
			nc = v.layer
		}
		var owner *Transport // nil: nobody uses it yet
		if i != 3 {
			owner = e.own
			e.ours++
		}
		c := e.reg.track(nc, "example.test:443", owner)
		if i%4 != 2 {
			c.proto.Store(uint32(isHTTP2))
		}
		if i%3 != 1 {
			c.shakenRead.Store(1)
			c.read.Store(1000) // proven
		}
		v.conns[c] = nil
	}
	return e
}

// run does what s says, many things at once up to the end of each round.
func (e *evictions) run(s *script) {
	for s.more() {
		what, v, how := s.next(13), e.conns[s.next(len(e.conns))], s.next(256)
		if what == 0 {
			e.endRound([]time.Duration{0, time.Millisecond, 150 * time.Millisecond, time.Second, 30 * time.Second}[how%5])
			continue
		}
		group := &e.round
		if what >= 5 && what <= 8 {
			group = &e.background // I/O may last as long as the connection
		}
		group.Go(func() {
			time.Sleep([]time.Duration{0, 0, time.Millisecond, 20 * time.Millisecond}[how>>4%4])
			if v.seen != nil {
				v.befallForeign(what, how)
			} else {
				v.befall(what, how)
			}
			v.check()
		})
	}
	e.endRound(0)
	// The HTTP layer lets go of them all.
	for _, v := range e.conns {
		if c := v.own(); c != nil {
			c.Close()
		} else {
			v.userCloses()
		}
		v.peer.Close()
	}
	e.background.Wait()
	time.Sleep(2 * time.Second) // for the watch to see, and the hooks to tell
	synctest.Wait()
	e.checkAll()
}

func (e *evictions) endRound(wait time.Duration) {
	e.round.Wait()
	time.Sleep(wait)
	synctest.Wait()
	open := 0
	for _, v := range e.conns {
		v.check()
		c := v.own()
		if c == nil {
			continue
		}
		if !c.closed.Load() {
			open++
		}
		if c.evicted.Load() || c.closed.Load() {
			if v.socket.closes.Load() == 0 {
				e.t.Errorf("%v was evicted or closed, and nobody closes its socket", v)
			}
		} else if v.socket.closes.Load() > 0 {
			e.t.Errorf("%v was closed, and nobody says so", v)
		}
	}
	if n := e.reg.Len(); n != open {
		e.t.Errorf("Len() = %d, want %d", n, open)
	}
}

func (v *victim) String() string { return fmt.Sprintf("connection %d", v.socket.addr.Port) }

func (v *victim) userCloses() {
	v.socket.users.Add(1)
	v.socket.Close()
}

// own returns the conn of a connection of ours, else nil.
func (v *victim) own() *conn {
	if v.seen != nil {
		return nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for c := range v.conns {
		return c
	}
	return nil
}

var fuzzKinds = []Kind{KindClosed, KindReset, KindEOF, KindLost, KindGoAway, KindProtocol}

func (v *victim) blame() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.blamed = true
}

func (v *victim) befall(what, how int) {
	c := v.own()
	kind := fuzzKinds[how%len(fuzzKinds)]
	switch what {
	case 1:
		v.blame()
		c.evict(kind, errors.New("evicted"))
	case 2:
		if err := v.e.reg.CloseAll(); err != nil {
			v.e.t.Error(err)
		}
	case 3:
		c.Close()
	case 4:
		v.peer.Close()
		c.Read(make([]byte, 10))
	case 5:
		v.socket.fails.Store(true)
		v.write(c)
	case 6:
		v.write(c)
	case 7:
		v.blame() // the watch evicts it
		v.socket.stalls.Store(true)
		v.write(c)
	case 8:
		c.Read(make([]byte, 10))
	case 9:
		v.e.lookAround()
	case 10:
		c.awaitRelease(v.e.t.Context())
	case 11: // as of a request that lands on it
		if d := c.fate.Load(); d != nil {
			c.shut(d.kind, d.err)
		}
	case 12:
		c.doom(kind, errors.New("doomed"))
	}
}

// befallForeign is about a connection that somebody else has dialed.
func (v *victim) befallForeign(what, how int) {
	switch what {
	case 2, 9, 10:
		v.e.lookAround()
		return
	case 3:
		v.userCloses()
		return
	}
	c := v.e.reg.adopt(v.seen, &attempt{t: v.e.wrap, req: v.e.req}) // as gotConn does
	v.mu.Lock()
	if _, ok := v.conns[c]; !ok {
		v.conns[c] = nil
	}
	v.mu.Unlock()
	c.wrote.Add(1)
	c.wait(now())
	time.Sleep(time.Duration(how%8) * 10 * time.Millisecond)
	if what == 1 || what == 5 {
		v.blame()
		c.evict(fuzzKinds[how%len(fuzzKinds)], errors.New("evicted"))
	}
}

// write writes to c, if nobody else does.
func (v *victim) write(c *conn) {
	select {
	case v.turn <- struct{}{}:
		defer func() { <-v.turn }()
	default:
		return
	}
	shut := c.isShut()
	n, err := c.Write([]byte("some bytes"))
	if shut && (n > 0 || err == nil) {
		v.e.t.Errorf("%d bytes could be written to what is shut", n)
	}
	if err != nil && c.evicted.Load() && shut && !errors.Is(err, net.ErrClosed) {
		v.e.t.Errorf("an evicted connection says %v", err)
	}
}

// check looks at what has to hold at any time.
func (v *victim) check() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for c, was := range v.conns {
		if c.isShut() && !v.socket.isClosed() {
			v.e.t.Errorf("%v is shut, and its socket is open", v)
		}
		d := c.fate.Load()
		if was != nil && d != was {
			v.e.t.Errorf("%v died of %v, and then of %v", v, was, d)
		}
		v.conns[c] = d
	}
}

// lookAround calls all that may be called at any time.
func (e *evictions) lookAround() {
	e.reg.Len()
	for _, tr := range []*Transport{e.own, e.wrap} {
		tr.Stats()
		tr.Connections(0)
		tr.Autopsies()
	}
}

// reenter is what a hook may do.
func (e *evictions) reenter() {
	if !e.reenters {
		return
	}
	e.lookAround()
	e.reg.CloseAll()
	e.own.CloseConnections()
}

func (e *evictions) tellEvicted(info ConnEvictedInfo) {
	v := e.conns[info.LocalAddr.(*net.TCPAddr).Port]
	v.mu.Lock()
	v.told = append(v.told, info.Autopsy)
	v.mu.Unlock()
	e.reenter()
}

func (e *evictions) tellClosed(info ConnClosedInfo) {
	v := e.conns[info.LocalAddr.(*net.TCPAddr).Port]
	v.mu.Lock()
	v.ended++
	v.mu.Unlock()
	e.reenter()
}

// checkAll looks at what is left when all is over.
func (e *evictions) checkAll() {
	told := make(map[*Transport]int64)
	inRing := make(map[*conn]int)
	for _, c := range e.reg.failed {
		if c != nil {
			inRing[c]++
		}
	}
	for _, v := range e.conns {
		v.check()
		tr := e.own
		if v.seen != nil {
			tr = e.wrap
		}
		var reported, evicted, ended, dead int
		for c, d := range v.conns {
			if c.reported.Load() {
				reported++
			}
			if c.evicted.Load() {
				evicted++
			}
			dead += inRing[c]
			if d == nil && inRing[c] > 0 || d != nil && v.seen == nil && inRing[c] != 1 {
				e.t.Errorf("%v died of %v, and is %d times among those that failed", v, d, inRing[c])
			}
			if evicted > 0 && (!v.socket.isClosed() || v.layer != nil && !v.layer.closed.Load()) {
				e.t.Errorf("%v was evicted, and is open", v)
			}
			if tr == e.own && c.owner.Load() != nil {
				ended = 1
			}
		}
		closes := int(v.socket.closes.Load() - v.socket.users.Load()) // by us
		told[tr] += int64(len(v.told))
		switch {
		case dead > 1:
			e.t.Errorf("%v is %d times among those that failed", v, dead)
		case (len(v.told) > 0) != (reported > 0) || len(v.told) > 1 || reported > 0 && !v.blamed:
			e.t.Errorf("%v was told of %d times, by %d conns, blamed: %v", v, len(v.told), reported, v.blamed)
		case v.ended != ended:
			e.t.Errorf("%v: its end was told %d times", v, v.ended)
		case tr == e.wrap && (closes != min(evicted, 1)):
			e.t.Errorf("%v was closed %d times, for %d evictions", v, closes, evicted)
		case tr == e.own && v.layer == nil && closes != 1+evicted:
			e.t.Errorf("%v was closed %d times", v, closes)
		}
		for _, a := range v.told {
			if c := v.own(); c != nil && (a.Cause != v.conns[c].kind || a.Err != v.conns[c].err) {
				e.t.Errorf("%v died of %v, and was told to have died of %v", v, v.conns[c], a.Err)
			}
		}
	}
	for tr, n := range told {
		s := tr.Stats()
		if s.Evicted != n || s.HooksDropped != 0 || len(tr.Autopsies()) != int(n) || s.Open != 0 || len(tr.Connections(0)) != 0 {
			e.t.Errorf("%d evictions told, and the end is %+v", n, s)
		}
	}
	if n := e.own.Stats().Dialed; n != int64(e.ours) {
		e.t.Errorf("%d dialed, want %d", n, e.ours)
	}
	foreign := 0
	e.reg.foreign.Range(func(any, any) bool { foreign++; return true })
	if foreign != 0 || e.reg.n != 0 || e.reg.live.next != nil && e.reg.live.next != &e.reg.live || e.reg.watching.Load() {
		e.t.Errorf("%d foreign connections and %d of ours are left, watched: %v", foreign, e.reg.n, e.reg.watching.Load())
	}
}

// FuzzRetryError shows that a RetryError of any two errors says no more and no
// less than those do, the last first, on one line.
func FuzzRetryError(f *testing.F) {
	trees := [][]byte{
		nil, {1, 2}, {2, 5}, {3, 9, 11}, {8, 3, 4, 5, 6, 7}, {9, 8, 9, 8, 1, 2, 3, 4, 5, 6}, {10, 11, 12, 13, 0, 1},
		{14, 15, 16, 17, 18, 19, 4, 8, 2, 1}, {13, 13, 12, 11, 10, 9, 8, 0, 0, 7, 3}, {12, 3, 12, 3, 4}, {19, 8, 19, 9},
	}
	for i, text := range []string{
		"", "plain", "two\nlines", "\r\n\r\n", "%s %n %!v(PANIC=", "\x00\x1b[31m\xff\u2028\u202e", "use of closed network connection",
		"http2: client connection lost", "http2: client conn not usable", goAwayPrefix + "LastStreamID=0, ErrCode=NO_ERROR, debug=\"\n\"",
		strings.Repeat("long ", 1000),
	} {
		f.Add(trees[i], trees[(i+3)%len(trees)], text, "other\n"+text)
		f.Add(trees[(i+5)%len(trees)], trees[i], "text", text)
	}
	f.Fuzz(func(t *testing.T, firstTree, lastTree []byte, firstText, lastText string) {
		first, last := errorTree(firstTree, firstText), errorTree(lastTree, lastText)
		re := newRetryError(first, last)

		oneLine := strings.NewReplacer("\r", " ", "\n", " ")
		want := oneLine.Replace("deadconn: retry failed: " + last.Error() + " (first attempt: " + first.Error() + ")")
		if got := re.Error(); got != want {
			t.Errorf("Error() = %q, want %q", got, want)
		}
		if strings.ContainsAny(re.Error(), "\r\n") {
			t.Errorf("more than one line: %q", re)
		}
		if got := re.Unwrap(); !sameError(re.First(), first) || !sameError(re.Last(), last) ||
			len(got) != 2 || !sameError(got[0], last) || !sameError(got[1], first) {
			t.Errorf("First, Last and Unwrap: %v, %v, %v", re.First(), re.Last(), got)
		}
		again := (&url.Error{Op: "Get", URL: "/", Err: re})
		alone := (&url.Error{Op: "Get", URL: "/", Err: last})
		if again.Timeout() != alone.Timeout() || again.Temporary() != alone.Temporary() {
			t.Errorf("Timeout %v, Temporary %v; the last alone: %v, %v", again.Timeout(), again.Temporary(), alone.Timeout(), alone.Temporary())
		}

		for _, leaf := range append(flatten(first), flatten(last)...) {
			if !reflect.ValueOf(leaf).Comparable() {
				continue
			}
			if got, want := errors.Is(re, leaf), errors.Is(last, leaf) || errors.Is(first, leaf); got != want {
				t.Errorf("errors.Is(%q) = %v, want %v", leaf, got, want)
			}
		}
		sameAs[*net.OpError](t, re)
		sameAs[*url.Error](t, re)
		sameAs[syscall.Errno](t, re)
		sameAs[http2.StreamError](t, re)
		sameAs[*multierror.Error](t, re)
		sameAs[uncomparable](t, re)
		sameAs[interface {
			error
			Timeout() bool
		}](t, errors.Join(last, first)) // re itself has a Timeout

		// Of two that know something, the one that an earlier rule knows.
		got, kinds := Classify(re), []Kind{Classify(last), Classify(first)}
		if !slices.Contains(kinds, got) || got != Classify(errors.Join(last, first)) || got != Classify(fmt.Errorf("%s: %w", firstText, re)) {
			t.Errorf("Classify(%q) = %v, its attempts: %v", re, got, kinds)
		}
	})
}

// errorTree makes an error of that shape, a node a byte, all of them with text.
func errorTree(shape []byte, text string) error {
	tree := newScript(shape, 0, 0) // less than maxErrors nodes
	var node func(depth int) error
	node = func(depth int) error {
		kind := tree.next(20)
		if depth == 0 && kind >= 10 {
			kind -= 10
		}
		switch kind {
		case 1:
			return io.EOF
		case 2:
			return syscall.ECONNRESET
		case 3:
			return context.Canceled
		case 4:
			return os.ErrDeadlineExceeded
		case 5:
			return http2.StreamError{StreamID: 1, Code: http2.ErrCodeRefusedStream, Cause: errors.New(text)}
		case 6:
			return &death{kind: KindSilent, err: errors.New(text)}
		case 7:
			return (*RetryError)(nil)
		case 8:
			return &net.DNSError{Err: text, IsTimeout: true, IsTemporary: true}
		case 9:
			return uncomparable{errors.New(text)}
		case 10:
			return fmt.Errorf("%s: %w", text, node(depth-1))
		case 11:
			return errors.Join(node(depth-1), node(depth-1))
		case 12:
			return newRetryError(node(depth-1), node(depth-1))
		case 13:
			return multierror.Append(nil, node(depth-1), node(depth-1))
		case 14:
			return &url.Error{Op: text, URL: text, Err: node(depth - 1)}
		case 15:
			return &net.OpError{Op: "write", Net: text, Err: node(depth - 1)}
		case 16:
			return &net.OpError{Op: text, Err: node(depth - 1)}
		case 17:
			return wrapper{node(depth - 1), text}
		case 18:
			return uncomparable{nil, node(depth - 1), nil}
		case 19:
			return fmt.Errorf("%w\n%w", node(depth-1), node(depth-1))
		}
		return errors.New(text)
	}
	return node(5)
}

// sameError reports whether a is b; what cannot be compared is when it looks
// like it.
func sameError(a, b error) bool {
	if a == nil || !reflect.ValueOf(a).Comparable() {
		return reflect.DeepEqual(a, b)
	}
	return a == b
}

// sameAs fails the test unless errors.As finds the E in err that it finds in
// what err wraps, the first of these that has one.
func sameAs[E error](t *testing.T, err error) {
	t.Helper()
	var got, want E
	ok := errors.As(err, &got)
	found := slices.ContainsFunc(err.(interface{ Unwrap() []error }).Unwrap(), func(e error) bool { return errors.As(e, &want) })
	if ok != found || ok && !sameError(got, want) {
		t.Errorf("errors.As(%q, %T) = %v, %v, want %v, %v", err, got, got, ok, want, found)
	}
}

// FuzzMergedDials shows what dial.go promises, whatever comes of the dials and
// whenever their callers leave: every caller ends, none sees how dials are
// merged or a failure from before its time, no dial is made that another makes
// needless, and nothing is left behind.
func FuzzMergedDials(f *testing.F) {
	faultnet.ClientCert() // made once, outside of any bubble
	for _, s := range []string{
		"",
		"\x00\x00\x00\x0a\x00\x01\x00\x01\x00\x01",                         // one dial for all
		"\x00\x01\x06\x05\x00\x14\x00\x00\x00\x00\x01\x00\x05\x00\x20",     // it fails
		"\x00\x01\x08\x00\x00\x05\x00\x01\x00\x06\x01\x00\x1e\x09\x00\x64", // it hangs, and its caller may leave
		"\x00\x03\x0a\x01\x04\x01\x05\x64\x00\x00\x01\x00\x01\x00\x02\x01", // a refusal, HTTP/1, a slow one
	} {
		f.Add([]byte(s), uint64(0))
	}
	for seed := range uint64(60) {
		f.Add([]byte{}, seed)
		f.Add([]byte{66}, seed) // one stream a connection, and no retries
	}
	f.Add([]byte("A$y"), uint64(2)) // one leaves while it is sent back
	f.Fuzz(func(t *testing.T, written []byte, seed uint64) {
		s := newScript(written, seed, 120)
		fuzzBubble(t, func(t *testing.T) { newDialing(t, s).run(s) })
	})
}

// dialing is a Transport with requests under way, over dials that come to what
// a script says.
type dialing struct {
	t       *testing.T
	tr      *Transport
	d       *dialer           // tr's
	servers [2]*dialMemServer // by HTTP/1 alone and by HTTP/2
	plans   []dialPlan        // one a dial, and then again from the start
	retries bool
	limited bool // as to connections, or requests on one
	most    int  // requests: a connection for each, with its handshake, takes time

	mu       sync.Mutex
	calm     bool            // guarded by mu; from now on dials succeed at once
	next     dialEnd         // guarded by mu; but for this one
	dials    []*fuzzDial     // guarded by mu
	troubled map[string]bool // guarded by mu; addresses where something was not as it should be
	http1    map[string]bool // guarded by mu; addresses where it was spoken
}

// dialPlan is what comes of a dial, and when.
type dialPlan struct {
	wait  time.Duration
	end   dialEnd
	lives time.Duration // 0: for good
	death int
}

type dialEnd int

const (
	endHTTP2 dialEnd = iota
	endHTTP1
	endSlow // for as long as it waits, too
	endFailed
	endHangs   // until its context ends
	endNothing // (nil, nil), as a bad dialer would
	endRefused // in the handshake
	endSilent
)

// fuzzDial is a dial that was made.
type fuzzDial struct {
	addr   string
	began  time.Time
	dialed bool // guarded by dialing.mu
}

// fuzzDialError is how a dial failed.
type fuzzDialError struct {
	addr string
	at   time.Time
}

func (e *fuzzDialError) Error() string { return "no connection to " + e.addr }

func newDialing(t *testing.T, s *script) *dialing {
	x := &dialing{t: t, troubled: make(map[string]bool), http1: make(map[string]bool)}
	answer := func(w http.ResponseWriter, r *http.Request) {
		d, _ := time.ParseDuration(r.URL.RawQuery)
		time.Sleep(d)
	}
	flags := s.next(256)
	x.most = 100
	streams := 0 // net/http's default
	if flags/64 == 1 {
		streams, x.most = 1+flags%3, 24
	}
	x.servers = [2]*dialMemServer{newFuzzServer(answer, false, 0), newFuzzServer(answer, true, streams)}
	cfg := dialMemTLS()
	cfg.CurvePreferences = []tls.CurveID{tls.X25519} // the fastest
	base := &http.Transport{DialContext: x.dial, TLSClientConfig: cfg, ForceAttemptHTTP2: true, TLSHandshakeTimeout: 10 * time.Second}
	if flags%8 == 7 {
		base.MaxConnsPerHost = 1 + flags/8%2
	}
	x.limited = streams+base.MaxConnsPerHost > 0
	x.retries = flags/16%4 > 0
	x.tr = Options{Base: base, DisableRetry: !x.retries}.NewTransport()
	// As dialOwn does, to have it at hand.
	x.d = &dialer{reg: x.tr.reg, owner: x.tr, transport: x.tr.own, under: x.tr.trials.dial}
	x.tr.own.DialContext, x.tr.own.DialTLSContext = x.d.dialContext, x.dialTLS
	for range 1 + s.next(12) {
		what, wait := s.next(256), time.Duration(s.next(256))*time.Millisecond
		p := dialPlan{wait: wait, end: []dialEnd{
			endHTTP2, endHTTP2, endHTTP2, endHTTP2, endHTTP1, endSlow, endFailed, endFailed, endHangs, endNothing, endRefused, endSilent,
		}[what%12]}
		if wait > 200*time.Millisecond {
			p.wait *= 3 // stalled
		}
		if what/12%4 == 0 {
			b := s.next(256)
			p.lives, p.death = time.Duration(1+b*b/100)*time.Millisecond, s.next(5)
		}
		x.plans = append(x.plans, p)
	}
	return x
}

// newFuzzServer is newDialMemServer with a limit for the streams of a
// connection.
func newFuzzServer(h http.HandlerFunc, http2 bool, streams int) *dialMemServer {
	s := &dialMemServer{conns: make(chan net.Conn), done: make(chan struct{})}
	s.srv = &http.Server{
		Handler:   h,
		Protocols: new(http.Protocols),
		HTTP2:     &http.HTTP2Config{MaxConcurrentStreams: streams},
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{faultnet.ClientCert()}},
		ErrorLog:  log.New(io.Discard, "", 0),
	}
	s.srv.Protocols.SetHTTP1(true)
	s.srv.Protocols.SetHTTP2(http2)
	go s.srv.ServeTLS(s, "", "")
	return s
}

// dialTLS keeps net/http waiting until the handshake is done. It would run it
// too, and wait for a lock, so that the time in the bubble stood still.
func (x *dialing) dialTLS(ctx context.Context, network, addr string) (net.Conn, error) {
	nc, err := x.d.dialTLSContext(ctx, network, addr)
	if err != nil || nc == nil {
		return nc, err
	}
	c := tracked(nc)
	for c.shakenRead.Load() == 0 && !c.closed.Load() && ctx.Err() == nil {
		select {
		case <-c.Conn.(*fuzzConn).moved:
		case <-ctx.Done():
		}
		time.Sleep(time.Nanosecond) // until nothing moves any more
	}
	return nc, nil
}

// fuzzConn is what a dial returns.
type fuzzConn struct {
	*faultnet.Conn
	dial    *fuzzDial
	moved   chan struct{} // has a token when something was read or written
	refused func() error  // nil: it is not
}

func (c *fuzzConn) Read(p []byte) (int, error) {
	defer c.move()
	if c.refused != nil {
		select {
		case <-time.After(5 * time.Millisecond):
			return 0, c.refused()
		case <-c.ClosedChan():
		}
	}
	return c.Conn.Read(p)
}

func (c *fuzzConn) Write(p []byte) (int, error) {
	defer c.move()
	return c.Conn.Write(p)
}

func (c *fuzzConn) move() {
	select {
	case c.moved <- struct{}{}:
	default:
	}
}

// NetConn is hidden: what is below is no socket.
func (c *fuzzConn) NetConn() net.Conn { return nil }

// dial is what the user's dialer does.
func (x *dialing) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	x.mu.Lock()
	p := x.plans[len(x.dials)%len(x.plans)]
	if x.calm {
		p = dialPlan{end: x.next}
		x.next = endHTTP2
	}
	if len(x.dials) > 400 && !x.calm {
		p.end = endFailed // net/http by itself dials on and on where nothing can be written
	}
	me := &fuzzDial{addr: addr, began: time.Now()}
	x.needlessLocked(me)
	x.dials = append(x.dials, me)
	if p.end == endHTTP1 {
		x.http1[addr] = true
	}
	x.mu.Unlock()
	defer func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		me.dialed = true
	}()

	if p.end == endHangs {
		p.wait = 30 * time.Second // as long as net/http's default
	}
	select {
	case <-time.After(p.wait):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	switch p.end {
	case endFailed, endHangs:
		return nil, x.failure(addr)
	case endNothing:
		x.trouble(addr)
		return nil, nil
	}
	server := x.servers[1]
	if p.end == endHTTP1 {
		server = x.servers[0]
	}
	here, there := net.Pipe()
	select {
	case server.conns <- there:
	case <-server.done:
		return nil, syscall.ECONNREFUSED
	}
	c := &fuzzConn{Conn: faultnet.NewConn(here), dial: me, moved: make(chan struct{}, 1)}
	switch p.end {
	case endRefused:
		c.refused = func() error { return x.failure(addr) }
	case endSilent:
		x.trouble(addr)
		c.Blackhole()
	case endSlow:
		c.HoldWrites()
		time.AfterFunc(p.wait, c.Heal)
	}
	if p.lives > 0 {
		time.AfterFunc(p.lives, func() {
			x.trouble(addr)
			switch p.death {
			case 0:
				c.Reset()
			case 1:
				c.FailWrites(syscall.EPIPE)
			case 2:
				c.Blackhole()
			case 3:
				c.CloseUnderneath()
			case 4:
				there.Close()
			}
		})
	}
	return c, nil
}

func (x *dialing) failure(addr string) error {
	x.trouble(addr)
	return &fuzzDialError{addr, time.Now()}
}

// trouble notes that requests to addr may fail from now on.
func (x *dialing) trouble(addr string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.troubled[addr] = true
}

// needlessLocked endFailed the test if another dial or handshake to the same
// address is under way, and has not kept anybody waiting for long. Where
// HTTP/1 was spoken each request dials, and a limit has its own needs.
func (x *dialing) needlessLocked(me *fuzzDial) {
	if x.http1[me.addr] || x.limited {
		return
	}
	// A dial may first wait for the connection before it to settle.
	const young = stalledDial - settleWait - 2*settleMore
	for _, other := range x.dials {
		if age := me.began.Sub(other.began); other.addr == me.addr && !other.dialed && age < young {
			x.t.Errorf("a dial beside one that is %v old", age)
		}
	}
	r := x.tr.reg
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := r.live.next; c != nil && c != &r.live; c = c.next {
		age := me.began.Sub(c.Conn.(*fuzzConn).dial.began)
		if c.addr == me.addr && c.shakenRead.Load() == 0 && !c.dead() && !c.closed.Load() && age < young {
			x.t.Errorf("a dial beside a handshake that is %v old", age)
		}
	}
}

// run sends the requests that s says, and ends them all.
func (x *dialing) run(s *script) {
	var callers sync.WaitGroup
	for range x.most {
		if !s.more() {
			break
		}
		what, at := s.next(256), time.Duration(s.next(256))*2*time.Millisecond
		leaves := patience
		if what%4 == 3 {
			leaves = time.Duration(1+s.next(256)) * 2 * time.Millisecond
		}
		callers.Go(func() {
			time.Sleep(at)
			switch what % 32 {
			case 30:
				if !x.retries { // net/http may give a request what is just being closed
					x.trouble(fuzzHosts[0])
					x.trouble(fuzzHosts[1])
				}
				x.tr.CloseIdleConnections()
			case 31:
				x.trouble(fuzzHosts[0])
				x.trouble(fuzzHosts[1])
				x.tr.CloseConnections()
			default:
				x.call(what, leaves)
			}
		})
	}
	callers.Wait()
	time.Sleep(time.Minute) // the dials that nobody waits for any more
	// Whatever was: once all is well, a request takes one dial and no time.
	x.tr.CloseConnections()
	synctest.Wait()
	x.mu.Lock()
	x.calm = true
	clear(x.troubled)
	x.mu.Unlock()
	x.callAll(1, 0, 1)
	if !x.limited {
		// And a dial that hangs keeps nobody waiting for long.
		x.tr.CloseConnections()
		synctest.Wait()
		x.mu.Lock()
		x.next = endHangs
		x.mu.Unlock()
		x.callAll(3, stalledDial, 2)
		time.Sleep(time.Minute)
	}

	x.tr.CloseConnections()
	for _, s := range x.servers {
		s.srv.Close()
	}
	time.Sleep(time.Second)
	synctest.Wait()
	d := x.d
	if len(d.calls) != 0 || len(d.settling) != 0 || d.reg.Len() != 0 {
		x.t.Errorf("%d calls, %d connections that settle, and %d connections are left", len(d.calls), len(d.settling), d.reg.Len())
	}
}

// patience is what a caller has who does not leave early.
const patience = time.Minute

// callAll sends n requests, which are to take that many dials and not much
// longer than that.
func (x *dialing) callAll(n int, longest time.Duration, dials int) {
	start, before := time.Now(), len(x.dials)
	var callers sync.WaitGroup
	for range n {
		callers.Go(func() { x.call(0, patience) })
	}
	callers.Wait()
	if took, n := time.Since(start), len(x.dials)-before; took > longest+settleWait || n != dials {
		x.t.Errorf("it took %v and %d dials when all was well, want %v and %d", took, n, longest, dials)
	}
}

var fuzzHosts = [2]string{"127.0.0.1:443", "127.0.0.1:444"}

// call sends a request, and checks what comes of it.
func (x *dialing) call(what int, leaves time.Duration) {
	addr := fuzzHosts[0]
	if what&0x30 == 0x30 {
		addr = fuzzHosts[1]
	}
	method := "GET"
	if what&0xc0 == 0xc0 {
		method = "POST"
	}
	ctx, cancel := context.WithTimeout(x.t.Context(), leaves)
	defer cancel()
	start := time.Now()
	url := fmt.Sprintf("https://%s/?%dms", addr, what&0xf<<3)
	resp, err := x.tr.RoundTrip(request(x.t, method, url, nil).WithContext(ctx))
	if took := time.Since(start); took > leaves+10*time.Millisecond {
		x.t.Errorf("it took %v, and was to leave after %v: %v", took, leaves, err)
	}
	if err == nil {
		drain(resp)
		return
	}
	dialCheckText(x.t, err)
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, e := range flatten(err) {
		if e, ok := e.(*fuzzDialError); ok && (e.addr != addr || e.at.Before(start)) {
			x.t.Errorf("a request to %s got the failure of a dial to %s, from %v before its time", addr, e.addr, start.Sub(e.at))
		}
		if _, ok := e.(*notSentError); ok {
			x.t.Errorf("a caller got %v", err)
		}
	}
	if x.limited && strings.Contains(err.Error(), "received from peer") {
		return // the server counts a stream whose caller has left for longer than net/http does
	}
	if (ctx.Err() == nil || leaves == patience) && !x.troubled[addr] {
		x.t.Errorf("all was well, and %v", err)
	}
}
