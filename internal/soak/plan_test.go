package soak

import (
	"math/rand/v2"
	"time"
)

// A faultKind is one way to hurt connections.
type faultKind uint8

const (
	closeUnderneath faultKind = iota
	writeClosed               // use of closed network connection, the reader asleep
	writeEPIPE
	writeReset
	linger0
	reset
	blackhole       // userspace: the kernel goes on acknowledging
	holdWrites      // a stalled write
	kernelBlackhole // nothing is acknowledged
	serverFIN
	serverRST
	killConns  // all of one server
	resetConns // likewise
	shutdown   // graceful, with a successor on the same address
	faultKinds
)

var faultNames = [faultKinds]string{
	"close underneath", "write: closed", "write: EPIPE", "write: ECONNRESET", "linger 0 close", "reset",
	"black hole", "held writes", "kernel black hole", "FIN by the server", "RST by the server",
	"KillConns", "ResetConns", "graceful Shutdown",
}

func (k faultKind) String() string {
	if k < faultKinds {
		return faultNames[k]
	}
	return "?"
}

// silent kinds give no error.
func (k faultKind) silent() bool { return k == blackhole || k == holdWrites || k == kernelBlackhole }

// ofServer kinds hit a whole server, and all clients of it.
func (k faultKind) ofServer() bool { return k == killConns || k == resetConns || k == shutdown }

// needsHTTP2: over HTTP/1 nobody may decide that such a connection is dead.
func (k faultKind) needsHTTP2() bool { return k == blackhole || k == holdWrites }

var weights = [faultKinds]int{
	closeUnderneath: 10, writeClosed: 8, writeEPIPE: 8, writeReset: 8, linger0: 8, reset: 8,
	blackhole: 2, holdWrites: 2, kernelBlackhole: 4,
	serverFIN: 12, serverRST: 12, killConns: 3, resetConns: 3, shutdown: 4,
}

// A plannedFault is one of a plan: when, what, and which of the candidates.
type plannedFault struct {
	at     time.Duration
	kind   faultKind
	client int
	pick   int // index among the candidates, modulo their number
}

// makePlan depends on its arguments only.
func makePlan(seed int64, d time.Duration, clients int) (plan []plannedFault) {
	r := rand.New(rand.NewPCG(uint64(seed), 0xfa))
	total := 0
	for _, n := range weights {
		total += n
	}
	for at := 300 * time.Millisecond; at < d; {
		n, kind := r.IntN(total), faultKind(0)
		for n >= weights[kind] {
			n -= weights[kind]
			kind++
		}
		plan = append(plan, plannedFault{at: at, kind: kind, client: r.IntN(clients), pick: r.IntN(1 << 20)})
		gap := time.Duration(5+r.ExpFloat64()*80) * time.Millisecond
		if r.IntN(20) == 0 {
			gap = 0 // two at once
		}
		at += gap
	}
	return plan
}
