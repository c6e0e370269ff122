package deadconn

import (
	"net"
	"slices"
	"time"
)

// An Autopsy is the record of an evicted connection: what it died of, how that
// is known, and what became of its requests. It has no header, body, path or
// query of any request in it.
type Autopsy struct {
	Cause Kind   // its name is stable
	Err   error  // what said so
	Addr  string // host:port as dialed, a proxy's if there is one; empty if not dialed by a Registry

	LocalAddr  net.Addr
	RemoteAddr net.Addr
	Protocol   string // "h2", "http/1.1", or "" if not known
	TLS        bool   // set up by NewTransport's dialer, or seen by httptrace

	At           time.Time     // when it was evicted
	Age          time.Duration // since it was dialed; 0 if not dialed by a Registry
	SinceRead    time.Duration // since something was read; 0 if that is not known, or nothing was
	Unanswered   time.Duration // since the oldest write after which nothing was read; 0: none
	Writing      time.Duration // how long a write had been going on; 0: none was
	BytesRead    int64         // on the wire, TLS included; 0 if not dialed by a Registry
	BytesWritten int64
	Path         PathInfo

	Rescued int64 // requests that were on it and succeeded elsewhere, so far
	Lost    int64 // and those that failed, so far
}

// PathInfo is the kernel's account of a connection (Linux, TCP_INFO). The zero
// value means that it is not known.
type PathInfo struct {
	Known       bool
	RTT         time.Duration // smoothed round trip time
	Unacked     int           // segments sent and not acknowledged
	Retransmits int           // timeouts in a row, without an ACK in between
	Probes      int           // probes in a row, likewise
	SinceACK    time.Duration // since the last ACK came in
}

func (k kernelInfo) info() PathInfo {
	if !k.known {
		return PathInfo{}
	}
	return PathInfo{
		Known: true, RTT: k.rtt, Unacked: int(k.unacked), Retransmits: int(k.retransmits),
		Probes: int(k.probes), SinceACK: k.sinceACK,
	}
}

// autopsy examines c, whose fate is known, while its socket may still be open.
func (c *conn) autopsy(at int64) *Autopsy {
	d := c.fate.Load()
	e := c.evidence(at)
	a := &Autopsy{
		Cause:      d.kind,
		Err:        d.err,
		Addr:       c.addr,
		LocalAddr:  c.LocalAddr(),
		RemoteAddr: c.RemoteAddr(),
		Protocol:   c.protocol(),
		TLS:        c.tls.Load(),
		At:         time.Now(),
		Unanswered: e.silent,
		Writing:    e.writing,
	}
	if c.raw != nil {
		a.Path = tcpInfo(c.raw).info()
	}
	if !c.foreign {
		a.Age = time.Duration(at - c.born)
		a.BytesRead, a.BytesWritten = c.read.Load(), c.wrote.Load()
		if last := c.lastRead.Load(); last != 0 {
			a.SinceRead = time.Duration(at - last)
		}
	}
	return a
}

func (c *conn) protocol() string {
	switch outcome(c.proto.Load()) {
	case isHTTP1:
		return "http/1.1"
	case isHTTP2:
		return "h2"
	}
	return ""
}

// maxAutopsies is how many a Transport keeps.
const maxAutopsies = 100

// Autopsies returns the records of the last 100 connections that were evicted,
// the newest first.
func (t *Transport) Autopsies() []Autopsy {
	t.autopsies.mu.Lock()
	kept := slices.Clone(t.autopsies.last)
	t.autopsies.mu.Unlock()
	all := make([]Autopsy, 0, len(kept))
	for _, d := range slices.Backward(kept) {
		all = append(all, d.record())
	}
	return all
}

// record returns d's autopsy with what has become of the requests by now.
func (d *death) record() Autopsy {
	a := *d.autopsy.Load()
	a.Rescued, a.Lost = d.rescued.Load(), d.lost.Load()
	return a
}

// evicted tells the world that c was closed, on account of its fate, which has
// its autopsy.
func (t *Transport) evicted(c *conn) {
	d := c.fate.Load()
	t.stats.evicted[d.kind].Add(1)
	a := &t.autopsies
	a.mu.Lock()
	if len(a.last) == maxAutopsies {
		a.last = slices.Delete(a.last, 0, 1)
	}
	a.last = append(a.last, d)
	a.mu.Unlock()
	if t.hooks.ConnEvicted != nil || t.log != nil {
		t.events.put(event{evicted: d})
	}
}
