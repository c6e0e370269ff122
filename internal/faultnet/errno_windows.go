package faultnet

import "syscall"

// What Winsock reports. The values that package syscall calls ECONNRESET and
// EPIPE on Windows are made up and never come from a socket.
const (
	errConnReset  = syscall.Errno(10054) // WSAECONNRESET
	errBrokenPipe = syscall.Errno(10053) // WSAECONNABORTED
)

// syscallName names the system call behind a "read" or "write", as package
// net does.
func syscallName(op string) string {
	if op == "read" {
		return "wsarecv"
	}
	return "wsasend"
}
