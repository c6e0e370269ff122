package main

import (
	"syscall"
	"time"

	"github.com/deadconn/deadconn"
)

// A scenario is one way for a connection to die.
type scenario struct {
	name  string // for scripts
	title string
	what  string // what is done to the connection, in one line

	do func(*rig)

	// timeout is each request's; zero means longTimeout.
	timeout time.Duration

	// waits: the time goes by waiting, so that all clients can run at once.
	waits bool

	// unpromised says, by the client's name, why it may lose requests.
	unpromised map[string]string
}

// longTimeout is never met unless something hangs.
const longTimeout = 5 * time.Second

// health makes deadconn look for silent death sooner than its defaults do,
// which are for production: here nobody wants to wait 22 seconds.
//
// A real black hole needs no setting on Linux. There the kernel's account of
// the path (TCP_INFO) tells of it: after 0.5 s new requests avoid the
// connection, after 2.6 s it is evicted. The demo needs no rights and runs
// everywhere, so that its hole is made inside the process, where the kernel
// sees nothing. What is left are HTTP/2 PINGs and the bound on a stalled write.
var health = deadconn.Health{
	PingInterval: 300 * time.Millisecond,
	PingTimeout:  700 * time.Millisecond,
	WriteTimeout: 500 * time.Millisecond,
}

const (
	pingNote  = " deadconn pings a silent peer after 0.3 s here, after 15 s by default."
	writeNote = " deadconn bears it for 0.5 s here, for 22 s by default."
)

const (
	plain   = "net/http"
	owned   = "deadconn"
	wrapped = "deadconn.Wrap"
)

var kernelsAffair = map[string]string{
	wrapped: "notices on Linux what the kernel sees, as it does of a real black hole; " +
		"this fault is made inside the process, where the kernel sees nothing",
}

var scenarios = []scenario{
	{
		name:  "closed-underneath",
		title: `The socket is closed underneath (golang/go#39750)`,
		what:  "10 times: close the socket in use, its reader sleeps on; then 3 GETs.",
		do: func(r *rig) {
			for range 10 {
				r.kill((*conn).CloseUnderneath)
				r.get(3)
			}
		},
	},
	{
		name:  "write-error-post",
		title: "A write fails (broken pipe), and the request is a POST",
		what:  "10 times: make writes fail; then 3 POSTs, of which none may run twice.",
		do: func(r *rig) {
			for range 10 {
				r.kill(func(c *conn) { c.FailWrites(syscall.EPIPE) })
				r.post(3)
			}
		},
		unpromised: map[string]string{wrapped: "cannot know that no POST arrived, so it reports the error"},
	},
	{
		name:  "reset-in-flight",
		title: "The server resets the connection while answers are due",
		what:  "Reset it (RST) while 50 GETs wait for their answers; 3 more follow.",
		do: func(r *rig) {
			r.inFlight(50, r.reset)
			r.get(3)
		},
	},
	{
		name:  "burst",
		title: "It dies under 200 requests at once",
		what:  "100 GETs wait for answers when writes begin to fail; 100 more start then.",
		do: func(r *rig) {
			r.inFlight(100, func() {
				r.kill((*conn).CloseUnderneath)
				r.start(100)
			})
		},
	},
	{
		name:       "black-hole",
		title:      "A black hole: nothing comes back, not even an error",
		what:       "Drop all its bytes; a GET every 0.1 s, each gives up after 2 s." + pingNote,
		do:         func(r *rig) { r.kill((*conn).Blackhole); r.steady(15) },
		timeout:    2 * time.Second,
		waits:      true,
		unpromised: kernelsAffair,
	},
	{
		name:       "stalled-write",
		title:      "A write that never ends: the send buffer is full and stays so",
		what:       "Hold back its writes; a GET every 0.1 s, each gives up after 2 s." + writeNote,
		do:         func(r *rig) { r.kill((*conn).HoldWrites); r.steady(15) },
		timeout:    2 * time.Second,
		waits:      true,
		unpromised: kernelsAffair,
	},
	{
		name:  "slow-server",
		title: "The counter-check: a slow server on a sound connection",
		what:  "10 GETs take 1.5 s each. Nothing is broken: the connection must stay.",
		do:    func(r *rig) { r.slow(10, 1500*time.Millisecond) },
		waits: true,
	},
}
