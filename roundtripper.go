package deadconn

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
)

// Transport is an [http.RoundTripper] that recognises a dead connection,
// closes exactly that one, and sends a request that may be sent again once
// more, on another. [NewTransport] and [Wrap] make one, as do the methods of
// [Options]; the zero Transport is not usable. All methods may be called
// concurrently, and none is needed to release a Transport that is out of use,
// other than those that its base needs.
type Transport struct {
	base      http.RoundTripper
	own       *http.Transport // base, if it is ours; nil: wrapped
	reg       *Registry
	lean      bool // every connection is one of reg, see RoundTrip
	retryable func(*http.Request) bool
	noRetry   bool
	health    Health // with its defaults filled in
	hooks     Hooks
	log       *slog.Logger
	stats     counters
	events    *events
	autopsies struct {
		mu   sync.Mutex
		last []*death // guarded by mu; the newest last
	}
	spare  spare
	trials trials
}

var _ http.RoundTripper = (*Transport)(nil)

// RoundTrip sends req and returns its response, as [http.RoundTripper] says.
// It never changes req, and closes its body exactly once, also on errors. An
// error is the very value that the base returned, or a *[RetryError] if the
// request was sent twice.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	start := now()
	var a *attempt
	if !t.isLean(req) {
		a = t.newAttempt(req, guardedBody(req))
	}
	resp, err := t.send(a, req)
	if err != nil {
		return t.rescue(req, a, start, err)
	}
	return resp, nil
}

// isLean reports whether req needs no notes while it is under way: if it
// fails, the connections of our own registry tell enough to send it again.
// So it costs nothing. Others may need a proof that nothing was sent, or
// their body guarded. A request that net/http turns down at once is left
// to it.
func (t *Transport) isLean(req *http.Request) bool {
	if req == nil || req.URL == nil {
		return true
	}
	return t.lean && !hasBody(req) && IsIdempotent(req) && !req.Close && len(req.Header["Connection"]) == 0
}

// send makes one attempt; a is nil if it is lean.
func (t *Transport) send(a *attempt, req *http.Request) (*http.Response, error) {
	base := t.route(req)
	if a == nil {
		return base.RoundTrip(req)
	}
	need := needOf(req)
	if a.alone && need == 0 {
		need = needsOwn
	}
	if t.own != nil && need != 0 {
		a.req = a.req.WithContext(context.WithValue(a.req.Context(), dialNeedKey{}, need))
	}
	resp, err := base.RoundTrip(a.req)
	if a.onConn != nil {
		a.onConn()
	}
	if err != nil {
		return nil, err
	}
	return a.finish(resp), nil
}

// CloseIdleConnections closes the base's idle connections, if it can.
func (t *Transport) CloseIdleConnections() {
	closeIdle(t.base)
	t.trials.closeKept()
	if rt := t.spare.transport.Load(); rt != nil {
		rt.CloseIdleConnections()
	}
}

// CloseConnections closes every connection that the Registry knows, idle or
// not, and the idle ones of the base. Requests in flight are sent again if
// they may be. It returns the errors of the closing.
func (t *Transport) CloseConnections() error {
	err := t.reg.CloseAll()
	t.CloseIdleConnections()
	if err != nil {
		return fmt.Errorf("deadconn: %w", err)
	}
	return nil
}

// WrappedRoundTripper returns the base: apimachinery's net.RoundTripperWrapper,
// by which client-go finds dialers, TLS settings and idle connections. What
// NewTransport made returns its own *http.Transport; do not change it.
func (t *Transport) WrappedRoundTripper() http.RoundTripper { return t.base }

// closeIdle calls the first CloseIdleConnections on the way down from rt.
func closeIdle(rt http.RoundTripper) {
	for range maxLayers {
		switch u := rt.(type) {
		case interface{ CloseIdleConnections() }:
			u.CloseIdleConnections()
			return
		case interface{ WrappedRoundTripper() http.RoundTripper }:
			rt = u.WrappedRoundTripper()
		default:
			return
		}
	}
}
