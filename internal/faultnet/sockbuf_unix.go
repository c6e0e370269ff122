//go:build unix

package faultnet

import "syscall"

// setBuffers sets the size of both buffers of a socket.
func setBuffers(raw syscall.RawConn, size int) error {
	var err error
	cerr := raw.Control(func(fd uintptr) {
		err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, size)
		if err == nil {
			err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF, size)
		}
	})
	if cerr != nil {
		return cerr
	}
	return err
}
