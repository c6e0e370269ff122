package netlab

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// threadNS is the network namespace of the thread that opens it. The namespace
// belongs to the thread, not to the process.
const threadNS = "/proc/thread-self/ns/net"

// namespace is a network namespace without a name, kept alive by its file.
type namespace struct {
	f *os.File
}

func newNamespace() (*namespace, error) {
	var n namespace
	err := visit(
		func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("new network namespace (needs root or CAP_SYS_ADMIN): %w", err)
			}
			return nil
		},
		func() (err error) {
			n.f, err = os.Open(threadNS)
			return err
		})
	if err != nil {
		return nil, err
	}
	return &n, nil
}

func (n *namespace) close() error { return n.f.Close() }

// do runs f on a thread inside the namespace. What f makes there (sockets, TUN
// devices, child processes) stays there; f must not leave work to other
// goroutines, as those run elsewhere.
func (n *namespace) do(f func() error) error {
	return visit(
		func() error {
			return os.NewSyscallError("setns", unix.Setns(int(n.f.Fd()), unix.CLONE_NEWNET))
		}, f)
}

// visit runs enter, then f, on a thread that is brought back to its own
// namespace afterwards.
//
// It takes a goroutine of its own, so that the caller's thread is left alone
// even if the caller has locked it. The runtime never clones a new thread from
// a locked one, so the namespace cannot spread to others.
func visit(enter, f func() error) error {
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open(threadNS)
		if err != nil {
			runtime.UnlockOSThread()
			errc <- err
			return
		}
		defer home.Close()
		if err = enter(); err == nil {
			err = f()
		}
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back == nil {
			runtime.UnlockOSThread()
		} // else the goroutine ends locked, and its stray thread with it
		errc <- err
	}()
	return <-errc
}

// start starts cmd inside the namespace: a child has the namespace of the
// thread that forks it.
func (n *namespace) start(cmd *exec.Cmd) error {
	return n.do(cmd.Start)
}

// run runs a tool inside the namespace, fed with a script on its standard
// input. The child finds the extra files at descriptors 3 and up.
func (n *namespace) run(script, tool string, args []string, extra ...*os.File) error {
	path, err := lookTool(tool)
	if err != nil {
		return err
	}
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C") // commandError reads the messages
	cmd.Stdin = strings.NewReader(script)
	cmd.Stdout = io.Discard
	cmd.ExtraFiles = extra
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := n.start(cmd); err != nil {
		return err
	}
	if err := cmd.Wait(); err != nil {
		return commandError(tool, strings.TrimSpace(stderr.String()), err)
	}
	return nil
}

// ip runs a batch of ip commands, one a line.
func (n *namespace) ip(batch string, extra ...*os.File) error {
	return n.run(batch, "ip", []string{"-batch", "-"}, extra...)
}

// nft runs a script as one transaction.
func (n *namespace) nft(script string) error {
	return n.run(script, "nft", []string{"-f", "-"})
}

// lookTool finds an administrator's tool also for users whose PATH has no sbin.
func lookTool(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if p, e := exec.LookPath(filepath.Join(dir, name)); e == nil {
			return p, nil
		}
	}
	return "", err
}

// commandError tells what the machine does not allow or have from what is our
// own mistake: both are exit statuses, only the text differs.
func commandError(tool, text string, err error) error {
	kind := err
	switch {
	case strings.Contains(text, "Operation not permitted"), strings.Contains(text, "Permission denied"):
		kind = errors.Join(err, fs.ErrPermission)
	case strings.Contains(text, "not supported"), strings.Contains(text, "Unknown device type"):
		kind = errors.Join(err, errors.ErrUnsupported)
	}
	return &toolError{tool: tool, text: text, err: kind}
}

type toolError struct {
	tool, text string
	err        error
}

func (e *toolError) Error() string { return e.tool + ": " + e.text }
func (e *toolError) Unwrap() error { return e.err }
