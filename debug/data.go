package debug

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/deadconn/deadconn"
)

const (
	maxShown = 200              // connections
	maxText  = 1000             // bytes of an error or an address
	recently = 15 * time.Minute // what the status is about
)

// A snapshot is all that the page tells. The package comment is its schema.
type snapshot struct {
	Version     int            `json:"version"`
	Time        time.Time      `json:"time"`
	Status      string         `json:"status"`
	Summary     string         `json:"summary"`
	Counters    deadconn.Stats `json:"counters"`
	Connections connections    `json:"connections"`
	Deaths      []death        `json:"deaths"`
}

type connections struct {
	Total   int                        `json:"total"`
	ByState map[deadconn.ConnState]int `json:"by_state"`
	List    []connection               `json:"list"`
}

type connection struct {
	Addr         string             `json:"addr"`
	Local        string             `json:"local"`
	Remote       string             `json:"remote"`
	Protocol     string             `json:"protocol"`
	TLS          bool               `json:"tls"`
	State        deadconn.ConnState `json:"state"`
	Age          float64            `json:"age_seconds"`
	SinceRead    *float64           `json:"since_read_seconds"`
	Unanswered   *float64           `json:"unanswered_seconds"`
	BytesRead    int64              `json:"bytes_read"`
	BytesWritten int64              `json:"bytes_written"`
	Path         *path              `json:"path"`
}

type path struct {
	RTT         float64 `json:"rtt_seconds"`
	Unacked     int     `json:"unacked"`
	Retransmits int     `json:"retransmits"`
	Probes      int     `json:"probes"`
	SinceACK    float64 `json:"since_ack_seconds"`
}

type death struct {
	Time         time.Time `json:"time"`
	Cause        string    `json:"cause"`
	Error        string    `json:"error"`
	Addr         string    `json:"addr"`
	Local        string    `json:"local"`
	Remote       string    `json:"remote"`
	Protocol     string    `json:"protocol"`
	TLS          bool      `json:"tls"`
	Age          *float64  `json:"age_seconds"`
	SinceRead    *float64  `json:"since_read_seconds"`
	Unanswered   *float64  `json:"unanswered_seconds"`
	Writing      *float64  `json:"writing_seconds"`
	BytesRead    int64     `json:"bytes_read"`
	BytesWritten int64     `json:"bytes_written"`
	Path         *path     `json:"path"`
	Rescued      int64     `json:"rescued"`
	Lost         int64     `json:"lost"`
}

// look asks t for all of it.
func look(t *deadconn.Transport, now time.Time) snapshot {
	s := snapshot{
		Version:     1,
		Time:        now.UTC().Round(0),
		Counters:    t.Stats(),
		Connections: newConnections(t.Connections(0)),
		Deaths:      []death{},
	}
	for _, a := range t.Autopsies() {
		s.Deaths = append(s.Deaths, newDeath(a))
	}
	s.Status, s.Summary = s.sumUp()
	return s
}

func newConnections(all []deadconn.ConnInfo) connections {
	c := connections{
		Total:   len(all),
		ByState: make(map[deadconn.ConnState]int),
		List:    []connection{},
	}
	for _, info := range all {
		c.ByState[info.State]++
	}
	slices.SortStableFunc(all, func(a, b deadconn.ConnInfo) int {
		return cmp.Compare(trouble(b.State), trouble(a.State))
	})
	for _, info := range all[:min(len(all), maxShown)] {
		c.List = append(c.List, connection{
			Addr:         cut(info.Addr),
			Local:        cut(info.LocalAddr),
			Remote:       cut(info.RemoteAddr),
			Protocol:     info.Protocol,
			TLS:          info.TLS,
			State:        info.State,
			Age:          info.Age.Seconds(),
			SinceRead:    secondsOrNil(info.SinceRead),
			Unanswered:   secondsOrNil(info.Unanswered),
			BytesRead:    info.BytesRead,
			BytesWritten: info.BytesWritten,
			Path:         newPath(info.Path),
		})
	}
	return c
}

// trouble is how much an operator wants to see a connection in that state.
func trouble(s deadconn.ConnState) int {
	switch s {
	case deadconn.ConnDead:
		return 2
	case deadconn.ConnSuspect:
		return 1
	}
	return 0
}

func newDeath(a deadconn.Autopsy) death {
	d := death{
		Time:         a.At.UTC().Round(0),
		Cause:        a.Cause.String(),
		Addr:         cut(a.Addr),
		Local:        cut(addrString(a.LocalAddr)),
		Remote:       cut(addrString(a.RemoteAddr)),
		Protocol:     a.Protocol,
		TLS:          a.TLS,
		Age:          secondsOrNil(a.Age),
		SinceRead:    secondsOrNil(a.SinceRead),
		Unanswered:   secondsOrNil(a.Unanswered),
		Writing:      secondsOrNil(a.Writing),
		BytesRead:    a.BytesRead,
		BytesWritten: a.BytesWritten,
		Path:         newPath(a.Path),
		Rescued:      a.Rescued,
		Lost:         a.Lost,
	}
	if a.Err != nil {
		d.Error = cut(a.Err.Error())
	}
	return d
}

func newPath(p deadconn.PathInfo) *path {
	if !p.Known {
		return nil
	}
	return &path{
		RTT: p.RTT.Seconds(), Unacked: p.Unacked, Retransmits: p.Retransmits,
		Probes: p.Probes, SinceACK: p.SinceACK.Seconds(),
	}
}

func secondsOrNil(d time.Duration) *float64 {
	if d == 0 {
		return nil
	}
	s := d.Seconds()
	return &s
}

func addrString(a net.Addr) string {
	if a == nil {
		return ""
	}
	return a.String()
}

// cut bounds a text that comes from outside.
func cut(s string) string {
	if len(s) > maxText {
		s = s[:maxText] + " [cut]"
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// sumUp says in a word and in a line how things are.
func (s *snapshot) sumUp() (status, summary string) {
	var (
		died     int
		lost     int64
		byCause  = make(map[string]int)
		suspects = s.Connections.ByState[deadconn.ConnSuspect] + s.Connections.ByState[deadconn.ConnDead]
	)
	for _, d := range s.Deaths {
		if s.Time.Sub(d.Time) > recently {
			break
		}
		died++
		lost += d.Lost
		byCause[d.Cause]++
	}
	var text strings.Builder
	switch {
	case died > 0:
		status = "deaths"
		if lost > 0 {
			status = "lost"
		}
		many := ""
		if died == len(s.Deaths) && s.Counters.Evicted > int64(died) {
			many = "At least " // there may have been more than are on record
		}
		fmt.Fprintf(&text, "%s%s died in the last %s, the last one %s: %s.", many, plural(int64(died), "connection"),
			duration(recently.Seconds()), ago(s.Time.Sub(s.Deaths[0].Time)), list(byCause))
	case s.Counters.Evicted > 0 && len(s.Deaths) > 0:
		status = "quiet"
		fmt.Fprintf(&text, "The last death was %s.", ago(s.Time.Sub(s.Deaths[0].Time)))
	default:
		status = "quiet"
		text.WriteString("No connection has died.")
	}
	if suspects > 0 {
		if status != "lost" {
			status = "suspect"
		}
		fmt.Fprintf(&text, " %s now.", verb(suspects, "looks dead", "look dead"))
	}
	if n := s.Counters; n.Retried > 0 {
		fmt.Fprintf(&text, " Since the start %s, %d lost.", verb(int(n.Rescued), "request was rescued", "requests were rescued"), n.Lost)
	}
	return status, text.String()
}

// list says how many of each, the most frequent first.
func list(counts map[string]int) string {
	names := make([]string, 0, len(counts))
	for name := range counts {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b))
	})
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %d", name, counts[name])
	}
	return strings.Join(names, ", ")
}

func plural(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

func verb(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
