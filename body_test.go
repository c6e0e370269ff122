package deadconn

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"

	"golang.org/x/net/http2"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// A source is a request body of which the test knows all.
type source struct {
	io.Reader
	mu     sync.Mutex
	closed int
}

func newSource() *source { return &source{Reader: newString("payload")} }

func (s *source) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed++
	return nil
}

func (s *source) closes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// What the HTTP layer and RoundTrip do to a body, step by step, and how often
// the body below is closed after each.
func TestBodyGuard(t *testing.T) {
	type step struct {
		do     string
		closes int
	}
	for _, tt := range []struct {
		name  string
		steps []step
	}{
		{"read and closed", []step{{"read", 0}, {"close", 1}, {"close", 1}, {"settle", 1}}},
		{"read and not closed: the base's to close", []step{{"read", 0}, {"settle", 0}, {"close", 1}}},
		{"read, not closed, failed", []step{{"read", 0}, {"fail", 1}, {"close", 1}, {"fail", 1}}},
		{"closed unread is held back", []step{{"close", 0}, {"close", 0}, {"settle", 1}, {"close", 1}}},
		{"closed unread, failed", []step{{"close", 0}, {"fail", 1}, {"close", 1}}},
		{"settled before it is closed", []step{{"settle", 0}, {"close", 1}, {"close", 1}}},
		{"never touched, failed", []step{{"fail", 1}}},
		{"handed on", []step{{"close", 0}, {"hand on", 0}, {"close", 0}, {"settle", 0}, {"fail", 0}}},
		{"handed on, not closed before", []step{{"hand on", 0}, {"close", 0}, {"no read", 0}, {"fail", 0}}},
		{"read cannot be handed on", []step{{"read", 0}, {"no hand on", 0}, {"close", 1}}},
		{"closed cannot be handed on", []step{{"close", 0}, {"fail", 1}, {"no hand on", 1}}},
		{"handed on once", []step{{"hand on", 0}, {"no hand on", 0}}},
		{"no read after close", []step{{"close", 0}, {"no read", 0}, {"hand on", 0}}},
		{"no read after close, read before", []step{{"read", 0}, {"close", 1}, {"no read", 1}}},
		{"read to its end", []step{{"read", 0}, {"read", 0}, {"end", 0}, {"close", 1}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			src := newSource()
			b := &body{rc: src}
			for i, s := range tt.steps {
				switch s.do {
				case "read":
					if n, err := b.Read(make([]byte, 4)); n == 0 || err != nil {
						t.Errorf("step %d: Read = %d, %v", i, n, err)
					}
				case "end":
					if n, err := b.Read(make([]byte, 4)); n != 0 || err != io.EOF {
						t.Errorf("step %d: Read = %d, %v", i, n, err)
					}
				case "no read":
					if n, err := b.Read(make([]byte, 4)); n != 0 || err != http.ErrBodyReadAfterClose {
						t.Errorf("step %d: Read = %d, %v", i, n, err)
					}
				case "close":
					if err := b.Close(); err != nil {
						t.Errorf("step %d: %v", i, err)
					}
				case "settle":
					b.settle(false)
				case "fail":
					b.settle(true)
				case "hand on":
					if b.handOn() != src {
						t.Errorf("step %d: the body was not handed on", i)
					}
				case "no hand on":
					if rc := b.handOn(); rc != nil {
						t.Errorf("step %d: handed on %v", i, rc)
					}
				default:
					t.Fatal(s.do)
				}
				if got := src.closes(); got != s.closes {
					t.Fatalf("after step %d, %s: closed %d times, want %d", i, s.do, got, s.closes)
				}
			}
			if b.failure() != nil {
				t.Errorf("failure = %v", b.failure())
			}
		})
	}
}

// The reader's own error is remembered: its first, whatever the base makes of
// it. The end of the body is none.
func TestBodyGuardFailure(t *testing.T) {
	b := &body{rc: io.NopCloser(io.MultiReader(newString("x"), fails{net.ErrClosed}))}
	for range 2 {
		b.Read(make([]byte, 4))
	}
	if b.failure() != net.ErrClosed {
		t.Errorf("failure = %v", b.failure())
	}
	b.rc = io.NopCloser(fails{errors.New("another")})
	b.Read(make([]byte, 4))
	b.Close()
	b.Read(make([]byte, 4))
	if b.failure() != net.ErrClosed {
		t.Errorf("failure = %v, want the first", b.failure())
	}
}

// Close interrupts a Read that blocks, as the base relies on, and what that
// Read returns is not the reader's fault.
func TestBodyGuardInterrupted(t *testing.T) {
	for name, end := range map[string]func(*body){
		"close": func(b *body) { b.Close() },
		"fail":  func(b *body) { b.settle(true) },
	} {
		pr, pw := io.Pipe()
		entered := make(chan struct{})
		b := &body{rc: struct {
			io.Reader
			io.Closer
		}{io.MultiReader(readFunc(func([]byte) (int, error) { close(entered); return 0, io.EOF }), pr), pr}}
		done := make(chan error)
		go func() {
			_, err := b.Read(make([]byte, 4))
			done <- err
		}()
		<-entered
		end(b)
		if err := <-done; err == nil {
			t.Errorf("%s: Read has succeeded", name)
		}
		if b.failure() != nil {
			t.Errorf("%s: failure = %v", name, b.failure())
		}
		if b.handOn() != nil {
			t.Errorf("%s: a body that was read was handed on", name)
		}
		pw.Close()
	}
}

// All at once: the body is closed once, by whomever. For the race detector.
func TestBodyGuardConcurrently(t *testing.T) {
	for range 200 {
		src := newSource()
		b := &body{rc: src}
		var handed io.ReadCloser
		var wg sync.WaitGroup
		for _, f := range []func(){
			func() { b.Read(make([]byte, 1)) },
			func() { b.Close() },
			func() { b.Close() },
			func() { b.settle(false) },
			func() { b.settle(true) },
			func() { handed = b.handOn() },
			func() { b.failure() },
		} {
			wg.Go(f)
		}
		wg.Wait()
		want := 1
		if handed != nil {
			want = 0 // the next attempt's to close
		}
		if got := src.closes(); got != want {
			t.Fatalf("closed %d times, want %d", got, want)
		}
	}
}

// net/http sends a request again by itself, and asks GetBody for that. Each
// body is closed once, and if GetBody fails its error is what the caller gets.
func TestBodyGuardRewound(t *testing.T) {
	for _, w := range ours {
		for _, getBodyFails := range []bool{false, true} {
			p := newPlay(t, func(c *faultnet.PeerConn, id uint32) { c.Reset(id, http2.ErrCodeRefusedStream) })
			c := w.client(t, new(faultnet.Dialer), p.ClientTLS())
			mustGet(t, c, p.URL())
			bodies := []*source{newSource()}
			req := request(t, "POST", p.URL(), nil)
			req.Body, req.ContentLength = bodies[0], 7
			cannot := errors.New("cannot be had again")
			req.GetBody = func() (io.ReadCloser, error) {
				if getBodyFails {
					return nil, cannot
				}
				bodies = append(bodies, newSource())
				return bodies[len(bodies)-1], nil
			}
			resp, err := c.Transport.RoundTrip(req)
			if getBodyFails {
				if err != cannot || p.count("POST") != 1 {
					t.Errorf("%s: sent %d times, err = %v", w.name, p.count("POST"), err)
				}
			} else {
				if err != nil {
					t.Fatal(err)
				}
				drain(resp)
				if p.count("POST") != 2 || len(bodies) != 2 {
					t.Errorf("%s: sent %d times, with %d bodies", w.name, p.count("POST"), len(bodies))
				}
			}
			for i, b := range bodies {
				eventually(t, "the body is closed", func() bool { return b.closes() > 0 })
				if n := b.closes(); n != 1 {
					t.Errorf("%s: body %d was closed %d times", w.name, i, n)
				}
			}
		}
	}
}
