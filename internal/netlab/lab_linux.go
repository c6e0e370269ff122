package netlab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// device is the name of the link on both sides.
const device = "lab0"

// Lab is a client and a server namespace and the link between them. Its
// methods may be called at the same time.
type Lab struct {
	client, server *namespace
	wire           *wire // nil: a veth pair

	mu     sync.RWMutex // held for writing by Close and while faults change
	closed bool
}

// New joins client and server by a veth pair: no delay, no loss.
func New() (*Lab, error) {
	return build(func(l *Lab) error {
		// The peer is made in the server's namespace at once: the link never
		// shows up in the namespace of the process.
		return l.client.ip("link add "+device+" type veth peer name "+device+" netns /proc/self/fd/3\n", l.server.f)
	})
}

// NewWith joins client and server by a wire in user space, between a TUN
// device on each side, which delays and loses packets.
func NewWith(o Options) (*Lab, error) {
	if o.Delay < 0 || !(o.Loss >= 0 && o.Loss <= 1) {
		return nil, fmt.Errorf("netlab: bad options %+v", o)
	}
	return build(func(l *Lab) (err error) {
		l.wire, err = newWire(l.client, l.server, o)
		return err
	})
}

func build(link func(*Lab) error) (_ *Lab, err error) {
	l := new(Lab)
	defer func() {
		if err != nil {
			l.Close()
			err = fmt.Errorf("netlab: %w", err)
		}
	}()
	for _, tool := range []string{"ip", "nft"} {
		if _, err := lookTool(tool); err != nil {
			return nil, err
		}
	}
	if l.client, err = newNamespace(); err != nil {
		return nil, err
	}
	if l.server, err = newNamespace(); err != nil {
		return nil, err
	}
	if err := link(l); err != nil {
		return nil, err
	}
	if err := l.client.ip("link set lo up\n" + linkUp(clientIP)); err != nil {
		return nil, err
	}
	if err := l.server.ip("link set lo up\n" + linkUp(serverIP)); err != nil {
		return nil, err
	}
	if err := l.client.nft(ruleset("dport", "sport")); err != nil {
		return nil, err
	}
	if err := l.server.nft(ruleset("sport", "dport")); err != nil {
		return nil, err
	}
	if l.wire == nil {
		if err := l.awaitLink(); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// awaitLink waits until the veth pair carries packets: on a busy machine that is
// some time after it was told to (linkwatch). A SYN that is lost before would
// give its connection a round trip time of a second to reckon with. Nobody
// listens: a refusal has gone both ways.
func (l *Lab) awaitLink() error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c, err := l.Dial(ctx, "tcp", ":1")
	if err == nil {
		c.Close()
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil
	}
	return fmt.Errorf("the link does not come up: %w", err)
}

// linkUp is the ip batch that gives the link its address and its route.
// Without the long queue a TUN would lose packets of its own in a burst.
func linkUp(addr string) string {
	return "addr replace " + addr + "/24 dev " + device + "\n" +
		"link set " + device + " txqueuelen 10000 up\n"
}

// Close removes the lab. Sockets made in it stay open, on a network without a
// link: closing them is their owner's job. The namespaces are gone when the
// last of them is.
func (l *Lab) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	var errs []error
	// The link goes first. The other way round, the kernel would still send
	// the FINs of closing sockets over it, which a dead path must not do.
	switch {
	case l.wire != nil:
		errs = append(errs, l.wire.close())
	case l.client != nil && l.client.hasDevice():
		errs = append(errs, l.client.ip("link del "+device+"\n"))
	}
	for _, n := range []*namespace{l.client, l.server} {
		if n != nil {
			errs = append(errs, n.close())
		}
	}
	return errors.Join(errs...)
}

// hasDevice reports whether the link exists: it does not where New failed half-way.
func (n *namespace) hasDevice() bool {
	return n.do(func() error {
		_, err := net.InterfaceByName(device)
		return err
	}) == nil
}

// ServerAddr is the server's IP address.
func (l *Lab) ServerAddr() string { return serverIP }

// StartServer starts a command, a real server perhaps, inside the server's
// namespace. The caller waits for it, and must end it before the test binary
// does: Pdeathsig is no help, as it follows the thread, not the process.
func (l *Lab) StartServer(cmd *exec.Cmd) error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.closed {
		return net.ErrClosed
	}
	return l.server.start(cmd)
}

// LinkDown takes the client's link down. Its routes go with it: dials fail at
// once with ENETUNREACH, established connections wait.
func (l *Lab) LinkDown() error {
	return l.change(func() error { return l.client.ip("link set " + device + " down\n") })
}

// LinkUp brings the client's link back.
func (l *Lab) LinkUp() error {
	return l.change(func() error { return l.client.ip(linkUp(clientIP)) })
}

// Stats tells how many packets the wire delivered and how many it dropped,
// both ways together. What a cut drops is not counted, and a lab without a
// wire counts nothing.
func (l *Lab) Stats() (delivered, dropped int64) {
	if l.wire == nil {
		return 0, 0
	}
	return l.wire.delivered.Load(), l.wire.dropped.Load()
}

// change runs f, which alters links or rules, while nothing else does.
func (l *Lab) change(f func() error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return net.ErrClosed
	}
	return f()
}
