package deadconn

import (
	"net"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// rawSocket finds the socket below c, through any stack of wrappers; nil if
// there is none.
func rawSocket(c net.Conn) syscall.RawConn {
	for range maxLayers {
		if s, ok := c.(syscall.Conn); ok {
			if raw, err := s.SyscallConn(); err == nil {
				return raw
			}
			return nil
		}
		u, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = u.NetConn()
	}
	return nil
}

// A question is one poll of a socket. They are pooled, since what Control
// calls would be allocated for each.
type question struct {
	ask    func(fd uintptr)
	poll   unix.PollFd
	noWait unix.Timespec
	hungUp bool
}

var questions = sync.Pool{New: func() any {
	q := new(question)
	q.ask = func(fd uintptr) {
		q.poll = unix.PollFd{Fd: int32(fd), Events: unix.POLLRDHUP}
		// Raw: it does not block, and telling the scheduler costs more than
		// the call.
		n, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&q.poll)), 1,
			uintptr(unsafe.Pointer(&q.noWait)), 0, 0, 0)
		q.hungUp = errno == 0 && n == 1 && q.poll.Revents&unix.POLLRDHUP != 0
	}
	return q
}}

// peerHungUp reports whether the peer has shut its side. When in doubt, not.
func peerHungUp(raw syscall.RawConn) bool {
	q := questions.Get().(*question)
	defer questions.Put(q)
	q.hungUp = false
	return raw.Control(q.ask) == nil && q.hungUp
}

// unread returns how many bytes have come in that nobody has read (SIOCINQ,
// tcp(7), which has the number of TIOCINQ).
func unread(raw syscall.RawConn) (n int) {
	raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	return n
}

// tcpInfo reads TCP_INFO (tcp(7)), in about a microsecond. It knows nothing of
// a socket that is closed or is none of TCP's.
func tcpInfo(raw syscall.RawConn) (k kernelInfo) {
	raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return
		}
		k = kernelInfo{
			known:       true,
			unacked:     info.Unacked,
			notSent:     info.Notsent_bytes,
			retransmits: uint32(info.Retransmits),
			probes:      uint32(info.Probes),
			sinceACK:    time.Duration(info.Last_ack_recv) * time.Millisecond,
			acked:       info.Bytes_acked,
			rto:         time.Duration(info.Rto) * time.Microsecond,
			rtt:         time.Duration(info.Rtt) * time.Microsecond,
		}
	})
	return k
}

// probePeer makes the kernel send a keep-alive probe now, if nothing came in
// for a second, and returns what the socket had set before, to be put back by
// unprobe; zero if it cannot. Setting TCP_KEEPIDLE, even to what it is, makes
// the kernel look at its timer again (tcp_sock_set_keepidle). TCP_KEEPCNT is
// raised, so that the verdict stays ours.
func probePeer(raw syscall.RawConn) (was keepAlive) {
	raw.Control(func(fd uintptr) {
		on, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_KEEPALIVE)
		if err != nil || on == 0 {
			return // not wanted on this socket
		}
		idle, err1 := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPIDLE)
		count, err2 := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPCNT)
		if err1 == nil && err2 == nil && setKeepAlive(fd, keepAlive{1, maxKeepCount}) {
			was = keepAlive{idle, count}
		}
	})
	return was
}

const maxKeepCount = 127 // MAX_TCP_KEEPCNT

func unprobe(raw syscall.RawConn, was keepAlive) {
	raw.Control(func(fd uintptr) { setKeepAlive(fd, was) })
}

func setKeepAlive(fd uintptr, k keepAlive) bool {
	return unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPCNT, k.count) == nil &&
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, k.idle) == nil
}
