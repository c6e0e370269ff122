package deadconn

import (
	"errors"
	"net"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// What only the kernel can say of a connection, and only to root.
func TestClassifyKernelErrors(t *testing.T) {
	for _, p := range []provocation{
		// The path drops everything, and the kernel gives up on it.
		{"ETIMEDOUT", func(t *testing.T) error {
			r := newPeerRig(t, respond)
			r.mustGet(t)
			c := r.dialer.Last()
			setUserTimeout(t, c, 100*time.Millisecond)
			if err := faultnet.BlackholeSocket(c); err != nil {
				t.Skip(err)
			}
			return r.get(t)
		}, KindTimedOut, "read: connection timed out", syscall.ETIMEDOUT},

		// An administrator destroys the socket.
		{"ECONNABORTED", func(t *testing.T) error {
			err := inFlight(func(c *faultnet.Conn) {
				port := strconv.Itoa(c.LocalAddr().(*net.TCPAddr).Port)
				exec.Command("ss", "--kill", "--tcp", "--numeric", "src", "127.0.0.1", "sport", "=", port).Run()
				time.AfterFunc(time.Second, func() { c.Close() }) // if it may not
			})(t)
			if errors.Is(err, net.ErrClosed) {
				t.Skip("cannot destroy sockets here (ss --kill)")
			}
			return err
		}, KindReset, "read: software caused connection abort", syscall.ECONNABORTED},
	} {
		p.run(t)
	}
}

func setUserTimeout(t *testing.T, c *faultnet.Conn, d time.Duration) {
	t.Helper()
	rc, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	rc.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	})
	if err != nil {
		t.Fatal(err)
	}
}
