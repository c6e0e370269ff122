package deadconn

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/net/http2"
)

// Kind says what an error from an HTTP round trip tells about the connection
// that carried it. The zero Kind, [KindUnknown], means that nothing is known
// against the connection. Kinds are values: safe to copy, compare and use as
// map keys. The names that [Kind.String] returns are stable.
type Kind uint8

const (
	// KindUnknown: nothing is known against the connection. Stream errors,
	// HTTP statuses, deadlines, cancellation, dial and certificate errors,
	// and every error that no rule knows.
	KindUnknown Kind = iota

	// KindClosed: the socket was closed on this side while it was still in
	// the pool (golang/go#39750), or net/http closed the connection because
	// another stream's write had failed.
	KindClosed

	// KindReset: the peer, or something on the way that spoke for it, reset
	// the connection (ECONNRESET, EPIPE, ECONNABORTED).
	KindReset

	// KindTimedOut: the kernel gave up on the path (ETIMEDOUT, EHOSTUNREACH
	// on an established connection), or a write ran out of its deadline,
	// which is final for a TLS connection.
	KindTimedOut

	// KindEOF: the peer ended the connection before it answered.
	KindEOF

	// KindLost: an HTTP/2 PING (RFC 9113 section 6.7) stayed unanswered.
	KindLost

	// KindSilent: deadconn itself evicted the connection, because its path
	// had been proven dead.
	KindSilent

	// KindGoAway: the server sent GOAWAY (RFC 9113 section 6.8) and closed
	// the connection. It may have processed the request.
	KindGoAway

	// KindGoAwayUnprocessed: the same, with a Last-Stream-ID of 0: the
	// server has processed nothing at all on that connection.
	KindGoAwayUnprocessed

	// KindGoAwayCalm: the server closed the connection with
	// ENHANCE_YOUR_CALM. It is dead, and nothing is sent again at once.
	KindGoAwayCalm

	// KindProtocol: the bytes that came in were no valid HTTP/2 or TLS, so
	// that nothing after them can be understood (RFC 9113 section 5.4.1).
	KindProtocol

	// KindDraining: a graceful GOAWAY said that the request was not
	// processed. The connection still finishes its older streams.
	KindDraining

	// KindRefusedStream: the server refused the stream unprocessed
	// (REFUSED_STREAM, RFC 9113 section 8.7). The connection is healthy.
	KindRefusedStream

	// KindNotSent: net/http found no usable connection for the request and
	// sent nothing.
	KindNotSent

	// KindNotEstablished: the connection ended before its first request, of
	// which nothing was sent.
	KindNotEstablished

	kinds int = iota
)

var kindNames = [kinds]string{
	KindUnknown:           "unknown",
	KindClosed:            "closed",
	KindReset:             "reset",
	KindTimedOut:          "timed_out",
	KindEOF:               "eof",
	KindLost:              "ping_lost",
	KindSilent:            "silent",
	KindGoAway:            "goaway",
	KindGoAwayUnprocessed: "goaway_unprocessed",
	KindGoAwayCalm:        "goaway_calm",
	KindProtocol:          "protocol",
	KindDraining:          "draining",
	KindRefusedStream:     "refused_stream",
	KindNotSent:           "not_sent",
	KindNotEstablished:    "not_established",
}

// String returns the stable name of k, lower case with underscores, fit for a
// metric label.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "kind(" + strconv.Itoa(int(k)) + ")"
}

// Dead reports whether no stream on the connection can succeed any more, so
// that the connection is to be evicted.
func (k Kind) Dead() bool {
	switch k {
	case KindClosed, KindReset, KindTimedOut, KindEOF, KindLost, KindSilent,
		KindGoAway, KindGoAwayUnprocessed, KindGoAwayCalm, KindProtocol,
		KindNotEstablished:
		return true
	}
	return false
}

// Unprocessed reports whether the server cannot have acted on the request, so
// that sending it again is safe for every method (RFC 9110 section 9.2.2).
// A false answer means "may have been processed".
func (k Kind) Unprocessed() bool {
	switch k {
	case KindGoAwayUnprocessed, KindDraining, KindRefusedStream, KindNotSent, KindNotEstablished:
		return true
	}
	return false
}

// Classify says what err tells about the connection that carried the request.
// It is pure, and looks through every wrapping: Unwrap of both forms,
// [errors.Join], multierror, *url.Error. A nil error, or one that no rule
// knows, is [KindUnknown].
//
// Whose error it is cannot be seen from the error alone. One that the
// request's own body or its context gave has the chain of a dead connection
// and says nothing about it; [Transport] rules those out first.
func Classify(err error) Kind {
	if err == nil {
		return KindUnknown
	}
	all := flatten(err)
	for _, r := range rules {
		if kind, ok := r(all); ok {
			return kind
		}
	}
	return KindUnknown
}

// maxErrors bounds a walk over an error tree, which may be as deep or as
// cyclic as its authors made it.
const maxErrors = 256

// flatten lists err and all that it wraps, in the order of errors.Is.
func flatten(err error) []error {
	var all []error
	for stack := []error{err}; len(stack) > 0 && len(all) < maxErrors; {
		e := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if e == nil {
			continue
		}
		all = append(all, e)
		switch u := e.(type) {
		case interface{ WrappedErrors() []error }: // multierror, whose Unwrap shows no more than the count
			stack = push(stack, u.WrappedErrors())
		case interface{ Unwrap() error }:
			stack = append(stack, u.Unwrap())
		case interface{ Unwrap() []error }:
			stack = push(stack, u.Unwrap())
		}
	}
	return all
}

// push puts errs on stack so that the first comes off first.
func push(stack, errs []error) []error {
	for _, err := range slices.Backward(errs) {
		stack = append(stack, err)
	}
	return stack
}

// contains reports whether err is or wraps an E.
func contains[E error](err error) bool {
	return slices.ContainsFunc(flatten(err), func(e error) bool { _, ok := e.(E); return ok })
}

// A rule answers for the first error of the chain that it knows.
type rule func(chain []error) (kind Kind, ok bool)

// rules is the ordered table. The first answer counts: those that clear the
// connection stand before those that blame it.
var rules = []rule{
	each(ownDeath),
	each(callerGaveUp),
	each(notIO),
	each(streamError),
	each(socketError),
	each(tlsError),
	each(endOfFile),
	each(netHTTPText),
}

func each(f func(error) (Kind, bool)) rule {
	return func(chain []error) (Kind, bool) {
		for _, err := range chain {
			if kind, ok := f(err); ok {
				return kind, true
			}
		}
		return KindUnknown, false
	}
}

// ownDeath knows what an evicted connection of ours returns.
func ownDeath(err error) (Kind, bool) {
	switch e := err.(type) {
	case *death:
		return e.kind, true
	case *notSentError:
		return KindNotSent, true
	}
	return KindUnknown, false
}

// callerGaveUp: the end of a context is the caller's decision, whatever else
// is in the chain.
func callerGaveUp(err error) (Kind, bool) {
	return KindUnknown, err == context.Canceled || err == context.DeadlineExceeded
}

// notIO: an operation other than reading from or writing to an established
// connection (dial, proxyconnect, "socks connect", "remote error") tells
// nothing about a pooled one.
func notIO(err error) (Kind, bool) {
	op, ok := err.(*net.OpError)
	if !ok {
		return KindUnknown, false
	}
	switch op.Op {
	case "read", "write", "readfrom", "writeto", "local error":
		return KindUnknown, false
	}
	return KindUnknown, true
}

// streamError: RFC 9113 section 5.4.2, one request and not the connection. The
// As method of net/http's own copy of the type fills in x/net's. (errors.As
// would walk a chain without bounds.)
func streamError(err error) (Kind, bool) {
	se, ok := err.(http2.StreamError)
	if !ok {
		as, _ := err.(interface{ As(any) bool })
		if as == nil || !as.As(&se) {
			return KindUnknown, false
		}
	}
	if se.Code == http2.ErrCodeRefusedStream {
		return KindRefusedStream, true
	}
	return KindUnknown, true
}

// socketError knows what the kernel and package net say of a connection.
func socketError(err error) (Kind, bool) {
	if err == net.ErrClosed {
		return KindClosed, true
	}
	if op, ok := err.(*net.OpError); ok {
		// A write deadline that expired is final: the TLS layer keeps it
		// (crypto/tls permanentError). A read deadline is somebody's policy
		// and proves nothing.
		if op.Op != "read" && slices.Contains(flatten(op.Err), os.ErrDeadlineExceeded) {
			return KindTimedOut, true
		}
		return KindUnknown, false
	}
	errno, ok := err.(syscall.Errno)
	if !ok {
		return KindUnknown, false
	}
	kind, ok := errnoKinds[errno]
	return kind, ok
}

// Windows has numbers of its own: errors.Is(err, syscall.ECONNRESET) is false
// for what Winsock returns (rclone#4313). None of them is an errno elsewhere.
const (
	wsaENETDOWN     syscall.Errno = 10050
	wsaENETUNREACH  syscall.Errno = 10051
	wsaENETRESET    syscall.Errno = 10052
	wsaECONNABORTED syscall.Errno = 10053
	wsaECONNRESET   syscall.Errno = 10054
	wsaENOTCONN     syscall.Errno = 10057
	wsaESHUTDOWN    syscall.Errno = 10058
	wsaETIMEDOUT    syscall.Errno = 10060
	wsaEHOSTUNREACH syscall.Errno = 10065
)

// ETIMEDOUT is a net.Error whose Timeout is true: the errno is looked at and
// Timeout never is, or a dead path would pass for a slow server.
var errnoKinds = map[syscall.Errno]Kind{
	syscall.ECONNRESET:   KindReset,
	syscall.EPIPE:        KindReset,
	syscall.ECONNABORTED: KindReset,
	syscall.ENETRESET:    KindReset,
	syscall.ENOTCONN:     KindReset,
	syscall.ETIMEDOUT:    KindTimedOut,
	syscall.EHOSTUNREACH: KindTimedOut,
	syscall.ENETUNREACH:  KindTimedOut,
	syscall.ENETDOWN:     KindTimedOut,
	wsaENETDOWN:          KindTimedOut,
	wsaENETUNREACH:       KindTimedOut,
	wsaENETRESET:         KindReset,
	wsaECONNABORTED:      KindReset,
	wsaECONNRESET:        KindReset,
	wsaENOTCONN:          KindReset,
	wsaESHUTDOWN:         KindReset,
	wsaETIMEDOUT:         KindTimedOut,
	wsaEHOSTUNREACH:      KindTimedOut,
}

// tlsError: RFC 8446 section 6.2, after an error of its own the TLS layer has
// closed the connection. A record header error that carries a Conn comes from
// the first bytes of a handshake: a dial error.
func tlsError(err error) (Kind, bool) {
	switch e := err.(type) {
	case tls.RecordHeaderError:
		return KindProtocol, e.Conn == nil
	case *net.OpError:
		return KindProtocol, e.Op == "local error"
	}
	return KindUnknown, false
}

// endOfFile: net/http returns the bare values, HTTP/2 io.ErrUnexpectedEOF and
// HTTP/1 both.
func endOfFile(err error) (Kind, bool) {
	return KindEOF, err == io.EOF || err == io.ErrUnexpectedEOF
}

// netHTTPText knows the errors that net/http leaves nothing but a text of.
// Each is compared whole, and with an error that wraps nothing: a text inside
// somebody's sentence is not net/http's.
func netHTTPText(err error) (Kind, bool) {
	switch err.(type) {
	case interface{ Unwrap() error }, interface{ Unwrap() []error }:
		return KindUnknown, false
	}
	return textKind(err.Error())
}

func textKind(text string) (Kind, bool) {
	if kind, ok := texts[text]; ok {
		return kind, true
	}
	if code, ok := strings.CutPrefix(text, "connection error: "); ok {
		return KindProtocol, knownErrCode(code)
	}
	if strings.HasPrefix(text, goAwayPrefix) {
		return goAwayKind(text)
	}
	// h2_bundle.go http2shouldRetryRequest prints the inner error with %v.
	if inner, ok := strings.CutPrefix(text, "http2: Transport: cannot retry err ["); ok {
		inner, ok = strings.CutSuffix(inner, "] after Request.Body was written; define Request.GetBody to avoid this error")
		switch {
		case !ok:
		case inner == "http2: Transport received Server's graceful shutdown GOAWAY":
			return KindDraining, true
		case refusedStreamText(inner):
			return KindRefusedStream, true
		}
	}
	return KindUnknown, false
}

// texts: the file is net/http's h2_bundle.go in Go 1.26, internal/http2 in
// Go 1.27 and http2/transport.go in x/net, unless said.
var texts = map[string]Kind{
	"http2: client connection lost":                               KindLost,           // closeForLostPing
	"http2: client connection force closed via ClientConn.Close":  KindClosed,         // errClientConnForceClosed
	"http2: client conn is closed":                                KindClosed,         // errClientConnClosed, while a body was written
	"http2: client conn not usable":                               KindNotSent,        // errClientConnUnusable
	"http2: no cached connection was available":                   KindNotSent,        // noCachedConnError
	"http2: client conn could not be established":                 KindNotEstablished, // errClientConnNotEstablished
	"http2: Transport received Server's graceful shutdown GOAWAY": KindDraining,       // errClientConnGotGoAway
	"http2: frame too large":                                      KindProtocol,       // frame.go ErrFrameTooLarge
	"http: server closed idle connection":                         KindEOF,            // net/http transport.go errServerClosedIdle
}

const goAwayPrefix = "http2: server sent GOAWAY and closed the connection; "

// goAwayKind reads GoAwayError's text, which errors.As cannot reach in
// net/http's copy. RFC 9113 section 6.8: streams above LastStreamID were not
// processed. The error does not tell the request's own stream, so that only a
// LastStreamID of 0 says so for sure.
func goAwayKind(text string) (Kind, bool) {
	rest, _ := strings.CutPrefix(text, goAwayPrefix+"LastStreamID=")
	id, rest, _ := strings.Cut(rest, ", ErrCode=")
	code, debug, found := strings.Cut(rest, ", debug=")
	last, err := strconv.ParseUint(id, 10, 31)
	if err != nil || !knownErrCode(code) {
		return KindUnknown, false
	}
	if _, err := strconv.Unquote(debug); found && err != nil {
		return KindUnknown, false
	}
	switch {
	case code == http2.ErrCodeEnhanceYourCalm.String():
		return KindGoAwayCalm, true
	case last == 0:
		return KindGoAwayUnprocessed, true
	}
	return KindGoAway, true
}

// cannotRewind reports whether err is net/http's errCannotRewind
// (transport.go), which tells nothing of why it wanted to.
func cannotRewind(err error) bool {
	return err.Error() == "net/http: cannot rewind body after connection loss"
}

func knownErrCode(s string) bool {
	for code := http2.ErrCodeNo; code <= http2.ErrCodeHTTP11Required; code++ {
		if s == code.String() {
			return true
		}
	}
	return strings.HasPrefix(s, "unknown error code 0x")
}

func refusedStreamText(s string) bool {
	id, ok := strings.CutPrefix(s, "stream error: stream ID ")
	id, ok2 := strings.CutSuffix(id, "; REFUSED_STREAM; received from peer")
	_, err := strconv.ParseUint(id, 10, 31)
	return ok && ok2 && err == nil
}
