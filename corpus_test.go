package deadconn

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/net/http2"
)

// A report is a line of testdata/reports.jsonl. testdata/README.md says what
// its fields mean.
type report struct {
	ID       string `json:"id"`
	Error    string `json:"error"`
	GoChain  string `json:"go_chain"`
	Expected string `json:"expected"`
}

// Classify gives what the reports expect of it, except for those that
// testdata/README.md lists: what decides them is not in the error.
func TestReports(t *testing.T) {
	data, err := os.ReadFile("testdata/reports.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("testdata/README.md")
	if err != nil {
		t.Fatal(err)
	}
	listed := make(map[string]string)
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| ([^|]+) \\|").FindAllSubmatch(readme, -1) {
		listed[string(m[1])] = strings.TrimSpace(string(m[2]))
	}

	for line := range bytes.Lines(data) {
		var r report
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		t.Run(r.ID, func(t *testing.T) {
			reason, isListed := listed[r.ID]
			delete(listed, r.ID)
			err, known := r.err()
			if !known {
				t.Fatalf("nobody has told this test how to make %q", r.GoChain)
			}
			kind := Classify(err)
			decided := false
			switch r.Expected {
			case "evict+retry-any-method": // the careful answer is allowed
				decided = kind.Dead()
			case "evict+retry-idempotent-only":
				decided = kind.Dead() && !kind.Unprocessed()
			case "evict-only":
				decided = false // that there is no retry cannot be in the error
			case "retry-only-no-evict":
				decided = !kind.Dead() && kind.Unprocessed()
			case "nothing":
				decided = !kind.Dead() && !kind.Unprocessed()
			default:
				t.Fatalf("expected is %q", r.Expected)
			}
			switch {
			case !decided && !isListed:
				t.Errorf("Classify(%v) = %v, expected is %s, and testdata/README.md does not say what else decides it", err, kind, r.Expected)
			case decided && isListed:
				t.Errorf("Classify(%v) = %v decides it, but testdata/README.md says that this does: %s", err, kind, reason)
			case isListed && len(reason) < 20:
				t.Errorf("testdata/README.md gives no reason: %q", reason)
			case r.Expected == "evict-only" && kind.Dead() != strings.HasPrefix(reason, "The error evicts."):
				t.Errorf("Classify(%v) = %v, but testdata/README.md says: %s", err, kind, reason)
			}
		})
	}
	for id := range listed {
		t.Errorf("testdata/README.md lists %s, which is not in reports.jsonl", id)
	}
}

// err makes the error that the report is about, with the types of its chain.
// It is nil if there was none. known is false for a chain that is not known.
func (r report) err() (err error, known bool) {
	text := regexp.MustCompile(`^(Error [a-z ]+: )?(Get|Post|Put|Patch|Delete) \S+: `).ReplaceAllString(r.Error, "")
	chain := strings.Split(r.GoChain, " > ")
	leaf := chain[len(chain)-1]
	has := func(s string) bool { return strings.Contains(r.GoChain, s) }
	switch {
	case has("no error"):
		return nil, true
	case has("caller's error"):
		err = errors.New(text)
	case has("fs.ErrClosed"):
		err = &fs.PathError{Op: "read", Path: "/x", Err: fs.ErrClosed}
	case has("net.ErrClosed"):
		err = net.ErrClosed
	case has("syscall.ECONNRESET"):
		err = os.NewSyscallError("read", syscall.ECONNRESET)
	case has("syscall.EPIPE"):
		err = os.NewSyscallError("write", syscall.EPIPE)
	case has("syscall.ECONNREFUSED"):
		err = os.NewSyscallError("connect", syscall.ECONNREFUSED)
	case has("after suspend"):
		err = os.NewSyscallError("write", syscall.ETIMEDOUT)
	case has("*net.DNSError"):
		err = &net.DNSError{Err: "no such host", Name: "example.test", Server: "10.0.0.53:53", IsNotFound: true}
	case has("poll timeout"):
		err = os.ErrDeadlineExceeded
	case has("x509.UnknownAuthorityError"):
		err = &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}
	case has("io.EOF"):
		err = io.EOF
	case has("io.ErrUnexpectedEOF"):
		err = io.ErrUnexpectedEOF
	case has("*http.timeoutError"):
		err = timeoutError(text)
	case has("context.DeadlineExceeded"):
		err = context.DeadlineExceeded
	case has("context.Canceled"):
		err = context.Canceled
	case has("http.ErrBodyReadAfterClose"):
		err = http.ErrBodyReadAfterClose
	case has("http.ErrServerClosed"):
		err = http.ErrServerClosed
	case has("http2StreamError"):
		if err = streamErrorOf(text); err == nil {
			return nil, false
		}
	case strings.HasPrefix(leaf, "*errors.errorString"), strings.HasPrefix(leaf, "http.http2"), strings.HasPrefix(leaf, "*http.http2httpError"):
		err = errors.New(text)
	default:
		return nil, false
	}
	if m := regexp.MustCompile(`\*net\.OpError\{Op:([a-z]+)`).FindStringSubmatch(r.GoChain); m != nil {
		addr := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 2), Port: 443}
		err = &net.OpError{Op: m[1], Net: "tcp", Source: addr, Addr: addr, Err: err}
	}
	if has("*tls.permanentError") {
		err = wrapper{err, err.Error()}
	}
	if has("*url.Error") && !has("no *url.Error") {
		err = &url.Error{Op: "Get", URL: "https://example.test/", Err: err}
	}
	if has("SDK wrapper") || has("connect error") {
		err = fmt.Errorf("operation failed: %w", err)
	}
	return err, true
}

// timeoutError is what http.Client returns when its Timeout has passed.
type timeoutError string

func (e timeoutError) Error() string     { return string(e) }
func (e timeoutError) Timeout() bool     { return true }
func (e timeoutError) Is(err error) bool { return err == context.DeadlineExceeded }

func streamErrorOf(text string) error {
	m := regexp.MustCompile(`^stream error: stream ID (\d+); (\w+)`).FindStringSubmatch(text)
	if m == nil {
		return nil
	}
	id, err := strconv.ParseUint(m[1], 10, 31)
	if err != nil {
		return nil
	}
	for code := http2.ErrCodeNo; code <= http2.ErrCodeHTTP11Required; code++ {
		if code.String() == m[2] {
			return http2.StreamError{StreamID: uint32(id), Code: code}
		}
	}
	return nil
}
