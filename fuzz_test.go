package deadconn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/net/http2"
)

// A script is fuzz input read as decisions. When it is at its end all are 0.
type script []byte

// next returns a number below n, which is at most 256.
func (s *script) next(n int) int {
	if len(*s) == 0 {
		return 0
	}
	b := (*s)[0]
	*s = (*s)[1:]
	return int(b) % n
}

// FuzzRetryError shows that a RetryError of any two errors says no more and no
// less than those do, the last first, on one line.
func FuzzRetryError(f *testing.F) {
	trees := [][]byte{
		nil, {1, 2}, {2, 5}, {3, 9, 11}, {8, 3, 4, 5, 6, 7}, {9, 8, 9, 8, 1, 2, 3, 4, 5, 6}, {10, 11, 12, 13, 0, 1},
		{14, 15, 16, 17, 18, 19, 4, 8, 2, 1}, {13, 13, 12, 11, 10, 9, 8, 0, 0, 7, 3}, {12, 3, 12, 3, 4}, {19, 8, 19, 9},
	}
	for i, text := range []string{
		"", "plain", "two\nlines", "\r\n\r\n", "%s %n %!v(PANIC=", "\x00\x1b[31m\xff\u2028\u202e", "use of closed network connection",
		"http2: client connection lost", "http2: client conn not usable", goAwayPrefix + "LastStreamID=0, ErrCode=NO_ERROR, debug=\"\n\"",
		strings.Repeat("long ", 1000),
	} {
		f.Add(trees[i], trees[(i+3)%len(trees)], text, "other\n"+text)
		f.Add(trees[(i+5)%len(trees)], trees[i], "text", text)
	}
	f.Fuzz(func(t *testing.T, firstTree, lastTree []byte, firstText, lastText string) {
		first, last := errorTree(firstTree, firstText), errorTree(lastTree, lastText)
		re := newRetryError(first, last)

		oneLine := strings.NewReplacer("\r", " ", "\n", " ")
		want := oneLine.Replace("deadconn: retry failed: " + last.Error() + " (first attempt: " + first.Error() + ")")
		if got := re.Error(); got != want {
			t.Errorf("Error() = %q, want %q", got, want)
		}
		if strings.ContainsAny(re.Error(), "\r\n") {
			t.Errorf("more than one line: %q", re)
		}
		if got := re.Unwrap(); !sameError(re.First(), first) || !sameError(re.Last(), last) ||
			len(got) != 2 || !sameError(got[0], last) || !sameError(got[1], first) {
			t.Errorf("First, Last and Unwrap: %v, %v, %v", re.First(), re.Last(), got)
		}
		again := (&url.Error{Op: "Get", URL: "/", Err: re})
		alone := (&url.Error{Op: "Get", URL: "/", Err: last})
		if again.Timeout() != alone.Timeout() || again.Temporary() != alone.Temporary() {
			t.Errorf("Timeout %v, Temporary %v; the last alone: %v, %v", again.Timeout(), again.Temporary(), alone.Timeout(), alone.Temporary())
		}

		for _, leaf := range append(flatten(first), flatten(last)...) {
			if !reflect.ValueOf(leaf).Comparable() {
				continue
			}
			if got, want := errors.Is(re, leaf), errors.Is(last, leaf) || errors.Is(first, leaf); got != want {
				t.Errorf("errors.Is(%q) = %v, want %v", leaf, got, want)
			}
		}
		sameAs[*net.OpError](t, re)
		sameAs[*url.Error](t, re)
		sameAs[syscall.Errno](t, re)
		sameAs[http2.StreamError](t, re)
		sameAs[*multierror.Error](t, re)
		sameAs[uncomparable](t, re)
		sameAs[interface {
			error
			Timeout() bool
		}](t, errors.Join(last, first)) // re itself has a Timeout

		// Of two that know something, the one that an earlier rule knows.
		got, kinds := Classify(re), []Kind{Classify(last), Classify(first)}
		if !slices.Contains(kinds, got) || got != Classify(errors.Join(last, first)) || got != Classify(fmt.Errorf("%s: %w", firstText, re)) {
			t.Errorf("Classify(%q) = %v, its attempts: %v", re, got, kinds)
		}
	})
}

// errorTree makes an error out of tree, a node a byte, all of them with text.
func errorTree(tree script, text string) error {
	tree = tree[:min(len(tree), maxErrors/8)]
	var node func(depth int) error
	node = func(depth int) error {
		kind := tree.next(20)
		if depth == 0 && kind >= 10 {
			kind -= 10
		}
		switch kind {
		case 1:
			return io.EOF
		case 2:
			return syscall.ECONNRESET
		case 3:
			return context.Canceled
		case 4:
			return os.ErrDeadlineExceeded
		case 5:
			return http2.StreamError{StreamID: 1, Code: http2.ErrCodeRefusedStream, Cause: errors.New(text)}
		case 6:
			return &death{kind: KindSilent, err: errors.New(text)}
		case 7:
			return (*RetryError)(nil)
		case 8:
			return &net.DNSError{Err: text, IsTimeout: true, IsTemporary: true}
		case 9:
			return uncomparable{errors.New(text)}
		case 10:
			return fmt.Errorf("%s: %w", text, node(depth-1))
		case 11:
			return errors.Join(node(depth-1), node(depth-1))
		case 12:
			return newRetryError(node(depth-1), node(depth-1))
		case 13:
			return multierror.Append(nil, node(depth-1), node(depth-1))
		case 14:
			return &url.Error{Op: text, URL: text, Err: node(depth - 1)}
		case 15:
			return &net.OpError{Op: "write", Net: text, Err: node(depth - 1)}
		case 16:
			return &net.OpError{Op: text, Err: node(depth - 1)}
		case 17:
			return wrapper{node(depth - 1), text}
		case 18:
			return uncomparable{nil, node(depth - 1), nil}
		case 19:
			return fmt.Errorf("%w\n%w", node(depth-1), node(depth-1))
		}
		return errors.New(text)
	}
	return node(5)
}

// sameError reports whether a is b; what cannot be compared is when it looks
// like it.
func sameError(a, b error) bool {
	if a == nil || !reflect.ValueOf(a).Comparable() {
		return reflect.DeepEqual(a, b)
	}
	return a == b
}

// sameAs fails the test unless errors.As finds the E in err that it finds in
// what err wraps, the first of these that has one.
func sameAs[E error](t *testing.T, err error) {
	t.Helper()
	var got, want E
	ok := errors.As(err, &got)
	found := slices.ContainsFunc(err.(interface{ Unwrap() []error }).Unwrap(), func(e error) bool { return errors.As(e, &want) })
	if ok != found || ok && !sameError(got, want) {
		t.Errorf("errors.As(%q, %T) = %v, %v, want %v, %v", err, got, got, ok, want, found)
	}
}
