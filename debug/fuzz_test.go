package debug

import (
	"errors"
	"io"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/net/html"

	"github.com/deadconn/deadconn"
)

// textAddr is an address with a text of its own.
type textAddr string

func (a textAddr) Network() string { return string(a) }
func (a textAddr) String() string  { return string(a) }

// FuzzPage shows that no text becomes more than text, whoever wrote it: the
// page has the elements of one with harmless texts in their place, and the
// JSON has the same snapshot in it.
func FuzzPage(f *testing.F) {
	shapes := [][]byte{nil, {0}, {1, 1, 2, 0, 3, 1}, {3, 5, 1, 80, 2, 200, 90, 7, 1}, {0, 25, 1, 2, 3, 4, 5, 6, 7, 8}, []byte("\x02\x21\x92\x44\x81\x0f\x1f\x03\x77\x19\x21\x33")}
	for i, text := range []string{
		hostile, "", "plain", "<script>alert(1)</script>", `" onmouseover="alert(1)`, "&amp;&lt;<!--", "]]></title></style></svg>", "{{.}}",
		"\u202egnp.exe\u2066\u2028\u2029\u0085\ufeff", "\x00\x01\x1b[2J\x7f\u009b", "\xff\xfe\xc0\xaf\xed\xa0\x80", "line\r\nline\ttab",
		"\u00e4", "\xf0\x9f", "<", "\u20ac", "\U000e0001\u0301\u0301\u0301",
	} {
		f.Add(text, "10.0.0.1:2", hostile, uint16(i%2), shapes[i%len(shapes)])
		f.Add("host:443", text, text, uint16(i%3*maxText/3), shapes[(i+2)%len(shapes)])
	}
	f.Fuzz(func(t *testing.T, addr, socket, said string, times uint16, shape []byte) {
		const harmless = "text"
		if times = 1 + times%maxText; len(said)*int(times) < 3*maxText { // long texts by short inputs
			said = strings.Repeat(said, int(times))
		}
		s := fuzzSnapshot(shape, addr, socket, said)
		page := fetch(t, handler{func() snapshot { return s }}, "/")
		calm := fetch(t, handler{func() snapshot {
			tame := func(s string) string {
				if s == "" {
					return ""
				}
				return harmless
			}
			return fuzzSnapshot(shape, tame(addr), tame(socket), tame(said))
		}}, "/")
		tags, text := fuzzTokens(t, page)
		want, _ := fuzzTokens(t, calm)
		if !slices.Equal(tags, want) {
			t.Errorf("other elements than with harmless texts:\n%q\n%q", tags, want)
		}
		for _, r := range page {
			if !strconv.IsPrint(r) && r != '\n' && r != '\u202f' {
				t.Errorf("%U is in the page", r)
			}
		}
		for _, c := range s.Connections.List {
			fuzzHas(t, text, c.Addr, c.Local, c.Remote)
		}
		for _, d := range s.Deaths {
			fuzzHas(t, text, d.Addr, d.Local, d.Remote, d.Error)
		}

		doc := fetch(t, handler{func() snapshot { return s }}, "/?format=json")
		if !utf8.ValidString(doc) || strings.ContainsAny(doc, "<>&\u2028\u2029") {
			t.Errorf("a program may take this for something else: %q", doc)
		}
		got := decode(t, doc).snapshot
		got.Counters = s.Counters // decode has them in another form
		if !reflect.DeepEqual(got, s) {
			t.Errorf("got  %+v\nwant %+v", got, s)
		}
	})
}

// fuzzSnapshot is one with those texts in every place for texts. How many
// connections and deaths it has, and their numbers, is in shape.
func fuzzSnapshot(shape []byte, addr, socket, said string) snapshot {
	next := func() byte {
		if len(shape) == 0 {
			return 0
		}
		b := shape[0]
		shape = shape[1:]
		return b
	}
	// From microseconds to some years, and before now as well as after it.
	duration := func() time.Duration {
		b := next()
		d := time.Duration(b%8) << (b / 8 * 2)
		if b%16 == 15 {
			return -d
		}
		return d
	}
	path := func() (p deadconn.PathInfo) {
		if b := next(); b%2 == 1 {
			p = deadconn.PathInfo{Known: true, RTT: duration(), Unacked: int(b) / 2, Retransmits: int(b) % 3, Probes: int(b) % 5, SinceACK: duration()}
		}
		return p
	}
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	states := []deadconn.ConnState{deadconn.ConnActive, deadconn.ConnIdle, deadconn.ConnSuspect, deadconn.ConnDead}
	infos := make([]deadconn.ConnInfo, next()%4)
	for i := range infos {
		b := next()
		infos[i] = deadconn.ConnInfo{
			Addr: addr, LocalAddr: socket, RemoteAddr: said, Protocol: []string{"", "h2", "http/1.1"}[b%3], TLS: b%2 == 0, State: states[b%4],
			Age: duration(), SinceRead: duration(), Unanswered: duration(), BytesRead: int64(duration()), BytesWritten: int64(duration()), Path: path(),
		}
	}
	s := snapshot{Version: 1, Time: at, Connections: newConnections(infos), Deaths: []death{}}
	for range next() % 32 {
		b := next()
		a := deadconn.Autopsy{
			Cause: deadconn.Kind(b), Addr: addr, LocalAddr: textAddr(socket), Protocol: []string{"", "h2", "http/1.1"}[b%3], TLS: b%2 == 0,
			At: at.Add(-duration()), Age: duration(), SinceRead: duration(), Unanswered: duration(), Writing: duration(),
			BytesRead: int64(duration()), Path: path(), Rescued: int64(b % 4), Lost: int64(b % 3),
		}
		if b%5 != 0 {
			a.RemoteAddr = net.Addr(textAddr(said))
			a.Err = errors.New(said)
		}
		s.Deaths = append(s.Deaths, newDeath(a))
	}
	s.Counters = deadconn.Stats{Open: len(infos), Evicted: int64(len(s.Deaths)), Retried: int64(next()), Lost: int64(next())}
	s.Status, s.Summary = s.sumUp()
	return s
}

// fuzzTokens returns the tags of page, with the names of their attributes and
// those values that are not for people, and its text with the values that are.
// It fails the test if an element is not ended where it is to be.
func fuzzTokens(t *testing.T, page string) (tags []string, text string) {
	t.Helper()
	var told strings.Builder
	var open []string
	for z := html.NewTokenizer(strings.NewReader(page)); ; {
		kind := z.Next()
		if kind == html.ErrorToken {
			if z.Err() != io.EOF {
				t.Error(z.Err())
			}
			break
		}
		token := z.Token()
		switch kind {
		case html.TextToken:
			told.WriteString(token.Data + "\n")
			continue
		case html.StartTagToken:
			if token.Data != "meta" { // which has no end
				open = append(open, token.Data)
			}
		case html.EndTagToken:
			if n := len(open); n == 0 || open[n-1] != token.Data {
				t.Errorf("</%s> in %q", token.Data, open)
				return nil, ""
			}
			open = open[:len(open)-1]
		case html.CommentToken:
			t.Errorf("<!--%s-->", token.Data)
		}
		tag := kind.String() + " " + token.Data
		for _, a := range token.Attr {
			tag += " " + a.Key
			if a.Key == "aria-label" {
				told.WriteString(a.Val + "\n")
			} else {
				tag += "=" + a.Val
			}
		}
		tags = append(tags, tag)
	}
	if len(open) > 0 {
		t.Errorf("%q are not ended", open)
	}
	return tags, told.String()
}

// fuzzHas fails the test unless each of said can be read in text.
func fuzzHas(t *testing.T, text string, said ...string) {
	t.Helper()
	for _, s := range said {
		if !strings.Contains(text, clean(s)) {
			t.Errorf("the page does not say %q", s)
		}
	}
}
