package deadconn

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

var writeErrors = []error{net.ErrClosed, syscall.EPIPE, syscall.ECONNRESET}

// golang/go#39750: the writes of a pooled connection fail while its reader
// sleeps. net/http loses one request a death.
func TestDeathsInTurn(t *testing.T) {
	const deaths = 20
	run := func(t *testing.T, w way, werr error) (failed, dials int) {
		s := newServer(t, ok)
		d := new(faultnet.Dialer)
		c := w.client(t, d, s.ClientTLS())
		mustGet(t, c, s.URL)
		for range deaths {
			failWrites(d, werr)
			if err := get(c, s.URL); err != nil {
				if !errors.Is(err, werr) {
					t.Fatalf("another error than the one provoked: %v", err)
				}
				failed++
				mustGet(t, c, s.URL)
			}
		}
		return failed, d.Dials() - 1
	}
	for _, werr := range writeErrors {
		t.Run(werr.Error(), func(t *testing.T) {
			if failed, _ := run(t, bare, werr); failed != deaths {
				t.Errorf("net/http lost %d requests, not %d: has the fault been cured?", failed, deaths)
			}
			for _, w := range ours {
				failed, dials := run(t, w, werr)
				if failed != 0 || dials < deaths || w.name == owned.name && dials != deaths || dials > 2*deaths {
					t.Errorf("%s: %d failures and %d dials in %d deaths, want 0 and one a death", w.name, failed, dials, deaths)
				}
			}
		})
	}
}

// The same under load: 32 workers, a death every 100 ms.
func TestDeathsUnderLoad(t *testing.T) {
	load := 5 * time.Second
	if testing.Short() {
		load = time.Second
	}
	other := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	run := func(t *testing.T, w way, load time.Duration) (failed int64, deaths, dials int) {
		s := newServer(t, ok)
		d := new(faultnet.Dialer)
		cfg := s.ClientTLS()
		c := w.client(t, d, cfg)
		// A stream to another host is being read all the while.
		resp, err := c.Get(other.URL)
		if err != nil {
			t.Fatal(err)
		}
		stream := d.Last()
		ended := make(chan error, 1)
		go func() { ended <- drain(resp) }()

		mustGet(t, c, s.URL)
		var wg sync.WaitGroup
		var nfailed, sent atomic.Int64
		var done [32]atomic.Int64 // by worker
		stop := make(chan struct{})
		for i := range done {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					sent.Add(1)
					// Only what RoundTrip returns: a connection that dies
					// while a body is read takes the body with it.
					resp, err := c.Get(s.URL)
					if err == nil {
						drain(resp)
					} else {
						if nfailed.Add(1) <= 3 {
							t.Logf("%s: a failure: %v", w.name, err)
						}
					}
					done[i].Add(1)
				}
			})
		}
		// A request that meets two deaths is lost, by rule. On a busy machine
		// it may be under way for long: the next death waits until all that
		// have met the last one are done.
		var next [len(done)]int64
		settled := func() bool {
			for i := range done {
				if done[i].Load() < next[i] {
					return false
				}
			}
			return true
		}
		for end := time.After(load); ; {
			select {
			case <-end:
				close(stop)
			case <-time.After(100 * time.Millisecond):
				if l := inUse(d); l != nil && l != stream && settled() {
					l.FailWrites(writeErrors[deaths%len(writeErrors)])
					deaths++
					for i := range done {
						next[i] = done[i].Load() + 2
					}
				}
				continue
			}
			break
		}
		wg.Wait()
		if stream.Closed() {
			t.Errorf("%s: the connection to another host was closed", w.name)
		}
		select {
		case err := <-ended:
			t.Errorf("%s: the stream to another host ended: %v", w.name, err)
		default:
		}
		resp.Body.Close()
		<-ended
		t.Logf("%s: %d requests, %d failed, %d deaths, %d dials", w.name, sent.Load(), nfailed.Load(), deaths, d.Dials())
		return nfailed.Load(), deaths, d.Dials()
	}
	if failed, _, _ := run(t, bare, time.Second); failed == 0 {
		t.Error("net/http lost no request: has the fault been cured?")
	}
	for _, w := range ours {
		failed, deaths, dials := run(t, w, load)
		if failed != 0 {
			t.Errorf("%s: %d requests failed", w.name, failed)
		}
		if w.name == owned.name && dials > 3*deaths {
			t.Errorf("%s: %d dials in %d deaths, want at most 3 a death", w.name, dials, deaths)
		}
	}
}

// The server has run the request when the connection ends.
func TestProcessedThenDied(t *testing.T) {
	const payload = "payload"
	for _, w := range ours {
		for _, tt := range []struct {
			method string
			key    bool
			again  bool
		}{
			{"GET", false, true},
			{"PUT", false, true},
			{"DELETE", false, true},
			{"POST", true, true},
			{"POST", false, false},
			{"PATCH", false, false},
		} {
			t.Run(fmt.Sprintf("%s/%s key=%v", w.name, tt.method, tt.key), func(t *testing.T) {
				var runs atomic.Int64
				var s *faultnet.Server
				s = newServer(t, func(w http.ResponseWriter, r *http.Request) {
					b, _ := io.ReadAll(r.Body)
					if r.URL.Path == "/warm" {
						return
					}
					if r.Method != "GET" && string(b) != payload {
						t.Errorf("body %q", b)
					}
					if runs.Add(1) == 1 {
						s.KillConns()
						<-r.Context().Done()
					}
				})
				d := new(faultnet.Dialer)
				c := w.client(t, d, s.ClientTLS())
				mustGet(t, c, s.URL+"/warm")
				req := request(t, tt.method, s.URL, nil)
				if tt.method != "GET" {
					req = request(t, tt.method, s.URL, newString(payload))
				}
				if tt.key {
					req.Header.Set("Idempotency-Key", "1")
				}
				resp, err := c.Do(req)
				if err == nil {
					drain(resp)
				}
				want := int64(1)
				if tt.again {
					want = 2
				}
				if runs.Load() != want || (err == nil) != tt.again {
					t.Errorf("ran %d times, err %v; want %d times", runs.Load(), err, want)
				}
				if !tt.again && !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Errorf("err = %v, want net/http's own", err)
				}
			})
		}
	}
}

// The connection was dead before the POST was sent: it runs once.
func TestDeadBeforePOST(t *testing.T) {
	for _, werr := range writeErrors {
		for _, tt := range []struct {
			name string
			body func() io.Reader
		}{
			{"GetBody", func() io.Reader { return newString("payload") }},
			{"io.Reader", func() io.Reader { return onlyReader("payload") }},
			{"no body", func() io.Reader { return nil }},
		} {
			t.Run(werr.Error()+"/"+tt.name, func(t *testing.T) {
				run := func(w way) error {
					var runs atomic.Int64
					s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
						if r.Method == "POST" {
							if b, _ := io.ReadAll(r.Body); string(b) != "payload" && tt.name != "no body" {
								t.Errorf("body %q", b)
							}
							runs.Add(1)
						}
					})
					d := new(faultnet.Dialer)
					c := w.client(t, d, s.ClientTLS())
					mustGet(t, c, s.URL)
					failWrites(d, werr)
					resp, err := c.Do(request(t, "POST", s.URL, tt.body()))
					if err != nil {
						return err
					}
					drain(resp)
					if runs.Load() != 1 {
						t.Errorf("%s: the POST ran %d times", w.name, runs.Load())
					}
					return nil
				}
				if err := run(bare); err == nil {
					t.Error("net/http sent it: has the fault been cured?")
				}
				if err := run(owned); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// A slow server is not a dead one.
func TestSlowServer(t *testing.T) {
	for _, w := range ours {
		t.Run(w.name, func(t *testing.T) {
			s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/slow" {
					<-r.Context().Done()
				}
			})
			d := new(faultnet.Dialer)
			c := w.client(t, d, s.ClientTLS())
			mustGet(t, c, s.URL)
			for range 40 {
				req := request(t, "GET", s.URL+"/slow", nil).WithContext(withTimeout(t, 10*time.Millisecond))
				if resp, err := c.Do(req); err == nil {
					drain(resp)
					t.Fatal("no timeout")
				}
			}
			mustGet(t, c, s.URL)
			if d.Dials() != 1 {
				t.Errorf("%d dials, want the same connection all along", d.Dials())
			}
		})
	}
}

// 300 deaths leave nothing behind. TestMain looks for goroutines.
func TestManyDeathsLeaveNothing(t *testing.T) {
	s := newServer(t, ok)
	d := new(faultnet.Dialer)
	reg := new(Registry)
	tr := Options{
		Base:     &http.Transport{DialContext: d.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true},
		Registry: reg,
	}.NewTransport()
	c := &http.Client{Transport: tr}
	mustGet(t, c, s.URL)
	for i := range 300 {
		failWrites(d, writeErrors[i%len(writeErrors)])
		mustGet(t, c, s.URL)
	}
	if reg.Len() != 1 || d.Open() != 1 {
		t.Errorf("%d connections tracked, %d open, want 1", reg.Len(), d.Open())
	}
	if st := tr.Stats(); st.Rescued != 300 || st.Lost != 0 || st.Open != 1 {
		t.Errorf("stats %+v", st)
	}
	if err := tr.CloseConnections(); err != nil {
		t.Error(err)
	}
	eventually(t, "nothing tracked", func() bool { return reg.Len() == 0 })
}
