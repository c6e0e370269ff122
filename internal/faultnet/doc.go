// Package faultnet makes network connections fail on request.
//
// It has a [Conn] and a [Dialer] whose faults are switched on while they are
// in use, a TCP [Proxy] with faults of its own, an HTTP/2 [Peer] scripted
// frame by frame, a plain net/http [Server], and, on Linux, a black hole for
// one socket inside the kernel ([BlackholeSocket]).
//
// Tests, the demo and the benchmarks share it, so it knows nothing of the
// types they are about, asserts nothing, and does not import testing.
// Everything listens on loopback only.
package faultnet
