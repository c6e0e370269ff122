package faultnet

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// BlackholeSocket makes the kernel drop every packet that arrives for the
// socket under c, acknowledgements included, so that what c sends is
// retransmitted for real, even on loopback. c may be wrapped as often as
// wanted, as long as each layer has a SyscallConn or a NetConn method.
//
// It attaches a socket filter (SO_ATTACH_FILTER) that accepts nothing.
// Where the process may not do that, the error says so (EPERM); outside Linux
// it is [errors.ErrUnsupported].
func BlackholeSocket(c net.Conn) error {
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	return control(c, "attach socket filter", func(fd int) error {
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(drop)), Filter: &drop[0]})
	})
}

// HealSocket undoes [BlackholeSocket].
func HealSocket(c net.Conn) error {
	return control(c, "detach socket filter", func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
	})
}

// control calls f with the file descriptor of the socket under c.
func control(c net.Conn, doing string, f func(fd int) error) error {
	for ; c != nil; c = below(c) {
		s, ok := c.(syscall.Conn)
		if !ok {
			continue
		}
		raw, err := s.SyscallConn()
		if err != nil {
			if errors.Is(err, errors.ErrUnsupported) {
				continue // only passes it on; look further down
			}
			return fmt.Errorf("faultnet: %s: %w", doing, err)
		}
		var ferr error
		if err := raw.Control(func(fd uintptr) { ferr = f(int(fd)) }); err != nil {
			return fmt.Errorf("faultnet: %s: %w", doing, err)
		}
		if ferr != nil {
			return fmt.Errorf("faultnet: %s: %w", doing, ferr)
		}
		return nil
	}
	return fmt.Errorf("faultnet: %s: no socket: %w", doing, errors.ErrUnsupported)
}
