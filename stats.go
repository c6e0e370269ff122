package deadconn

import "sync/atomic"

// Stats is a snapshot of what a [Transport] has done since it was made. The
// counters only grow; they are read one by one, not all at one instant.
type Stats struct {
	Open    int   // connections that the Registry has open now
	Evicted int64 // connections found dead and closed
	Rescued int64 // requests that were sent again and succeeded
	Lost    int64 // requests that were sent again and failed
}

type counters struct {
	suspected, evicted, rescued, lost atomic.Int64
}

// Stats returns a snapshot. It does not stop traffic.
func (t *Transport) Stats() Stats {
	return Stats{
		Open:    t.reg.Len(),
		Evicted: t.stats.evicted.Load(),
		Rescued: t.stats.rescued.Load(),
		Lost:    t.stats.lost.Load(),
	}
}
