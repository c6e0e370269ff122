package netlab

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

var longAgo = time.Unix(1, 0)

// queueLen is how many packets may be under way in one direction. More are
// dropped, as a router would.
const queueLen = 1 << 14

// wire carries packets between two TUN devices. It stands in for the kernel's
// netem, which many kernels are built without.
type wire struct {
	tuns               [2]*os.File
	delay              time.Duration
	loss               float64
	delivered, dropped atomic.Int64
	done               chan struct{}
	wg                 sync.WaitGroup
}

type packet struct {
	due  time.Time
	data []byte
}

func newWire(a, b *namespace, o Options) (*wire, error) {
	w := &wire{delay: o.Delay, loss: o.Loss, done: make(chan struct{})}
	for i, n := range []*namespace{a, b} {
		err := n.do(func() (err error) {
			w.tuns[i], err = newTUN()
			return err
		})
		if err != nil {
			if i > 0 {
				w.tuns[0].Close()
			}
			return nil, err
		}
	}
	w.carry(w.tuns[0], w.tuns[1], rand.New(rand.NewPCG(o.Seed, 0)))
	w.carry(w.tuns[1], w.tuns[0], rand.New(rand.NewPCG(o.Seed, 1)))
	return w, nil
}

// newTUN makes the link's device in the namespace of the calling thread. The
// device goes when the file is closed.
func newTUN() (*os.File, error) {
	const path = "/dev/net/tun"
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	req, err := unix.NewIfreq(device)
	if err == nil {
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("TUN device: %w", os.NewSyscallError("ioctl", err))
	}
	// Only now: the poller takes a TUN file that has its device.
	return os.NewFile(uintptr(fd), path), nil
}

// carry starts one direction: a goroutine that takes the packets in and one
// that hands them out when they are due.
func (w *wire) carry(from, to *os.File, rnd *rand.Rand) {
	queue := make(chan packet, queueLen)
	w.wg.Go(func() {
		defer close(queue)
		w.receive(from, queue, rnd)
	})
	w.wg.Go(func() { w.send(to, queue) })
}

func (w *wire) receive(from *os.File, queue chan<- packet, rnd *rand.Rand) {
	buf := make([]byte, 1<<16)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return // closed
		}
		// IPv6 hosts talk on a new link unasked: that is not the test's
		// traffic and must neither be counted nor move the losses about.
		if n == 0 || buf[0]>>4 != 4 {
			continue
		}
		if rnd.Float64() < w.loss {
			w.dropped.Add(1)
			continue
		}
		p := packet{time.Now().Add(w.delay), append([]byte(nil), buf[:n]...)}
		select {
		case queue <- p:
		default:
			w.dropped.Add(1)
		}
	}
}

// send keeps the order: the delay is the same for all.
func (w *wire) send(to *os.File, queue <-chan packet) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for p := range queue {
		if d := time.Until(p.due); d > 0 {
			timer.Reset(d)
			select {
			case <-timer.C:
			case <-w.done:
				return
			}
		}
		// The write fails while the link on that side is down.
		if _, err := to.Write(p.data); err != nil {
			w.dropped.Add(1)
			continue
		}
		w.delivered.Add(1)
	}
}

func (w *wire) close() error {
	close(w.done)
	err := errors.Join(w.tuns[0].Close(), w.tuns[1].Close())
	w.wg.Wait()
	return err
}
