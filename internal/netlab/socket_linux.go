package netlab

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// socket makes a TCP socket inside n.
//
// Making the socket is the one step that depends on the thread: a socket keeps
// its namespace, so bind, connect and the rest may run anywhere. That is why
// the sockets are made by hand. net.Dialer does not promise to stay on the
// calling thread (it starts goroutines to race addresses), and its Control
// hook comes after the socket was made: it could find a socket in the wrong
// namespace, but not put it right. Nor would a locked thread be free of the
// namespace while a dial waits for its answer.
func (l *Lab) socket(n *namespace) (*os.File, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.closed {
		return nil, net.ErrClosed
	}
	var fd int
	err := n.do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		return os.NewSyscallError("socket", err)
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "netlab socket"), nil
}

// Listen listens on a port of the server's address; port 0 picks a free one.
func (l *Lab) Listen(port int) (_ net.Listener, err error) {
	addr := netip.AddrPortFrom(netip.MustParseAddr(serverIP), uint16(port))
	defer func() {
		if err != nil {
			err = &net.OpError{Op: "listen", Net: "tcp", Addr: net.TCPAddrFromAddrPort(addr), Err: err}
		}
	}()
	if port != int(addr.Port()) {
		return nil, &net.AddrError{Err: "invalid port", Addr: strconv.Itoa(port)}
	}
	f, err := l.socket(l.server)
	if err != nil {
		return nil, err
	}
	defer f.Close() // FileListener has a duplicate
	fd := int(f.Fd())
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return nil, os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Bind(fd, sockaddr(addr)); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return nil, os.NewSyscallError("listen", err)
	}
	return net.FileListener(f)
}

// Dial connects from the client to the server. It has the signature of
// net.Dialer.DialContext; of addr only the port (a number) counts, any host is
// the server. The conn is a *net.TCPConn.
func (l *Lab) Dial(ctx context.Context, network, addr string) (_ net.Conn, err error) {
	var to netip.AddrPort
	defer func() {
		if err != nil {
			op := &net.OpError{Op: "dial", Net: network, Err: err}
			if to.IsValid() {
				op.Addr = net.TCPAddrFromAddrPort(to)
			}
			err = op
		}
	}()
	if network != "tcp" && network != "tcp4" {
		return nil, net.UnknownNetworkError(network)
	}
	_, p, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return nil, &net.AddrError{Err: "invalid port", Addr: addr}
	}
	to = netip.AddrPortFrom(netip.MustParseAddr(serverIP), uint16(port))
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f, err := l.socket(l.client)
	if err != nil {
		return nil, err
	}
	defer f.Close() // FileConn has a duplicate
	if err := connect(ctx, f, sockaddr(to)); err != nil {
		return nil, err
	}
	return net.FileConn(f)
}

// connect connects the non-blocking socket f, for as long as ctx allows.
func connect(ctx context.Context, f *os.File, to unix.Sockaddr) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	// An end of ctx wakes the wait below. The deadline belongs to f, not to
	// the duplicate that Dial returns: too late, it does no harm.
	stop := context.AfterFunc(ctx, func() { f.SetWriteDeadline(longAgo) })
	defer stop()
	var failed error
	waited := rc.Write(func(fd uintptr) (done bool) {
		// Calling connect again tells the outcome, also when the poller woke
		// us for nothing: EALREADY until it is known, then nil or the error.
		switch err := unix.Connect(int(fd), to); err {
		case nil, unix.EISCONN:
		case unix.EINPROGRESS, unix.EALREADY, unix.EINTR:
			return false
		default:
			failed = os.NewSyscallError("connect", err)
		}
		return true
	})
	if errors.Is(waited, os.ErrDeadlineExceeded) {
		return ctx.Err()
	}
	if waited != nil {
		return waited
	}
	return failed
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}
