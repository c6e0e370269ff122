package deadconn

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

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
