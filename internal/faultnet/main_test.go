package faultnet_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// bound is far longer than anything here takes; only a failing test waits for
// it.
const bound = 10 * time.Second

func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if leaked := leakedGoroutines(); leaked != "" {
			fmt.Fprintf(os.Stderr, "goroutines left behind:\n\n%s\n", leaked)
			code = 1
		}
	}
	os.Exit(code)
}

// leakedGoroutines returns the stacks of the goroutines that are still there
// after a while, apart from the caller's and the testing package's own.
func leakedGoroutines() string {
	var left []string
	for end := time.Now().Add(bound); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		buf := make([]byte, 1<<20)
		buf = buf[:runtime.Stack(buf, true)]
		left = left[:0]
		for _, g := range strings.Split(string(buf), "\n\n") {
			if !strings.Contains(g, "leakedGoroutines") && !strings.Contains(g, "os/signal.") {
				left = append(left, g)
			}
		}
		if len(left) == 0 {
			return ""
		}
	}
	return strings.Join(left, "\n\n")
}

// eventually waits until cond holds.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(bound); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// within fails the test if c gives nothing in time.
func within[T any](t *testing.T, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(bound):
		t.Fatalf("never: %s", what)
		panic("unreachable")
	}
}

// background runs f and gives what it returns.
func background[T any](f func() T) <-chan T {
	c := make(chan T, 1)
	go func() { c <- f() }()
	return c
}

// stillBlocked fails the test if c gives something at once. It can miss a
// mistake, but never reports one that is not there.
func stillBlocked[T any](t *testing.T, what string, c <-chan T) {
	t.Helper()
	select {
	case v := <-c:
		t.Fatalf("%s did not block: %v", what, v)
	case <-time.After(20 * time.Millisecond):
	}
}

type result struct {
	n   int
	err error
}

// pair returns both ends of a TCP connection on loopback.
func pair(t *testing.T) (client, server *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	s.SetDeadline(time.Now().Add(bound))
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// client returns a bare net/http client that dials through d. cfg is nil for
// cleartext.
func client(t *testing.T, d *faultnet.Dialer, cfg *tls.Config) *http.Client {
	tr := &http.Transport{DialContext: d.DialContext, TLSClientConfig: cfg, ForceAttemptHTTP2: true}
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		d.CloseAll()
	})
	return &http.Client{Transport: tr}
}

// warm returns a client with exactly one connection to url, pooled, over which
// one response or more have come. It asks again because net/http pools an
// HTTP/2 connection only a moment after it has handed it to its first request:
// a second request may dial as well.
func warm(t *testing.T, url string, cfg *tls.Config) (*http.Client, *faultnet.Dialer) {
	t.Helper()
	for range 100 {
		d := new(faultnet.Dialer)
		c := client(t, d, cfg)
		for range 2 {
			if _, err := get(c, url, bound); err != nil {
				t.Fatal(err)
			}
		}
		if d.Dials() == 1 {
			return c, d
		}
		d.CloseAll()
	}
	t.Fatal("no client with one connection in 100 trials")
	return nil, nil
}

// get returns protocol, status and body, or an error within the timeout.
func get(c *http.Client, url string, timeout time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return "", err
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return fmt.Sprintf("%s %d %s", resp.Proto, resp.StatusCode, body), err
}

func mustGet(t *testing.T, c *http.Client, url, want string) {
	t.Helper()
	got, err := get(c, url, bound)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Fatalf("got %q, want %q", got, want)
	}
}

// failGet does a GET that must fail with a text that contains want.
func failGet(t *testing.T, c *http.Client, url string, timeout time.Duration, want string) error {
	t.Helper()
	got, err := get(c, url, timeout)
	if err == nil {
		t.Fatalf("got %q, want an error with %q", got, want)
	}
	if !strings.Contains(err.Error(), want) {
		t.Fatalf("got error %q, want one with %q", err, want)
	}
	return err
}

var ok = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })

func server(t *testing.T, h http.Handler, opts ...faultnet.ServerOption) *faultnet.Server {
	s := faultnet.NewServer(h, opts...)
	t.Cleanup(s.Close)
	return s
}
