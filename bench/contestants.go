// Package bench puts deadconn and what one would use instead of it on the same
// faults. contestants.go says who takes part and how each is set up, rows.go
// which faults there are. The command cmd/matrix runs them and writes
// RESULTS.md, results.json and the pictures.
package bench

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"time"

	"github.com/PuerkitoBio/rehttp"
	"github.com/deadconn/deadconn"
	"github.com/failsafe-go/failsafe-go/failsafehttp"
	"github.com/hashicorp/go-retryablehttp"
	"golang.org/x/net/http2"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/util/connrotation"
)

// Env is what a row gives to a contestant: the dialer that makes (and counts)
// the connections, and the TLS settings that trust the server.
type Env struct {
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	TLS  *tls.Config
}

// A Contestant is one way to set up an HTTP client.
type Contestant struct {
	Name   string // short, a column's head
	What   string // one line
	Module string // whose version the report names; empty: the Go release
	New    func(Env) http.RoundTripper
}

// The names that the report refers to.
const (
	Base = "net/http"
	Ours = "NewTransport"
	Wrap = "Wrap"
)

// Label is the name with the package's before ours.
func (c Contestant) Label() string {
	if c.Name == Ours || c.Name == Wrap {
		return "deadconn." + c.Name
	}
	return c.Name
}

// Contestants are all of them. Each has the defaults that its documentation
// gives. The pings of the two net/http set-ups have the durations of
// deadconn.Health, since net/http has no default for them; the retrying ones
// sit on net/http's defaults, as their documentation shows them.
//
// Not here: github.com/imroc/req/v3, which the module proxy that this was
// built with does not serve.
var Contestants = []Contestant{
	{
		Name: Base,
		What: "http.DefaultTransport's settings",
		New:  func(e Env) http.RoundTripper { return netHTTP(e) },
	},
	{
		Name: "net/http pings",
		What: "the same with HTTP2Config{SendPingTimeout: 15 s, PingTimeout: 7 s, WriteByteTimeout: 22 s}",
		New: func(e Env) http.RoundTripper {
			t := netHTTP(e)
			t.HTTP2 = &http.HTTP2Config{
				SendPingTimeout:  15 * time.Second,
				PingTimeout:      7 * time.Second,
				WriteByteTimeout: 22 * time.Second,
			}
			return t
		},
	},
	{
		Name:   "x/net pings",
		What:   "x/net http2.ConfigureTransports with ReadIdleTimeout 15 s, PingTimeout 7 s, WriteByteTimeout 22 s",
		Module: "golang.org/x/net",
		New: func(e Env) http.RoundTripper {
			t := netHTTP(e)
			t2, err := http2.ConfigureTransports(t)
			if err != nil {
				panic(err)
			}
			t2.ReadIdleTimeout = 15 * time.Second
			t2.PingTimeout = 7 * time.Second
			t2.WriteByteTimeout = 22 * time.Second
			return t
		},
	},
	{
		Name:   "client-go",
		What:   "client-go's transport (SetTransportDefaults: pings 30 + 15 s), connrotation's CloseAll on every error",
		Module: "k8s.io/client-go",
		New: func(e Env) http.RoundTripper {
			// As in client-go's transport/cache.go.
			d := connrotation.NewDialer(connrotation.DialFunc(e.Dial))
			t := utilnet.SetTransportDefaults(&http.Transport{
				TLSHandshakeTimeout: 10 * time.Second,
				TLSClientConfig:     e.TLS.Clone(),
				MaxIdleConnsPerHost: 25,
				DialContext:         d.DialContext,
			})
			t.Proxy = nil // SetTransportDefaults looks into the environment
			return closeAllOnError{t, d}
		},
	},
	{
		Name:   "retryablehttp",
		What:   "go-retryablehttp's NewClient(): 4 retries after 1 s to 30 s",
		Module: "github.com/hashicorp/go-retryablehttp",
		New: func(e Env) http.RoundTripper {
			c := retryablehttp.NewClient()
			c.Logger = nil
			c.HTTPClient.Transport = netHTTP(e)
			return c.StandardClient().Transport
		},
	},
	{
		Name:   "rehttp",
		What:   "rehttp as in its package example: 3 retries of temporary errors, ConstDelay(1 s)",
		Module: "github.com/PuerkitoBio/rehttp",
		New: func(e Env) http.RoundTripper {
			return rehttp.NewTransport(netHTTP(e),
				rehttp.RetryAll(rehttp.RetryMaxRetries(3), rehttp.RetryTemporaryErr()),
				rehttp.ConstDelay(time.Second))
		},
	},
	{
		Name:   "failsafehttp",
		What:   "failsafehttp.NewRetryPolicyBuilder(): 2 retries at once",
		Module: "github.com/failsafe-go/failsafe-go",
		New: func(e Env) http.RoundTripper {
			return failsafehttp.NewRoundTripper(netHTTP(e), failsafehttp.NewRetryPolicyBuilder().Build())
		},
	},
	{
		Name:   Wrap,
		What:   "deadconn.Wrap over http.DefaultTransport's settings",
		Module: "github.com/deadconn/deadconn",
		New:    func(e Env) http.RoundTripper { return deadconn.Wrap(netHTTP(e)) },
	},
	{
		Name:   Ours,
		What:   "deadconn.Options{Base: those settings}.NewTransport(), all else default",
		Module: "github.com/deadconn/deadconn",
		New: func(e Env) http.RoundTripper {
			return deadconn.Options{Base: netHTTP(e)}.NewTransport()
		},
	},
}

// netHTTP is what http.DefaultTransport is, with the row's dialer and TLS.
func netHTTP(e Env) *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.Proxy = nil // the environment's has no place here
	t.DialContext = e.Dial
	t.TLSClientConfig = e.TLS.Clone()
	return t
}

// closeAllOnError is what the kubelet did for long: any error closes all
// connections, so that the next request has a new one.
type closeAllOnError struct {
	base http.RoundTripper
	d    *connrotation.Dialer
}

func (t closeAllOnError) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.base.RoundTrip(req)
	if err != nil {
		t.d.CloseAll()
	}
	return resp, err
}

func (t closeAllOnError) CloseIdleConnections() {
	if c, ok := t.base.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}
