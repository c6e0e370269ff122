package deadconn

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// syncBuffer is a log that may be written to and read at once.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// recorder notes what the hooks are told.
type recorder struct {
	mu        sync.Mutex
	tracked   []ConnTrackedInfo
	evicted   []ConnEvictedInfo
	closed    []ConnClosedInfo
	merged    []DialMergedInfo
	retried   []RequestRetriedInfo
	done      []RequestDoneInfo
	suspected []ConnSuspectedInfo
}

func note[T any](r *recorder, to *[]T) func(T) {
	return func(info T) {
		r.mu.Lock()
		defer r.mu.Unlock()
		*to = append(*to, info)
	}
}

func (r *recorder) hooks() *Hooks {
	return &Hooks{
		ConnTracked:    note(r, &r.tracked),
		ConnSuspected:  note(r, &r.suspected),
		ConnEvicted:    note(r, &r.evicted),
		ConnClosed:     note(r, &r.closed),
		DialMerged:     note(r, &r.merged),
		RequestRetried: note(r, &r.retried),
		RequestDone:    note(r, &r.done),
	}
}

// One death, as it is told to two parties, in the log, the autopsy and the
// counters.
func TestDeathIsTold(t *testing.T) {
	s := newServer(t, ok)
	d := new(faultnet.Dialer)
	var one, two recorder
	log := new(syncBuffer)
	tr := Options{
		Base:   &http.Transport{DialContext: d.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true},
		Hooks:  JoinHooks(one.hooks(), nil, two.hooks()),
		Logger: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}.NewTransport()
	c := &http.Client{Transport: tr}
	mustGet(t, c, s.URL)
	dying := d.Last()
	dying.FailWrites(syscall.EPIPE)
	mustGet(t, c, s.URL)
	if err := tr.CloseConnections(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "two connections closed and told", func() bool {
		two.mu.Lock()
		defer two.mu.Unlock()
		return len(two.closed) == 2
	})
	for i, r := range []*recorder{&one, &two} {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.tracked) != 2 || len(r.evicted) != 1 || len(r.closed) != 2 || len(r.retried) != 1 || len(r.done) != 1 {
			t.Fatalf("party %d: %d tracked, %d evicted, %d closed, %d retried, %d done", i,
				len(r.tracked), len(r.evicted), len(r.closed), len(r.retried), len(r.done))
		}
	}
	a := one.evicted[0].Autopsy
	if a.Cause != KindReset || a.Err == nil || a.Addr != s.Addr() || a.Protocol != "h2" || !a.TLS || a.Rescued != 1 || a.Lost != 0 ||
		a.BytesRead == 0 || a.BytesWritten == 0 || a.Age <= 0 || a.LocalAddr.String() != dying.LocalAddr().String() {
		t.Errorf("autopsy %+v", a)
	}
	if all := tr.Autopsies(); len(all) != 1 || all[0].Cause != KindReset || all[0].Rescued != 1 {
		t.Errorf("autopsies %+v", all)
	}
	if r := one.retried[0]; r.Method != "GET" || r.Host != s.Addr() || r.Kind != KindReset || !r.Evicted || r.Context == nil {
		t.Errorf("retried %+v", r)
	}
	if r := one.done[0]; r.Err != nil || r.First == nil {
		t.Errorf("done %+v", r)
	}
	text := log.String()
	for _, want := range []string{"level=WARN", "cause=reset", "addr=" + s.Addr(), "rescued=1", "level=DEBUG", "rescued=true"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in the log:\n%s", want, text)
		}
	}
	st := tr.Stats()
	if st.Dialed != 2 || st.Evicted != 1 || st.EvictedBy[KindReset] != 1 || st.Retried != 1 || st.Rescued != 1 {
		t.Errorf("stats %+v", st)
	}
	b, err := json.Marshal(st)
	if err != nil || !strings.Contains(string(b), `"evicted_by":{"reset":1}`) {
		t.Errorf("%s, %v", b, err)
	}
}

// What a live connection looks like.
func TestConnections(t *testing.T) {
	s := newServer(t, ok)
	tr := Options{Base: &http.Transport{TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true}}.NewTransport()
	defer tr.CloseConnections()
	mustGet(t, &http.Client{Transport: tr}, s.URL)
	// net/http may be through with the request before we have noted what the
	// handshake gave.
	eventually(t, "h2", func() bool { return tr.Connections(1)[0].Protocol == "h2" })
	conns := tr.Connections(0)
	if len(conns) != 1 || len(tr.Connections(1)) != 1 {
		t.Fatalf("%d connections", len(conns))
	}
	c := conns[0]
	if c.Addr != s.Addr() || !c.TLS || c.BytesRead == 0 || c.SinceRead <= 0 || c.Age < c.SinceRead || c.State != ConnActive {
		t.Errorf("%+v", c)
	}
	eventually(t, "idle", func() bool { return tr.Connections(1)[0].State == ConnIdle })
}

// A storm of evictions writes a few lines and sums up the others, keeps
// nothing without bound, and holds nobody up though the hook sleeps.
func TestStormOfEvictions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const seconds, perSecond, hosts = 10, 5000, 2
		log := new(syncBuffer)
		tr := Options{
			Logger: slog.New(slog.NewTextHandler(log, nil)),
			Hooks:  &Hooks{ConnEvicted: func(ConnEvictedInfo) { time.Sleep(time.Second) }},
		}.NewTransport()
		start := time.Now()
		for range seconds {
			for i := range perSecond {
				c := tr.reg.track(new(restConn), fmt.Sprintf("host%d.test:443", i%hosts), tr)
				c.evict(KindReset, net.ErrClosed)
				c.Close()
			}
			time.Sleep(time.Second)
		}
		if took := time.Since(start); took != seconds*time.Second {
			t.Errorf("evictions took %v: somebody was held up", took)
		}
		if st := tr.Stats(); st.Evicted != seconds*perSecond || st.HooksDropped < seconds*perSecond-maxEvents-100 {
			t.Errorf("stats %+v", st)
		}
		if n := len(tr.Autopsies()); n != maxAutopsies {
			t.Errorf("%d autopsies are kept", n)
		}
		time.Sleep(2 * maxEvents * time.Second)
		synctest.Wait()
	})
	synctest.Test(t, func(t *testing.T) {
		const seconds, perSecond = 10, 1000
		log := new(syncBuffer)
		tr := Options{Logger: slog.New(slog.NewTextHandler(log, nil))}.NewTransport()
		for range seconds * 10 {
			for range perSecond / 10 {
				c := tr.reg.track(new(restConn), "host.test:443", tr)
				c.evict(KindReset, net.ErrClosed)
				c.Close()
			}
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(3 * time.Second)
		text := log.String()
		lines := strings.Count(text, "\n")
		if lines > 10*(seconds+2) || lines < seconds {
			t.Errorf("%d lines in %d s", lines, seconds)
		}
		// Nothing is lost but the detail.
		told := 0
		for line := range strings.Lines(text) {
			n := 1
			if i := strings.Index(line, "count="); i >= 0 {
				fmt.Sscanf(line[i:], "count=%d", &n)
			}
			told += n
		}
		if told != seconds*perSecond {
			t.Errorf("the log accounts for %d evictions of %d: %+v", told, seconds*perSecond, tr.Stats())
		}
	})
}

// No header, body, path, query or credential gets into a hook, a log line, an
// error text or a counter.
func TestNoSecretsAreTold(t *testing.T) {
	const secret = "s3cr3t"
	var s *faultnet.Server
	var kill atomic.Bool
	s = newServer(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if kill.Load() {
			s.KillConns()
			<-r.Context().Done()
		}
	})
	for _, w := range []string{"NewTransport", "Wrap"} {
		t.Run(w, func(t *testing.T) {
			d := new(faultnet.Dialer)
			var told recorder
			log := new(syncBuffer)
			o := Options{Hooks: told.hooks(), Logger: slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
			base := &http.Transport{DialContext: d.DialContext, TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true}
			var rt http.RoundTripper
			if w == "Wrap" {
				rt = o.Wrap(base)
			} else {
				o.Base = base
				rt = o.NewTransport()
			}
			tr := rt.(*Transport)
			defer d.CloseAll()
			var texts []string
			send := func(method string) {
				req := request(t, method, s.URL+"/"+secret+"?q="+secret, newString(secret))
				req.URL.User = nil
				req.Header.Set("Authorization", "Bearer "+secret)
				req.Header.Set("X-"+secret, "1")
				req.SetBasicAuth(secret, secret)
				resp, err := rt.RoundTrip(req)
				if err != nil {
					texts = append(texts, err.Error(), fmt.Sprintf("%+v", err))
					return
				}
				drain(resp)
			}
			send("GET")
			for _, method := range []string{"GET", "PUT", "POST"} {
				live(d).FailWrites(syscall.EPIPE) // rescued
				send(method)
				kill.Store(true) // lost, twice over
				send(method)
				kill.Store(false)
				send(method)
			}
			eventually(t, "told", func() bool {
				told.mu.Lock()
				defer told.mu.Unlock()
				return len(told.evicted) >= 6 && len(told.done) >= 3
			})
			told.mu.Lock()
			defer told.mu.Unlock()
			for i := range told.retried {
				told.retried[i].Context = nil // the caller's own
			}
			for i := range told.done {
				told.done[i].Context = nil
			}
			texts = append(texts, fmt.Sprintf("%+v", told.tracked), fmt.Sprintf("%+v", told.evicted), fmt.Sprintf("%+v", told.closed),
				fmt.Sprintf("%+v", told.retried), fmt.Sprintf("%+v", told.done), log.String(), fmt.Sprintf("%+v", tr.Autopsies()),
				fmt.Sprintf("%+v", tr.Connections(0)), fmt.Sprintf("%+v", tr.Stats()))
			for _, text := range texts {
				if strings.Contains(strings.ToLower(text), secret) {
					t.Errorf("a secret is told: %s", text)
				}
			}
			if len(texts) < 10 {
				t.Errorf("no error was returned: %d texts", len(texts))
			}
		})
	}
}

// With all of it on a GET has at most 3 more allocations.
func TestAllocsObserved(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	s := newServer(t, ok)
	allocs := func(o Options) float64 {
		o.Base = &http.Transport{TLSClientConfig: s.ClientTLS(), ForceAttemptHTTP2: true}
		tr := o.NewTransport()
		defer tr.CloseConnections()
		req, _ := http.NewRequest("GET", s.URL, nil)
		roundTrip(t, tr, req)
		roundTrip(t, tr, req)
		return testing.AllocsPerRun(1000, func() { roundTrip(t, tr, req) })
	}
	var r recorder
	off := allocs(Options{})
	on := allocs(Options{Hooks: r.hooks(), Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if on > off+3 {
		t.Errorf("%v allocations with hooks and log, %v without", on, off)
	}
}
