//go:build !windows

package faultnet

import "syscall"

const (
	errConnReset  = syscall.ECONNRESET
	errBrokenPipe = syscall.EPIPE
)

// syscallName names the system call behind a "read" or "write", as package
// net does.
func syscallName(op string) string { return op }
