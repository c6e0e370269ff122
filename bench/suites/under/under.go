// Package under puts deadconn under the tests of another library that import
// it, as package suites makes them do: under http.DefaultTransport at once,
// under other transports where they call Over.
package under

import (
	"net/http"
	"os"

	"github.com/deadconn/deadconn"
)

// What the process that runs the tests is told.
const (
	VariantEnv = "DEADCONN_SUITES_VARIANT" // one of the variants
	TallyEnv   = "DEADCONN_SUITES_TALLY"   // a file that gets a byte for each thing counted
)

// The variants. Bare puts nothing under, PassOn a RoundTripper that only passes
// on.
const (
	Bare   = ""
	PassOn = "pass on"
	Wrap   = "deadconn.Wrap"
	New    = "deadconn.NewTransport"
)

// The bytes of the tally.
const (
	Sent    = '.' // a call of deadconn's RoundTrip
	Retried = 'r' // a call of its hook RequestRetried
)

var (
	variant = os.Getenv(VariantEnv)
	tally   *os.File
)

func init() {
	if variant == Bare {
		return
	}
	var err error
	if tally, err = os.OpenFile(os.Getenv(TallyEnv), os.O_WRONLY|os.O_APPEND, 0); err != nil {
		panic(err)
	}
	http.DefaultTransport = Over(http.DefaultTransport)
}

// Over returns deadconn over rt, or in its place, if rt is an *http.Transport.
// Others it returns as they are.
func Over(rt http.RoundTripper) http.RoundTripper {
	t, ok := rt.(*http.Transport)
	if !ok {
		return rt
	}
	o := deadconn.Options{Hooks: &deadconn.Hooks{
		RequestRetried: func(deadconn.RequestRetriedInfo) { count(Retried) },
	}}
	switch variant {
	case Bare:
		return rt
	case PassOn:
		return struct{ *http.Transport }{t}
	case Wrap:
		return counted{o.Wrap(t).(*deadconn.Transport)}
	case New:
		o.Base = t
		return counted{o.NewTransport()}
	}
	panic("under: unknown variant " + variant)
}

// counted counts the requests that go through deadconn. All else is deadconn's.
type counted struct{ *deadconn.Transport }

func (c counted) RoundTrip(req *http.Request) (*http.Response, error) {
	count(Sent)
	return c.Transport.RoundTrip(req)
}

func count(what byte) {
	if _, err := tally.Write([]byte{what}); err != nil {
		panic(err)
	}
}
