package clientgo

import (
	"net/http"

	"github.com/deadconn/deadconn"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"
)

// Protect makes the clients that are made from cfg from now on find dead
// connections, close exactly those, and send again what may be sent again. No
// options mean the defaults of [deadconn.Options]; more than one panic, as do
// options that contradict each other. Base, and the dialer and TLS settings of
// a Registry, must not be set: they come from cfg.
//
// Call it after cfg is made, and before its clients are. Calling it again, also
// on a copy of cfg, changes nothing but the options: those of the last call
// count. A cfg that has deadconn.Wrap already may be protected too.
//
// Everything in cfg keeps its meaning: Dial, Proxy, Transport, WrapTransport,
// credential plugins, certificates and CA files that are reloaded, and client-go's
// environment variables HTTP2_READ_IDLE_TIMEOUT_SECONDS,
// HTTP2_PING_TIMEOUT_SECONDS and DISABLE_HTTP2. What Protect adds goes below the
// wrappers that cfg has, next to the connections: they see one request and its
// outcome, also when it was sent twice.
//
// Protect leaves cfg.Dial alone. client-go caches its transports by the
// identity of the dialer, and makes a new identity of cfg.Dial for each client
// (kubernetes#125818). Instead, the clients that would share a transport
// without Protect share one with it, for equal options, and their connections.
// Options are equal if all fields are; two functions are if they are the very
// same one, so let Retryable be no closure that is made anew each time.
//
// If cfg.Transport is set to something else than an *http.Transport, it dials
// by itself, and Protect does what deadconn.Wrap does.
func Protect(cfg *rest.Config, o ...deadconn.Options) {
	var opts deadconn.Options
	switch len(o) {
	case 0:
	case 1:
		opts = o[0]
	default:
		panic("clientgo: Protect was given more than one deadconn.Options")
	}
	check(opts)
	p := poolFor(opts)
	cfg.WrapTransport = transport.Wrappers(p.wrap, cfg.WrapTransport)
}

func check(o deadconn.Options) {
	o.Wrap(http.DefaultTransport) // panics on contradictions
	if r := o.Registry; r != nil && (r.Dial != nil || r.TLSClientConfig != nil || r.TLSHandshakeTimeout != 0) {
		panic("clientgo: Options.Registry has a dialer or TLS settings, but those come from the rest.Config")
	}
}
