package deadconn_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"syscall"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
)

// Requests go over a connection in the pool, whose socket is then closed
// underneath. net/http loses the next one, with "use of closed network
// connection" (golang/go#39750).
func Example() {
	server, base, kill := startServer()
	defer server.Close()

	plain := &http.Client{Transport: base}
	get(plain, server.URL)
	kill()
	_, err := plain.Get(server.URL)
	fmt.Println("net/http:", errors.Is(err, net.ErrClosed), "use of closed network connection")

	transport := deadconn.Options{Base: base}.NewTransport()
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	get(client, server.URL)
	kill()
	resp, err := client.Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	resp.Body.Close()
	fmt.Println("deadconn:", resp.Status)

	// Output:
	// net/http: true use of closed network connection
	// deadconn: 200 OK
}

// A client that exists gets its transport wrapped. The transport itself is
// not changed, so others may go on using it.
func ExampleWrap() {
	server, base, kill := startServer()
	defer server.Close()
	client := &http.Client{Transport: base}

	client.Transport = deadconn.Wrap(client.Transport)

	get(client, server.URL)
	kill() // the connection in the pool
	fmt.Println(get(client, server.URL))
	// Output: 200 OK
}

// client-go's rest.Config takes a function that wraps a transport, and hands
// it one that may be shared with other clients.
func ExampleWrap_clientGo() {
	server, base, kill := startServer()
	defer server.Close()
	var cfg restConfig // stands for k8s.io/client-go/rest.Config

	cfg.Wrap(deadconn.Wrap)

	client := &http.Client{Transport: cfg.WrapTransport(base)}
	get(client, server.URL)
	kill()
	fmt.Println(get(client, server.URL))
	// Output: 200 OK
}

// restConfig has what matters here of client-go's type.
type restConfig struct {
	WrapTransport func(http.RoundTripper) http.RoundTripper
}

func (c *restConfig) Wrap(fn func(http.RoundTripper) http.RoundTripper) { c.WrapTransport = fn }

func ExampleNewTransport() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "hello")
	}))
	defer server.Close()

	transport := deadconn.NewTransport()
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}

	resp, err := client.Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Printf("%s, %v\n", body, err)
	// Output: hello, <nil>
}

// The connection was dead before this POST was sent, and NewTransport can
// prove it. So it is sent on another one, though it is not idempotent and its
// body cannot be had again.
func ExampleOptions_NewTransport() {
	server, base, kill := startServer()
	defer server.Close()

	transport := deadconn.Options{
		Base: base, // its TLS, proxy and dialer are used; base is not changed
	}.NewTransport()
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}

	get(client, server.URL)
	kill()
	resp, err := client.Post(server.URL, "text/plain", io.MultiReader(strings.NewReader("once")))
	if err != nil {
		fmt.Println(err)
		return
	}
	resp.Body.Close()
	fmt.Println(resp.Status)
	fmt.Println("rescued:", transport.Stats().Rescued)
	// Output:
	// 200 OK
	// rescued: 1
}

// Options.Retryable says which requests may be sent again though the server
// may have processed them. Here: what is idempotent, and the POSTs of a search.
func ExampleOptions_Wrap() {
	server, base, kill := startServer()
	defer server.Close()

	client := &http.Client{Transport: deadconn.Options{
		Retryable: func(req *http.Request) bool {
			return deadconn.IsIdempotent(req) || req.URL.Path == "/search"
		},
	}.Wrap(base)}

	for _, path := range []string{"/search", "/order"} {
		get(client, server.URL)
		kill()
		resp, err := client.Post(server.URL+path, "text/plain", strings.NewReader("deadconn"))
		if err != nil {
			fmt.Println(path, "failed:", deadconn.Classify(err))
			continue
		}
		resp.Body.Close()
		fmt.Println(path, resp.Status)
	}
	// Output:
	// /search 200 OK
	// /order failed: closed
}

// A Registry below somebody else's transport gives Wrap the evidence that
// NewTransport has. It can also close all connections at once, such as when
// the network or a certificate has changed.
func ExampleRegistry() {
	server, base, kill := startServer()
	defer server.Close()

	registry := &deadconn.Registry{Dial: base.DialContext}
	base.DialContext = registry.DialContext // before the transport is used
	client := &http.Client{Transport: deadconn.Options{Registry: registry}.Wrap(base)}

	get(client, server.URL)
	kill()
	resp, err := client.Post(server.URL, "text/plain", strings.NewReader("once"))
	if err != nil {
		fmt.Println(err)
		return
	}
	resp.Body.Close()
	fmt.Println("POST:", resp.Status)
	fmt.Println("open:", registry.Len() > 0)

	if err := registry.CloseAll(); err != nil {
		fmt.Println(err)
	}
	fmt.Println("GET after CloseAll:", get(client, server.URL))
	// Output:
	// POST: 200 OK
	// open: true
	// GET after CloseAll: 200 OK
}

// Classify says what an error tells about the connection. It looks through
// all wrapping.
func ExampleClassify() {
	for _, err := range []error{
		&url.Error{Op: "Get", URL: "/", Err: &net.OpError{Op: "write", Net: "tcp", Err: net.ErrClosed}},
		fmt.Errorf("list pods: %w", &net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", syscall.ECONNRESET)}),
		errors.New("http2: client connection lost"),
		errors.New("http2: client conn not usable"),
		context.DeadlineExceeded,
		nil,
	} {
		kind := deadconn.Classify(err)
		fmt.Printf("%-10v dead: %-5v unprocessed: %v\n", kind, kind.Dead(), kind.Unprocessed())
	}
	// Output:
	// closed     dead: true  unprocessed: false
	// reset      dead: true  unprocessed: false
	// ping_lost  dead: true  unprocessed: false
	// not_sent   dead: false unprocessed: true
	// unknown    dead: false unprocessed: false
	// unknown    dead: false unprocessed: false
}

func ExampleIsIdempotent() {
	post, _ := http.NewRequest("POST", "https://example.com/", nil)
	fmt.Println(deadconn.IsIdempotent(post))
	post.Header.Set("Idempotency-Key", "8e03978e-40d5-43dd-bc93-6894a57f9324")
	fmt.Println(deadconn.IsIdempotent(post))
	put, _ := http.NewRequest("PUT", "https://example.com/", nil)
	fmt.Println(deadconn.IsIdempotent(put))
	// Output:
	// false
	// true
	// true
}

// Hooks feed metrics. The name of a Kind is fit for a label.
func ExampleHooks() {
	server, base, kill := startServer()
	defer server.Close()

	evicted := make(chan deadconn.Kind)
	client := &http.Client{Transport: deadconn.Options{
		Hooks: &deadconn.Hooks{
			ConnEvicted: func(i deadconn.ConnEvictedInfo) { evicted <- i.Cause },
			RequestDone: func(i deadconn.RequestDoneInfo) {
				fmt.Println("sent again:", i.Method, "rescued:", i.Err == nil)
			},
		},
	}.Wrap(base)}

	get(client, server.URL)
	kill()
	get(client, server.URL)
	fmt.Println("evicted:", <-evicted)
	// Output:
	// sent again: GET rescued: true
	// evicted: closed
}

// If both attempts fail the error has both.
func ExampleRetryError() {
	server, base, kill := startServer()
	defer server.Close()
	client := &http.Client{Transport: deadconn.Wrap(base)}

	get(client, server.URL)
	server.Listener.Close() // nothing can be dialed any more
	kill()
	_, err := client.Get(server.URL)

	var retry *deadconn.RetryError
	if errors.As(err, &retry) {
		var last *net.OpError
		fmt.Println("first:", errors.Is(retry.First(), net.ErrClosed))
		fmt.Println("last:", errors.As(retry.Last(), &last) && last.Op == "dial")
	}
	// Output:
	// first: true
	// last: true
}

// startServer starts an HTTP/2 server. The transport trusts it, and is used by
// nobody else. kill closes the socket of its newest connection for writing,
// while the reader sleeps on.
func startServer() (server *httptest.Server, transport *http.Transport, kill func()) {
	server = httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	server.EnableHTTP2 = true
	server.StartTLS()
	dialer := new(faultnet.Dialer) // dials, and breaks what it has dialed
	transport = server.Client().Transport.(*http.Transport)
	transport.DialContext = dialer.DialContext
	return server, transport, func() { dialer.Last().FailWrites(net.ErrClosed) }
}

// get returns the status of a GET, or its error's text.
func get(c *http.Client, url string) string {
	resp, err := c.Get(url)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	return resp.Status
}
