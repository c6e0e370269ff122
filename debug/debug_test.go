package debug

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/html"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
)

// What died, why, and what was done about it.
func TestPage(t *testing.T) {
	r := newRig(t, "orders.test", "auth.test")
	h := Handler(r.tr)
	if text := textOf(t, fetch(t, h, "/")); !strings.Contains(text, "Quiet No connection has died.") {
		t.Errorf("before anything happened: %s", text)
	}
	r.mustGet("https://orders.test")
	r.mustGet("https://auth.test")
	r.die("orders.test", 0, epipe)
	r.die("auth.test", 5, (*faultnet.Conn).Reset)
	text := textOf(t, fetch(t, h, "/"))
	for _, want := range []string{
		"Deaths 2 connections died in the last 15 min, the last one just now: reset 2.",
		"2 connections open now", "0 connections look dead now", "2 connections died", "0 requests lost",
		"Since the start 6 requests were rescued, 0 lost.",
		"reset 2 deaths",            // the lane
		"UTC: reset, auth.test:443", // a mark
		"orders.test:443", "broken pipe", "connection reset by peer", "h2, TLS, lived ",
		"reset : the peer, or something on the way, reset it",
		"Closed. 1 request was sent again and answered.",
		"evicted_by reset 2 the same, by cause",
		"dialed 4 connections that were dialed",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for _, c := range r.tr.Connections(0) {
		if !strings.Contains(text, c.LocalAddr+" \u2192 "+c.RemoteAddr) {
			t.Errorf("no %s in\n%s", c.LocalAddr, text)
		}
	}

	r.lose("orders.test")
	text = textOf(t, fetch(t, h, "/"))
	for _, want := range []string{
		"Requests lost 3 connections died", "1 requests lost", "it has lost requests",
		"Closed. 1 request was sent again and failed again.",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

// A connection that looks dead is to be seen while it is.
func TestSuspect(t *testing.T) {
	r := newRig(t, "orders.test")
	r.mustGet("https://orders.test")
	if err := faultnet.BlackholeSocket(r.live("orders.test:443")); err != nil {
		t.Skip(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.mustGet("https://orders.test")
	}()
	defer func() { <-done }()
	h := Handler(r.tr)
	var s snapshot
	eventually(t, "suspect", func() bool {
		s = decode(t, fetch(t, h, "/?format=json")).snapshot
		return s.Status == "suspect"
	})
	if c := s.Connections.List[0]; c.State != deadconn.ConnSuspect || c.Unanswered == nil || c.Path == nil || c.Path.Unacked == 0 {
		t.Errorf("%+v", c)
	}
	text := textOf(t, fetch(t, h, "/"))
	if !strings.Contains(text, "Suspect No connection has died. 1 looks dead now.") || !strings.Contains(text, "not acknowledged") {
		t.Error(text)
	}
}

// decoded is what a program makes of the JSON.
type decoded struct {
	snapshot
	Counters map[string]any `json:"counters"`
}

func decode(t *testing.T, text string) decoded {
	t.Helper()
	var d decoded
	dec := json.NewDecoder(strings.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&d); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	if dec.More() {
		t.Errorf("more than one document: %s", text)
	}
	return d
}

// The JSON has all that the page is made of.
func TestJSON(t *testing.T) {
	r := newRig(t, "orders.test")
	r.mustGet("https://orders.test")
	r.die("orders.test", 3, epipe)
	r.lose("orders.test")
	r.mustGet("https://orders.test")
	want := look(r.tr, time.Now())
	got := decode(t, fetch(t, handler{func() snapshot { return want }}, "/?format=json"))
	if n := got.Counters; n["dialed"] != 3. || n["lost"] != 1. || !reflect.DeepEqual(n["evicted_by"], map[string]any{"reset": 2.}) {
		t.Errorf("counters %v", n)
	}
	got.snapshot.Counters = want.Counters
	if !reflect.DeepEqual(got.snapshot, want) {
		t.Errorf("got  %+v\nwant %+v", got.snapshot, want)
	}
	d, c := want.Deaths[0], want.Connections.List[0]
	if want.Version != 1 || want.Status != "lost" || d.Lost != 1 || d.Cause != "reset" || d.Age == nil || *d.Age > 60 || c.Age > 60 || !c.TLS {
		t.Errorf("%+v", want)
	}

	// A list without anything in it is still a list.
	text := fetch(t, Handler(deadconn.NewTransport()), "/?format=json")
	for _, want := range []string{`"deaths": []`, `"list": []`, `"by_state": {}`} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in %s", want, text)
		}
	}
}

// The package comment tells of every field, and the page of every counter.
func TestSchema(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	told := make(map[string]bool)
	for _, word := range strings.FieldsFunc(string(doc), func(r rune) bool { return r == ' ' || r == ',' || r == '\t' || r == '\n' }) {
		told[word] = true
	}
	var walk func(reflect.Type)
	walk = func(typ reflect.Type) {
		for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice {
			typ = typ.Elem()
		}
		if typ.Kind() != reflect.Struct || typ == reflect.TypeFor[time.Time]() || typ == reflect.TypeFor[deadconn.Stats]() {
			return
		}
		for _, f := range reflect.VisibleFields(typ) {
			if name := f.Tag.Get("json"); !told[name] {
				t.Errorf("doc.go does not tell of %q", name)
			}
			walk(f.Type)
		}
	}
	walk(reflect.TypeFor[snapshot]())

	rows := counterRows(deadconn.Stats{})
	for _, f := range reflect.VisibleFields(reflect.TypeFor[deadconn.Stats]()) {
		name := f.Tag.Get("json")
		if !slices.ContainsFunc(rows, func(c counter) bool { return c.Name == name }) {
			t.Errorf("deadconn.Stats has a counter %q that counterRows does not know", name)
		}
	}
}

const hostile = `"'><script>alert(1)</script><img src=x onerror=alert(1)>{{.}}` + "\u202e\x1b[31m\r\n\x00\xff`</style></title></svg>"

// hostileConn is a connection whose texts are.
type hostileConn struct{ net.Conn }

type hostileAddr struct{}

func (hostileAddr) Network() string { return hostile }
func (hostileAddr) String() string  { return hostile }

type hostileError struct{}

func (hostileError) Error() string { return hostile + strings.Repeat("x", 10*maxText) }
func (hostileError) Unwrap() error { return syscall.ECONNRESET }

func (c hostileConn) LocalAddr() net.Addr  { return hostileAddr{} }
func (c hostileConn) RemoteAddr() net.Addr { return hostileAddr{} }

func (c hostileConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		err = hostileError{}
	}
	return n, err
}

// Nothing that others say becomes more than text.
func TestHostile(t *testing.T) {
	s := faultnet.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/die" {
			panic(http.ErrAbortHandler)
		}
		io.WriteString(w, "ok")
	}), faultnet.NoTLS())
	defer s.Close()
	tr := deadconn.Options{Base: &http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, s.Addr())
			return hostileConn{c}, err
		},
	}}.NewTransport()
	defer tr.CloseIdleConnections()
	const host = `<script>alert('1')</script>"<b>`
	get := func(path string) error {
		req, err := http.NewRequest("PUT", "http://example.test"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.URL.Host = host
		req.Host = "example.test"
		resp, err := tr.RoundTrip(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	if err := get("/"); err != nil {
		t.Fatal(err)
	}
	if err := get("/die"); err == nil {
		t.Fatal("no error")
	}
	if err := get("/"); err != nil {
		t.Fatal(err)
	}

	snap := look(tr, time.Now())
	if len(snap.Deaths) == 0 || !strings.Contains(snap.Deaths[0].Error, "<script>") || !strings.Contains(snap.Deaths[0].Addr, "<script>") ||
		snap.Connections.List[0].Local == "" {
		t.Fatalf("the hostile texts did not get here: %+v", snap)
	}
	h := Handler(tr)
	page := fetch(t, h, "/")
	for _, bad := range []string{"<script", "<img", "<b>\"", "\u202e", "\x1b", "\x00", "{{.}}</", strings.Repeat("x", 2*maxText)} {
		if strings.Contains(page, bad) {
			t.Errorf("%q is in the page", bad)
		}
	}
	for _, want := range []string{"&lt;script&gt;alert(1)", `\u202e`, `\x1b`, "[cut]"} {
		if !strings.Contains(page, want) {
			t.Errorf("%q is not in the page", want)
		}
	}
	calm := elements(t, fetch(t, Handler(newRig(t).tr), "/"))
	for name := range elements(t, page) {
		switch name {
		// What a page with deaths and connections has besides.
		case "figure", "figcaption", "svg svg", "svg title", "svg text", "svg tspan", "svg path", "svg line", "svg rect", "svg circle",
			"ol", "div", "time", "thead", "code":
			continue
		}
		if !calm[name] {
			t.Errorf("there is a %s in the page", name)
		}
	}
	text := fetch(t, h, "/?format=json")
	if strings.Contains(text, "<script") {
		t.Errorf("a sniffing browser would see a script: %s", text)
	}
	decode(t, text)
}

// elements returns the names of page's elements, and fails the test if one has
// an attribute that could run or load something.
func elements(t *testing.T, page string) map[string]bool {
	t.Helper()
	root, err := html.Parse(strings.NewReader(page))
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]bool)
	for n := range root.Descendants() {
		if n.Type != html.ElementNode {
			continue
		}
		names[strings.TrimSpace(n.Namespace+" "+n.Data)] = true
		for _, a := range n.Attr {
			switch {
			case a.Key == "href" && n.Data == "a" && a.Val == "?format=json":
			case strings.HasPrefix(a.Key, "on"), a.Key == "href", a.Key == "src", a.Key == "style", a.Key == "action", a.Key == "http-equiv":
				t.Errorf("<%s %s=%q>", n.Data, a.Key, a.Val)
			}
		}
	}
	return names
}

// textOf returns the text of a page, one space between words.
func textOf(t *testing.T, page string) string {
	t.Helper()
	root, err := html.Parse(strings.NewReader(page))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for n := range root.Descendants() {
		if n.Type == html.TextNode && n.Parent.Data != "style" {
			b.WriteString(n.Data + " ")
		}
	}
	return strings.Join(strings.Fields(b.String()), " ")
}

func TestMethodsAndHeaders(t *testing.T) {
	h := Handler(deadconn.NewTransport())
	s := httptest.NewServer(h)
	defer s.Close()
	for _, tt := range []struct {
		method, query string
		code          int
		contentType   string
	}{
		{"GET", "", 200, "text/html; charset=utf-8"},
		{"GET", "?format=html", 200, "text/html; charset=utf-8"},
		{"GET", "?format=json", 200, "application/json"},
		{"HEAD", "", 200, "text/html; charset=utf-8"},
		{"HEAD", "?format=json", 200, "application/json"},
		{"GET", "?format=<b>", 400, "text/plain; charset=utf-8"},
		{"POST", "", 405, "text/plain; charset=utf-8"},
		{"PUT", "?format=json", 405, "text/plain; charset=utf-8"},
		{"DELETE", "", 405, "text/plain; charset=utf-8"},
		{"OPTIONS", "", 405, "text/plain; charset=utf-8"},
	} {
		req, err := http.NewRequest(tt.method, s.URL+"/"+tt.query, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := s.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		hd := resp.Header
		if resp.StatusCode != tt.code || hd.Get("Content-Type") != tt.contentType || hd.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s %s: %d, %v", tt.method, tt.query, resp.StatusCode, hd)
		}
		if (tt.method == "HEAD") != (len(body) == 0) || resp.ContentLength <= 0 {
			t.Errorf("%s %s: %d bytes of %d", tt.method, tt.query, len(body), resp.ContentLength)
		}
		if tt.code == 405 && hd.Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: Allow %q", tt.method, hd.Get("Allow"))
		}
		if tt.code == 200 && (hd.Get("Cache-Control") != "no-store" || hd.Get("Content-Security-Policy") != policy) {
			t.Errorf("%s %s: %v", tt.method, tt.query, hd)
		}
	}
}

// The style that the policy lets through is the one that is in the page.
func TestStyle(t *testing.T) {
	page := fetch(t, Handler(deadconn.NewTransport()), "/")
	_, style, _ := strings.Cut(page, "<style>")
	style, _, _ = strings.Cut(style, "</style>")
	if style != pageCSS {
		t.Errorf("html/template has changed the style:\n%s", style)
	}
	if strings.Contains(style, "url(") || strings.Contains(style, "@import") {
		t.Error("the style loads something")
	}
	if !strings.HasPrefix(policy, "default-src 'none'; style-src 'sha256-"+styleHash()+"';") || strings.Contains(policy, "unsafe") {
		t.Error(policy)
	}
}

// The page is asked for by many while connections live and die.
func TestConcurrency(t *testing.T) {
	r := newRig(t, "orders.test", "auth.test")
	h := Handler(r.tr)
	var traffic, lookers sync.WaitGroup
	stop := make(chan struct{})
	for _, host := range []string{"orders.test", "auth.test"} {
		traffic.Go(func() {
			for range 10 { // in turn: a request that met two deaths would be lost, by rule
				r.mustGet("https://" + host)
				var clients sync.WaitGroup
				for range 3 {
					clients.Go(func() {
						for range 4 {
							r.mustGet("https://" + host)
						}
					})
				}
				if c := r.dialers[host+":443"].Last(); !c.Closed() {
					c.FailWrites(syscall.EPIPE)
				}
				clients.Wait()
			}
		})
	}
	for i := range 3 {
		lookers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if i == 0 {
					decode(t, fetch(t, h, "/?format=json"))
				} else if page := fetch(t, h, "/"); !strings.HasSuffix(page, "</html>\n") {
					t.Errorf("it ends in %q", page[len(page)-20:])
				}
			}
		})
	}
	traffic.Wait()
	close(stop)
	lookers.Wait()
	if s := look(r.tr, time.Now()); s.Counters.Evicted == 0 || s.Status != "deaths" {
		t.Errorf("nothing happened: %+v", s.Counters)
	}
}

// Of many connections those in trouble come first, and the others are counted.
func TestManyConnections(t *testing.T) {
	all := make([]deadconn.ConnInfo, 1000)
	for i := range all {
		all[i] = deadconn.ConnInfo{Addr: fmt.Sprintf("host%d.test:443", i), State: deadconn.ConnIdle, Age: time.Duration(i) * time.Second}
	}
	all[700].State, all[900].State, all[50].State = deadconn.ConnSuspect, deadconn.ConnDead, deadconn.ConnActive
	s := snapshot{Time: time.Now().UTC(), Connections: newConnections(all)}
	s.Status, s.Summary = s.sumUp()
	c := s.Connections
	if c.Total != 1000 || len(c.List) != 200 || c.ByState[deadconn.ConnIdle] != 997 {
		t.Errorf("%d, %d, %v", c.Total, len(c.List), c.ByState)
	}
	if c.List[0].Addr != "host900.test:443" || c.List[1].Addr != "host700.test:443" || c.List[2].Addr != "host0.test:443" {
		t.Errorf("%+v", c.List[:3])
	}
	text := textOf(t, fetch(t, handler{func() snapshot { return s }}, "/"))
	for _, want := range []string{"2 look dead now.", "1 dead, 1 suspect, 1 active, 997 idle", "And 800 more.", "2 connections look dead now"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %s", want, text[:1000])
		}
	}
}

// Causes can be told apart without colours, and are explained.
func TestCauses(t *testing.T) {
	seen := make(map[string]string)
	for k := deadconn.Kind(0); !strings.HasPrefix(k.String(), "kind("); k++ {
		if !k.Dead() {
			continue
		}
		cause := k.String()
		if other, ok := seen[shape(cause)]; ok {
			t.Errorf("%s has the shape of %s", cause, other)
		}
		seen[shape(cause)] = cause
		if shapes[cause] == "" || meanings[cause] == "" {
			t.Errorf("%s has no shape or no meaning of its own", cause)
		}
	}
	if len(seen) < 10 {
		t.Errorf("%d causes", len(seen))
	}
}

func TestTimeline(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	deaths := func(ages ...time.Duration) (d []death) {
		for i, age := range ages {
			d = append(d, death{Time: now.Add(-age), Cause: []string{"reset", "silent", "eof"}[i%3], Rescued: int64(i), Lost: int64(i % 2)})
		}
		return d
	}
	if newTimeline(nil, now) != nil {
		t.Error("a time line of nothing")
	}
	burst := make([]time.Duration, 100)
	for i := range burst {
		burst[i] = time.Second + time.Duration(i)*time.Microsecond
	}
	for _, tt := range []struct {
		name  string
		ages  []time.Duration
		older int
	}{
		{"one", []time.Duration{0}, 0},
		{"in the future, by the clock", []time.Duration{-time.Second}, 0},
		{"burst", burst, 0},
		{"a minute", []time.Duration{time.Second, 20 * time.Second, 59 * time.Second}, 0},
		{"an hour", []time.Duration{time.Second, 50 * time.Minute, 55 * time.Minute}, 0},
		{"with an old one", []time.Duration{time.Second, 2 * time.Second, 3 * time.Second, 4 * time.Second, 5 * time.Second, 50 * time.Hour}, 1},
		{"days", []time.Duration{20 * time.Hour, 45 * time.Hour, 150 * time.Hour}, 0},
		{"years", []time.Duration{time.Hour, 10000 * time.Hour, 20000 * time.Hour}, 0},
	} {
		tl := newTimeline(deaths(tt.ages...), now)
		marks, lost := 0, 0
		for _, l := range tl.Lanes {
			marks += len(l.Marks)
			for _, m := range l.Marks {
				if m.Lost {
					lost++
				}
				if m.Y < l.LabelY || m.Y > tl.Base-barHeight {
					t.Errorf("%s: a mark at %v in the lane at %v", tt.name, m.Y, l.LabelY)
				}
				if x := number(t, m.X); x < 1 || x > 99 {
					t.Errorf("%s: a mark at %v %%", tt.name, x)
				}
			}
		}
		if marks != len(tt.ages)-tt.older || tl.Older != tt.older {
			t.Errorf("%s: %d marks, %d older", tt.name, marks, tl.Older)
		}
		rescued, hanging := 0.0, 0
		for _, b := range tl.Bars {
			if b.Lost {
				hanging++
			} else {
				rescued = max(rescued, b.Height)
			}
			if b.Y < 0 || b.Y+b.Height > tl.Axis {
				t.Errorf("%s: a bar at %v of %v", tt.name, b.Y, tl.Axis)
			}
		}
		if (lost > 0) != (hanging > 0) || len(tt.ages) > 2 && rescued != barHeight {
			t.Errorf("%s: bars %+v", tt.name, tl.Bars)
		}
		// The labels of the ticks do not touch on a phone: 13 % is 42 pixels.
		last := 0.0
		for i, k := range tl.Ticks {
			x := number(t, k.X)
			if room := 13.0; x-last < room && i > 0 {
				t.Errorf("%s: ticks %+v", tt.name, tl.Ticks)
			}
			last = x
		}
		if n := len(tl.Ticks); n < 2 || n > 7 {
			t.Errorf("%s: ticks %+v", tt.name, tl.Ticks)
		}
	}
}

func number(t *testing.T, percent string) float64 {
	t.Helper()
	var x float64
	if _, err := fmt.Sscanf(percent, "%f%%", &x); err != nil {
		t.Fatal(err)
	}
	return x
}

// The status is what matters most.
func TestStatus(t *testing.T) {
	now := time.Now().UTC()
	for _, tt := range []struct {
		age     time.Duration // of the only death; 0: none
		lost    int64
		suspect int
		want    string
	}{
		{want: "quiet"},
		{age: time.Hour, lost: 1, want: "quiet"},
		{age: time.Minute, want: "deaths"},
		{age: time.Minute, suspect: 1, want: "suspect"},
		{suspect: 1, want: "suspect"},
		{age: time.Minute, suspect: 1, lost: 1, want: "lost"},
	} {
		s := snapshot{Time: now, Connections: connections{ByState: map[deadconn.ConnState]int{deadconn.ConnSuspect: tt.suspect}}}
		if tt.age > 0 {
			s.Counters.Evicted = 1
			s.Deaths = []death{{Time: now.Add(-tt.age), Cause: "eof", Lost: tt.lost}}
		}
		status, text := s.sumUp()
		if status != tt.want || text == "" || words[status] == "" {
			t.Errorf("%+v: %s, %s", tt, status, text)
		}
	}
}

func TestWords(t *testing.T) {
	for seconds, want := range map[float64]string{
		0: "0 s", 0.0000123: "0.012 ms", 0.0042: "4.2 ms", 0.25: "250 ms", 0.9999: "999 ms", 1: "1 s", 2.58: "2.5 s", 9.99: "9.9 s",
		59.9: "59 s", 60: "1 min", 200: "3 min 20 s", 3600: "1 h", 18180: "5 h 3 min", 187200: "2 d 4 h",
	} {
		if got := duration(seconds); got != want {
			t.Errorf("%v s: %q, not %q", seconds, got, want)
		}
	}
	for n, want := range map[int64]string{0: "0 B", 999: "999 B", 1000: "1.0 kB", 9949: "9.9 kB", 12345: "12 kB", 999499: "999 kB", 999500: "1.0 MB", 5e15: "5.0 PB"} {
		if got := size(n); got != want {
			t.Errorf("%d: %q, not %q", n, got, want)
		}
	}
	if got := count(1234567); got != "1\u202f234\u202f567" {
		t.Error(got)
	}
}

func TestNilTransport(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	Handler(nil)
}
