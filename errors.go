package deadconn

import (
	"fmt"
	"strings"

	"github.com/hashicorp/go-multierror"
)

// RetryError is returned by [Transport.RoundTrip] when a request was sent
// twice and failed twice. It holds both attempts' errors: errors.Is and
// errors.As reach both, the last first. Its text is one line with both texts.
// A request that was sent once fails with the very error value that the base
// returned, never with a RetryError.
type RetryError struct {
	attempts *multierror.Error // the last attempt first
}

func newRetryError(first, last error) *RetryError {
	return &RetryError{attempts: &multierror.Error{
		Errors:      []error{last, first},
		ErrorFormat: oneLine,
	}}
}

func oneLine(errs []error) string {
	text := fmt.Sprintf("deadconn: retry failed: %v (first attempt: %v)", errs[0], errs[1])
	return strings.NewReplacer("\r", " ", "\n", " ").Replace(text)
}

// Error returns one line.
func (e *RetryError) Error() string {
	if e == nil || e.attempts == nil {
		return "deadconn: retry failed"
	}
	return e.attempts.Error()
}

// First returns the first attempt's error, nil if e is nil or the zero value.
func (e *RetryError) First() error { return e.at(1) }

// Last returns the last attempt's error, nil if e is nil or the zero value.
func (e *RetryError) Last() error { return e.at(0) }

func (e *RetryError) at(i int) error {
	if e == nil || e.attempts == nil || i >= len(e.attempts.Errors) {
		return nil
	}
	return e.attempts.Errors[i]
}

// Unwrap returns the attempts' errors, the last first.
func (e *RetryError) Unwrap() []error {
	if e == nil || e.attempts == nil {
		return nil
	}
	return e.attempts.WrappedErrors()
}

// Timeout is the last attempt's: url.Error.Timeout looks no further than its
// direct Err.
func (e *RetryError) Timeout() bool {
	t, ok := e.Last().(interface{ Timeout() bool })
	return ok && t.Timeout()
}

// Temporary is the last attempt's.
func (e *RetryError) Temporary() bool {
	t, ok := e.Last().(interface{ Temporary() bool })
	return ok && t.Temporary()
}

// handshakeTimeoutError is net/http's tlsHandshakeTimeoutError, which is not
// exported: same text, same answers.
type handshakeTimeoutError struct{}

func (handshakeTimeoutError) Timeout() bool   { return true }
func (handshakeTimeoutError) Temporary() bool { return true }
func (handshakeTimeoutError) Error() string   { return "net/http: TLS handshake timeout" }

// notSentError is how a dial of ours ends that is not needed any more. Its
// request has sent nothing; RoundTrip sends it again and no caller sees this.
type notSentError struct{ why string }

func (e *notSentError) Error() string { return "deadconn: nothing was sent: " + e.why }
