package debug

import (
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"html/template"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/deadconn/deadconn"
)

var (
	//go:embed page.html
	pageHTML string

	//go:embed page.css
	pageCSS string

	pageTemplate = template.Must(template.New("page").Parse(pageHTML))

	// policy lets the page have its own style and nothing else: no script, no
	// style that somebody else has put in, nothing from elsewhere.
	policy = "default-src 'none'; style-src 'sha256-" + styleHash() + "'; " +
		"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

func styleHash() string {
	sum := sha256.Sum256([]byte(pageCSS))
	return base64.StdEncoding.EncodeToString(sum[:])
}

// A view is a snapshot in words.
type view struct {
	CSS      template.CSS
	Time     string
	Status   string
	Word     string // the status, for people
	Summary  string
	Tiles    []tile
	Timeline *timeline
	First    []deathView // deaths
	Rest     []deathView // those that are shown on demand
	NDeaths  int
	Conns    []connView
	More     int // connections that are not shown
	States   string
	Counters []counter
}

type tile struct {
	Name, Value, Note string
	Bad               bool
}

type deathView struct {
	Clock, Ago    string
	Cause, Means  string
	Shape         string
	Addr          string
	Route, Life   string
	Error         string
	Evidence      []string
	Done          string
	Rescued, Lost int64
}

type connView struct {
	State      string
	Addr       string
	Route      string
	Protocol   string
	Age        string
	LastRead   string
	Unanswered string
	RTT        string
	Path       string // what is bad about it
	Bytes      string
}

type counter struct {
	Name, Value, Means string
}

// maxOpen is how many deaths are shown without asking.
const maxOpen = 20

func newView(s snapshot) view {
	v := view{
		CSS:      template.CSS(pageCSS),
		Time:     s.Time.Format("2006-01-02 15:04:05") + " UTC",
		Status:   s.Status,
		Word:     words[s.Status],
		Summary:  s.Summary,
		Tiles:    tiles(s),
		Timeline: newTimeline(s.Deaths, s.Time),
		NDeaths:  len(s.Deaths),
		More:     s.Connections.Total - len(s.Connections.List),
		States:   states(s.Connections.ByState),
		Counters: counterRows(s.Counters),
	}
	if v.Timeline != nil && s.Counters.Evicted == int64(len(s.Deaths)) {
		v.Timeline.Stray = stray(s)
	}
	for i, d := range s.Deaths {
		if i < maxOpen {
			v.First = append(v.First, newDeathView(d, s.Time))
		} else {
			v.Rest = append(v.Rest, newDeathView(d, s.Time))
		}
	}
	for _, c := range s.Connections.List {
		v.Conns = append(v.Conns, newConnView(c))
	}
	return v
}

// stray says how many requests were sent again, of none of s's deaths. It
// makes sense if those are all that there were.
func stray(s snapshot) int64 {
	n := s.Counters.Rescued + s.Counters.Lost + s.Counters.NotRetried
	for _, d := range s.Deaths {
		n -= d.Rescued + d.Lost
	}
	return max(0, n)
}

var words = map[string]string{
	"quiet":   "Quiet",
	"deaths":  "Deaths",
	"suspect": "Suspect",
	"lost":    "Requests lost",
}

func tiles(s snapshot) []tile {
	n := s.Counters
	bad := s.Connections.ByState[deadconn.ConnSuspect] + s.Connections.ByState[deadconn.ConnDead]
	return []tile{
		{Name: "open now", Value: strconv.Itoa(s.Connections.Total), Note: "connections"},
		{Name: "look dead now", Value: strconv.Itoa(bad), Note: "connections", Bad: bad > 0},
		{Name: "died", Value: count(n.Evicted), Note: "connections"},
		{Name: "rescued", Value: count(n.Rescued), Note: "requests"},
		{Name: "lost", Value: count(n.Lost), Note: "requests", Bad: n.Lost > 0},
	}
}

// meanings say what each Kind that kills means, to somebody who was woken up.
var meanings = map[string]string{
	"closed":             "this side had closed the socket while it was in the pool",
	"reset":              "the peer, or something on the way, reset it",
	"timed_out":          "the kernel gave up on the path, or a write ran out of time",
	"eof":                "the peer ended it before it answered",
	"ping_lost":          "an HTTP/2 PING was not answered",
	"silent":             "nothing came back any more: a dead path, or a write that was stuck",
	"goaway":             "the server said goodbye and closed it",
	"goaway_unprocessed": "the server said goodbye, and that it had processed nothing",
	"goaway_calm":        "the server was asked for too much (ENHANCE_YOUR_CALM)",
	"protocol":           "what came in was no valid HTTP/2 or TLS",
	"not_established":    "it ended before its first request",
}

func newDeathView(d death, now time.Time) deathView {
	v := deathView{
		Clock:    clock(d.Time),
		Ago:      ago(now.Sub(d.Time)),
		Cause:    d.Cause,
		Means:    meanings[d.Cause],
		Shape:    shape(d.Cause),
		Addr:     cmp.Or(clean(d.Addr), clean(d.Remote), "unknown host"),
		Route:    route(d.Local, d.Remote),
		Life:     speaks(d.Protocol, d.TLS),
		Error:    clean(d.Error),
		Evidence: evidence(d),
		Rescued:  d.Rescued,
		Lost:     d.Lost,
	}
	if d.Age != nil {
		v.Life = join(v.Life, "lived "+duration(*d.Age))
	}
	switch {
	case d.Rescued == 0 && d.Lost == 0:
		v.Done = "Closed. No request is known to have been sent again."
	case d.Lost == 0:
		v.Done = "Closed. " + verb(int(d.Rescued), "request was sent again and answered.", "requests were sent again and answered.")
	case d.Rescued == 0:
		v.Done = "Closed. " + verb(int(d.Lost), "request was sent again and failed again.", "requests were sent again and failed again.")
	default:
		v.Done = fmt.Sprintf("Closed. %d requests were sent again: %d answered, %d failed again.", d.Rescued+d.Lost, d.Rescued, d.Lost)
	}
	return v
}

// evidence says how the death is known, the strongest first.
func evidence(d death) []string {
	var e []string
	if d.Unanswered != nil && *d.Unanswered > 0.1 {
		e = append(e, "unanswered for "+duration(*d.Unanswered))
	}
	if d.Writing != nil {
		e = append(e, "a write under way for "+duration(*d.Writing))
	}
	if p := d.Path; p != nil {
		if bad := p.bad(); bad != "" {
			e = append(e, bad)
		}
		if p.RTT > 0 {
			e = append(e, "RTT "+duration(p.RTT))
		}
	}
	if d.SinceRead != nil {
		e = append(e, "last read "+duration(*d.SinceRead)+" before")
	}
	if d.BytesRead > 0 || d.BytesWritten > 0 {
		e = append(e, size(d.BytesRead)+" in, "+size(d.BytesWritten)+" out")
	}
	return e
}

// bad says what speaks against a path.
func (p *path) bad() string {
	var s string
	if p.Unacked > 0 {
		s = join(s, plural(int64(p.Unacked), "segment")+" not acknowledged")
	}
	if p.Retransmits > 0 {
		s = join(s, plural(int64(p.Retransmits), "retransmit"))
	}
	if p.Probes > 0 {
		s = join(s, plural(int64(p.Probes), "probe"))
	}
	return s
}

func newConnView(c connection) connView {
	v := connView{
		State:      string(c.State),
		Addr:       cmp.Or(clean(c.Addr), "unknown host"),
		Route:      route(c.Local, c.Remote),
		Protocol:   cmp.Or(speaks(c.Protocol, c.TLS), "not known"),
		Age:        duration(c.Age),
		LastRead:   "nothing yet",
		Unanswered: "nothing",
		RTT:        "not known",
		Bytes:      size(c.BytesRead) + " in, " + size(c.BytesWritten) + " out",
	}
	if c.SinceRead != nil {
		v.LastRead = duration(*c.SinceRead) + " ago"
	}
	if c.Unanswered != nil {
		v.Unanswered = "for " + duration(*c.Unanswered)
	}
	if c.Path != nil {
		if c.Unanswered != nil && c.Path.Unacked == 0 {
			v.Unanswered += ", but acknowledged"
		}
		v.RTT = duration(c.Path.RTT)
		v.Path = c.Path.bad()
	}
	return v
}

// states says how many connections are in each state, the worst first.
func states(by map[deadconn.ConnState]int) string {
	var s string
	for _, state := range slices.SortedFunc(maps.Keys(by), func(a, b deadconn.ConnState) int {
		return cmp.Or(cmp.Compare(trouble(b), trouble(a)), cmp.Compare(a, b))
	}) {
		s = join(s, fmt.Sprintf("%d %s", by[state], state))
	}
	return s
}

func counterRows(n deadconn.Stats) []counter {
	by := make(map[string]int)
	for k, c := range n.EvictedBy {
		if c > 0 {
			by[deadconn.Kind(k).String()] = int(c)
		}
	}
	return []counter{
		{"open", count(int64(n.Open)), "connections that the Registry has open now, other users' included"},
		{"dialed", count(n.Dialed), "connections that were dialed"},
		{"dials_merged", count(n.DialsMerged), "dials that waited for another and were not made"},
		{"suspected", count(n.Suspected), "suspicions: new requests went elsewhere"},
		{"evicted", count(n.Evicted), "connections found dead and closed"},
		{"evicted_by", cmp.Or(list(by), "-"), "the same, by cause"},
		{"retried", count(n.Retried), "how often a request was sent again"},
		{"rescued", count(n.Rescued), "requests that were sent again and succeeded"},
		{"lost", count(n.Lost), "requests that were sent again and failed"},
		{"not_retried", count(n.NotRetried), "requests that met a dead connection and could not be sent again"},
		{"hooks_dropped", count(n.HooksDropped), "hook calls and log lines dropped, since a hook was slow"},
	}
}

func route(local, remote string) string {
	if local == "" && remote == "" {
		return ""
	}
	return cmp.Or(clean(local), "?") + " \u2192 " + cmp.Or(clean(remote), "?")
}

func speaks(protocol string, tls bool) string {
	if tls {
		return join(clean(protocol), "TLS")
	}
	return clean(protocol)
}

func join(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + ", " + b
}

// clean shows what cannot be printed, such as line feeds and what turns the
// direction of writing around, as Go writes it.
func clean(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch {
		case strconv.IsPrint(r), r == utf8.RuneError:
			b.WriteRune(r)
		default:
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

func clock(t time.Time) string {
	return t.Format("15:04:05.000")
}

// ago says how long ago something was, without false precision.
func ago(d time.Duration) string {
	if d < time.Second {
		return "just now"
	}
	unit := time.Second
	if d > 10*time.Minute {
		unit = time.Minute
	}
	return duration(d.Truncate(unit).Seconds()) + " ago"
}

// duration writes seconds for people.
func duration(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	two := func(big, small time.Duration, bigName, smallName string) string {
		s := fmt.Sprintf("%d %s", d/big, bigName)
		if rest := d % big / small; rest > 0 {
			s += fmt.Sprintf(" %d %s", rest, smallName)
		}
		return s
	}
	switch {
	case d <= 0:
		return "0 s"
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.2g ms", max(0.01, d.Seconds()*1000))
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 10*time.Second:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", d.Truncate(100*time.Millisecond).Seconds()), ".0") + " s"
	case d < time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < time.Hour:
		return two(time.Minute, time.Second, "min", "s")
	case d < 24*time.Hour:
		return two(time.Hour, time.Minute, "h", "min")
	}
	return two(24*time.Hour, time.Hour, "d", "h")
}

// size writes bytes for people.
func size(n int64) string {
	if n < 1000 {
		return fmt.Sprintf("%d B", n)
	}
	x, i := float64(n)/1000, 0
	for x >= 999.5 && i < 4 {
		x, i = x/1000, i+1
	}
	prec := 0
	if x < 9.95 {
		prec = 1
	}
	return fmt.Sprintf("%.*f %cB", prec, x, "kMGTP"[i])
}

// count groups the digits of n.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "\u202f" + s[i:] // a narrow space that does not break
	}
	return s
}
