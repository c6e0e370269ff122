package deadconn

import (
	"bytes"
	"io"
	"net/http"
	"reflect"
	"strings"
	"sync"
)

// IsIdempotent reports whether sending req twice has the effect of sending it
// once: the methods of RFC 9110 section 9.2.2 (GET, HEAD, OPTIONS, TRACE, PUT,
// DELETE; an empty method is GET), or any method with an Idempotency-Key or
// X-Idempotency-Key header. As in net/http, an entry with no value counts.
// It does not look at the body. A nil req is not idempotent.
func IsIdempotent(req *http.Request) bool {
	if req == nil {
		return false
	}
	switch req.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace,
		http.MethodPut, http.MethodDelete:
		return true
	}
	_, key := req.Header["Idempotency-Key"]
	_, xkey := req.Header["X-Idempotency-Key"]
	return key || xkey
}

// isUpgrade reports whether req asks to leave HTTP on its connection. Such a
// request is never sent again: what the connection is used for is not ours.
//
// client-go adds the Upgrade header below a wrapper; what an exec has besides
// tells.
func isUpgrade(req *http.Request) bool {
	return req.Method == http.MethodConnect || hasToken(req.Header["Connection"], "upgrade") ||
		req.Header["Sec-Websocket-Protocol"] != nil || req.Header["X-Stream-Protocol-Version"] != nil
}

// isWebSocket reports what net/http's requiresHTTP1 does.
func isWebSocket(req *http.Request) bool {
	return hasToken(req.Header["Connection"], "upgrade") && strings.EqualFold(req.Header.Get("Upgrade"), "websocket")
}

func hasToken(values []string, token string) bool {
	for _, v := range values {
		for t := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(t), token) {
				return true
			}
		}
	}
	return false
}

func hasBody(req *http.Request) bool { return req.Body != nil && req.Body != http.NoBody }

// guardedBody returns req's body, nil if it has none or one that needs no
// guard.
func guardedBody(req *http.Request) io.ReadCloser {
	if !hasBody(req) || req.GetBody != nil && inMemory(req.Body) {
		return nil
	}
	return req.Body
}

var (
	nopCloser         = reflect.TypeOf(io.NopCloser(nil))
	nopCloserWriterTo = reflect.TypeOf(io.NopCloser(struct {
		io.Reader
		io.WriterTo
	}{}))
)

// inMemory reports whether rc is what http.NewRequest makes of a reader whose
// bytes are in memory. Such a body cannot fail, and net/http (transfer.go
// isKnownInMemoryReader) sends it in one write with the header over HTTP/1,
// which it would not do with a guard around it.
func inMemory(rc io.ReadCloser) bool {
	v := reflect.ValueOf(rc)
	if t := v.Type(); t != nopCloser && t != nopCloserWriterTo {
		return false
	}
	switch v.Field(0).Interface().(type) {
	case *bytes.Reader, *bytes.Buffer, *strings.Reader:
		return true
	}
	return false
}

// hasLeftHTTP reports whether the connection that resp came by is its
// caller's from now on.
func hasLeftHTTP(req *http.Request, resp *http.Response) bool {
	return resp.StatusCode == http.StatusSwitchingProtocols ||
		req.Method == http.MethodConnect && resp.StatusCode/100 == 2
}

// replay returns the guarded body for another attempt after a, nil if there is
// none, and reports whether it can be had.
func replay(req *http.Request, a *attempt) (rc io.ReadCloser, ok bool) {
	if !hasBody(req) {
		return nil, true
	}
	b := a.currentBody()
	if b != nil {
		if rc := b.handOn(); rc != nil {
			return rc, true
		}
	}
	if req.GetBody == nil {
		return nil, false
	}
	rc, err := req.GetBody()
	if err != nil {
		return nil, false
	}
	if b != nil {
		b.settle(true)
	}
	return rc, true
}

// body guards a request body for one attempt. It closes the body below
// exactly once, remembers the body's own error, and holds back a Close as
// long as nothing was read, so that the next attempt can still have it.
type body struct {
	mu      sync.Mutex
	rc      io.ReadCloser // nil: closed, or handed on
	read    bool          // Read was called: only GetBody can bring it back
	closing bool          // Close was called, and held back
	settled bool          // no further attempt will ask for it
	err     error         // what Read failed with, if not io.EOF, or Close
}

func (b *body) Read(p []byte) (int, error) {
	b.mu.Lock()
	rc := b.rc
	if b.closing {
		rc = nil
	}
	if rc != nil {
		b.read = true
	}
	b.mu.Unlock()
	if rc == nil {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := rc.Read(p) // not locked: it may block until Close
	if err != nil && err != io.EOF {
		b.mu.Lock()
		// A read that Close interrupted failed for our sake.
		if b.rc != nil && b.err == nil {
			b.err = err
		}
		b.mu.Unlock()
	}
	return n, err
}

func (b *body) Close() error {
	b.mu.Lock()
	b.closing = true
	rc := b.rc
	if !b.read && !b.settled {
		rc = nil // held back
	}
	if rc != nil {
		b.rc = nil
	}
	b.mu.Unlock()
	if rc == nil {
		return nil
	}
	err := rc.Close()
	if err != nil {
		b.mu.Lock()
		b.err = err // HTTP/1 returns it
		b.mu.Unlock()
	}
	return err
}

// settle ends the holding back: no further attempt will ask for the body. If
// failed, the attempt is over and the body is closed now, as RoundTrip must;
// else its user closes it when it is done with it.
func (b *body) settle(failed bool) {
	b.mu.Lock()
	b.settled = true
	done := failed || b.closing
	b.mu.Unlock()
	if done {
		b.Close()
	}
}

// handOn gives up the body for another attempt, if nothing of it was read.
func (b *body) handOn() io.ReadCloser {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.read || b.rc == nil {
		return nil
	}
	rc := b.rc
	b.rc = nil
	return rc
}

// failure returns the body's own error, or nil.
func (b *body) failure() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}
