// Package netlab makes network paths for tests: two network namespaces, client
// and server, joined by a link whose faults a test controls. Everything runs
// in the test's own process; sockets are made inside a namespace and then used
// from any goroutine.
//
// It works on Linux, with the right to make network namespaces (root, or the
// test binary started under "unshare -Urn"), and needs the tools ip and nft.
// Elsewhere New fails with [errors.ErrUnsupported].
//
// The namespaces have no name: they live as long as the process holds them, so
// that a test killed half-way leaves nothing behind, and labs that run at the
// same time cannot meet.
package netlab

import "time"

const (
	clientIP = "192.0.2.1" // RFC 5737: documentation addresses, never routed
	serverIP = "192.0.2.2"
)

// Options describe the wire of NewWith.
type Options struct {
	Delay time.Duration // one way; the round trip takes twice as long
	Loss  float64       // share of the packets lost each way: 0.1 is 10 %
	Seed  uint64        // of the losses: the nth packet of a direction has the same fate under the same seed
}
