//go:build !unix

package faultnet

import "syscall"

// setBuffers does nothing: here the buffers are set on each accepted
// connection only, a little late.
func setBuffers(raw syscall.RawConn, size int) error { return nil }
