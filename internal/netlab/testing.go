package netlab

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"testing"
)

// requireEnv, set to 1, turns the skips of ForTest into failures: in CI a lab
// that cannot be built must not pass for a test that ran.
const requireEnv = "DEADCONN_REQUIRE_NETNS"

// ForTest returns a lab that is closed when the test ends. The zero Options
// stand for New, any other for NewWith.
//
// The test is skipped where the machine or the rights for a lab are missing,
// unless DEADCONN_REQUIRE_NETNS=1 is set.
func ForTest(tb testing.TB, o Options) *Lab {
	tb.Helper()
	build := New
	if o != (Options{}) {
		build = func() (*Lab, error) { return NewWith(o) }
	}
	l, err := build()
	if err != nil {
		if missing(err) && os.Getenv(requireEnv) != "1" {
			tb.Skipf("no network lab here: %v (set %s=1 to fail instead)", err, requireEnv)
		}
		tb.Fatalf("network lab: %v", err)
	}
	tb.Cleanup(func() {
		if err := l.Close(); err != nil {
			tb.Errorf("closing the network lab: %v", err)
		}
	})
	return l
}

// missing reports whether err says that the machine lacks something: any other
// error is a fault of the lab itself.
func missing(err error) bool {
	return errors.Is(err, fs.ErrPermission) || // not root
		errors.Is(err, exec.ErrNotFound) || // ip, nft
		errors.Is(err, fs.ErrNotExist) || // /dev/net/tun
		errors.Is(err, errors.ErrUnsupported) // the kernel, the operating system
}
