package deadconn

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
)

// Stats is a snapshot of what a [Transport] has done since it was made. The
// counters only grow; they are read one by one, not all at one instant. It is
// comparable, and fit for expvar: expvar.Func(func() any { return t.Stats() }).
type Stats struct {
	Open         int        `json:"open"`          // connections that the Registry has open now
	Dialed       int64      `json:"dialed"`        // connections that were dialed for this Transport
	DialsMerged  int64      `json:"dials_merged"`  // dials that waited for another and were not made
	Suspected    int64      `json:"suspected"`     // suspicions that were acted upon
	Evicted      int64      `json:"evicted"`       // connections found dead and closed
	EvictedBy    KindCounts `json:"evicted_by"`    // the same, by cause
	Retried      int64      `json:"retried"`       // how often a request was sent again
	Rescued      int64      `json:"rescued"`       // requests that were sent again and succeeded
	Lost         int64      `json:"lost"`          // requests that were sent again and failed
	NotRetried   int64      `json:"not_retried"`   // requests that met a dead connection and could not be sent again
	HooksDropped int64      `json:"hooks_dropped"` // hook calls and log lines dropped, since a hook was slow
}

// KindCounts has a number for each Kind. In JSON it is an object by the Kinds'
// names, with those that are not 0.
type KindCounts [kinds]int64

// MarshalJSON implements json.Marshaler.
func (c KindCounts) MarshalJSON() ([]byte, error) {
	m := make(map[string]int64)
	for k, n := range c {
		if n != 0 {
			m[Kind(k).String()] = n
		}
	}
	return json.Marshal(m)
}

// UnmarshalJSON implements json.Unmarshaler. A name that is no Kind's is an
// error.
func (c *KindCounts) UnmarshalJSON(b []byte) error {
	var m map[string]int64
	if err := json.Unmarshal(b, &m); err != nil {
		return err
	}
	*c = KindCounts{}
	for name, n := range m {
		k := slices.Index(kindNames[:], name)
		if k < 0 {
			return fmt.Errorf("deadconn: KindCounts has no kind %q", name)
		}
		c[k] = n
	}
	return nil
}

type counters struct {
	dialed, merged, suspected, retried, rescued, lost, notRetried atomic.Int64

	evicted [kinds]atomic.Int64
}

// Stats returns a snapshot. It does not stop traffic.
func (t *Transport) Stats() Stats {
	s := Stats{
		Open:        t.reg.Len(),
		Dialed:      t.stats.dialed.Load(),
		DialsMerged: t.stats.merged.Load(),
		Suspected:   t.stats.suspected.Load(),
		Retried:     t.stats.retried.Load(),
		Rescued:     t.stats.rescued.Load(),
		Lost:        t.stats.lost.Load(),
		NotRetried:  t.stats.notRetried.Load(),
	}
	for k := range s.EvictedBy {
		s.EvictedBy[k] = t.stats.evicted[k].Load()
		s.Evicted += s.EvictedBy[k]
	}
	t.events.mu.Lock()
	s.HooksDropped = t.events.dropped
	t.events.mu.Unlock()
	return s
}

// ConnInfo tells of an open connection.
type ConnInfo struct {
	Addr         string // host:port as dialed; a proxy's, if there is one
	LocalAddr    string
	RemoteAddr   string
	Protocol     string // "h2", "http/1.1", or "" if not known
	TLS          bool
	State        ConnState
	Age          time.Duration // since it was dialed
	SinceRead    time.Duration // since something was read; 0: nothing was
	Unanswered   time.Duration // since the oldest write after which nothing was read; 0: none
	BytesRead    int64         // on the wire, TLS included
	BytesWritten int64
	Path         PathInfo
}

// ConnState is what a connection is doing.
type ConnState string

// The states of a connection.
const (
	ConnActive  ConnState = "active"  // something was read or written within the last second
	ConnIdle    ConnState = "idle"    // nothing was
	ConnSuspect ConnState = "suspect" // an answer is due, and the path looks dead
	ConnDead    ConnState = "dead"    // about to be gone
)

// Connections returns the open connections that were dialed for this
// Transport, at most limit of them (all if limit is 0 or less), the newest
// first. It asks the kernel about each, a microsecond or so.
func (t *Transport) Connections(limit int) []ConnInfo {
	var conns []*conn
	r := t.reg
	r.mu.Lock()
	for c := r.live.prev; c != nil && c != &r.live && (limit <= 0 || len(conns) < limit); c = c.prev {
		if c.owner.Load() == t {
			conns = append(conns, c)
		}
	}
	r.mu.Unlock()
	at := now()
	infos := make([]ConnInfo, len(conns))
	for i, c := range conns {
		infos[i] = c.info(at)
	}
	return infos
}

func (c *conn) info(at int64) ConnInfo {
	e := c.evidence(at)
	info := ConnInfo{
		Addr:         c.addr,
		LocalAddr:    addrString(c.LocalAddr()),
		RemoteAddr:   addrString(c.RemoteAddr()),
		Protocol:     c.protocol(),
		TLS:          c.tls.Load(),
		State:        ConnIdle,
		Age:          time.Duration(at - c.born),
		Unanswered:   e.silent,
		BytesRead:    c.read.Load(),
		BytesWritten: c.wrote.Load(),
	}
	if last := c.lastRead.Load(); last != 0 {
		info.SinceRead = time.Duration(at - last)
	}
	switch {
	case c.dead():
		info.State = ConnDead
	case c.suspected.Load():
		info.State = ConnSuspect
	case at-max(c.lastRead.Load(), c.lastWrite.Load()) < int64(time.Second):
		info.State = ConnActive
	}
	if c.raw != nil {
		info.Path = tcpInfo(c.raw).info()
	}
	return info
}
