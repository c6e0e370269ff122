package clientgo

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/deadconn/deadconn"
	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// A guard stands in for one transport of client-go's cache, which others may
// use as well and which is never changed: it sends through a deadconn.Transport
// with the same settings and the same dialer. So what client-go does in that
// dialer still works: it closes connections when a certificate is rotated.
type guard struct {
	pool *pool
	base http.RoundTripper // client-go's; held so that its reloading goes on

	current atomic.Pointer[pair]
	asked   atomic.Int64 // when base was last made to look at its CA file; UnixNano
	mu      sync.Mutex   // held while current is replaced
}

// pair is a transport of client-go's and what stands in for it.
type pair struct {
	of *http.Transport
	by *deadconn.Transport
}

var _ utilnet.RoundTripperWrapper = (*guard)(nil)

func (g *guard) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := g.follow().RoundTrip(req)
	if err != nil {
		return nil, plain(err)
	}
	return resp, nil
}

// plain keeps utilnet.IsProbableEOF right, which compares an EOF by identity:
// of a request that failed twice, and the second time so, only that is told.
func plain(err error) error {
	if re, ok := err.(*deadconn.RetryError); ok && utilnet.IsProbableEOF(re.Last()) && !utilnet.IsProbableEOF(re) {
		return re.Last()
	}
	return err
}

// WrappedRoundTripper returns the deadconn.Transport of the moment, below which
// apimachinery finds the dialer and the TLS settings.
func (g *guard) WrappedRoundTripper() http.RoundTripper { return g.follow() }

// CloseIdleConnections closes the idle connections of all clients that share
// them, as it does without us.
func (g *guard) CloseIdleConnections() { g.follow().CloseIdleConnections() }

// askEvery is how often base may look whether its CA file is due for a look,
// which client-go does every 5 minutes.
const askEvery = time.Second

// follow returns the deadconn.Transport for what base uses now.
func (g *guard) follow() *deadconn.Transport {
	own := ownTransport(g.base)
	if own.reloads {
		at := time.Now().UnixNano()
		if last := g.asked.Load(); at-last > int64(askEvery) && g.asked.CompareAndSwap(last, at) {
			ask(g.base)
			own = ownTransport(g.base)
		}
	}
	if c := g.current.Load(); c != nil && c.of == own.t {
		return c.by
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.current.Load()
	if c != nil && c.of == own.t {
		return c.by
	}
	opts := g.pool.opts
	opts.Base = own.t.Clone()
	keepPings(opts.Base, opts.Health)
	if dial := opts.Base.DialContext; dial != nil {
		opts.Base.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dial(ctx, network, addr)
			return reveal(c), err
		}
	}
	next := &pair{of: own.t, by: opts.NewTransport()}
	g.current.Store(next)
	if c != nil {
		c.by.CloseIdleConnections() // as client-go does with the transport it replaces
	}
	return next.by
}

// reveal gives access to the socket below c, for the kernel's account of the
// path. client-go's connrotation, which is in the way with credential plugins
// and certificate files, has none. If it gets other names, nothing is found
// there, and PINGs have to do.
func reveal(c net.Conn) net.Conn {
	v := reflect.ValueOf(c)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct ||
		!strings.HasSuffix(v.Type().Elem().PkgPath(), "k8s.io/client-go/util/connrotation") {
		return c
	}
	if f := v.Elem().FieldByName("Conn"); f.IsValid() && f.CanInterface() {
		if below, ok := f.Interface().(net.Conn); ok {
			return &revealed{Conn: c, below: below}
		}
	}
	return c
}

type revealed struct {
	net.Conn
	below net.Conn
}

func (c *revealed) NetConn() net.Conn { return c.below }

// ask makes base look after its CA file. It does so when it gets a request,
// and only then; this one has ended already, so that net/http sends nothing.
func ask(base http.RoundTripper) {
	if resp, err := base.RoundTrip(ended); err == nil {
		resp.Body.Close()
	}
}

var ended = func() *http.Request {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://kubernetes.invalid/", nil)
	if err != nil {
		panic(err)
	}
	return req
}()

// keepPings applies what client-go says of the health check of HTTP/2
// connections: its environment variables, and its defaults where deadconn's
// are turned off. Otherwise Options.Health is asked, which is stricter.
func keepPings(t *http.Transport, health deadconn.Health) {
	var cfg http.HTTP2Config
	if t.HTTP2 != nil {
		cfg = *t.HTTP2
	}
	var interval, timeout time.Duration
	if health.Disable {
		interval, timeout = 30*time.Second, 15*time.Second
	}
	if n, ok := seconds("HTTP2_READ_IDLE_TIMEOUT_SECONDS"); ok {
		if interval = n; n <= 0 {
			interval = never // turned off
		}
	}
	if n, ok := seconds("HTTP2_PING_TIMEOUT_SECONDS"); ok && n > 0 {
		timeout = n
	}
	cfg.SendPingTimeout = cmp.Or(cfg.SendPingTimeout, interval)
	cfg.PingTimeout = cmp.Or(cfg.PingTimeout, timeout)
	t.HTTP2 = &cfg
}

const never = 10 * 365 * 24 * time.Hour

func seconds(env string) (time.Duration, bool) {
	n, err := strconv.Atoi(os.Getenv(env))
	return time.Duration(n) * time.Second, err == nil
}

type found struct {
	t       *http.Transport // nil: rt is something else
	reloads bool            // t is replaced when its CA file changes
}

// ownTransport finds the *http.Transport that rt is, or that client-go's cache
// has made of it: nothing else may be left out on the way down. If client-go
// gives its types other names, that finds nothing, and rt is wrapped.
func ownTransport(rt http.RoundTripper) (f found) {
	for range maxLayers {
		if t, ok := rt.(*http.Transport); ok {
			f.t = t
			return f
		}
		u, ok := rt.(utilnet.RoundTripperWrapper)
		if !ok {
			break
		}
		switch cacheType(rt) {
		case "trackedTransport":
		case "atomicTransportHolder":
			f.reloads = true
		default:
			return found{}
		}
		rt = u.WrappedRoundTripper()
	}
	return found{}
}

// cacheType returns the name of rt's type if it is of client-go's cache.
func cacheType(rt http.RoundTripper) string {
	t := reflect.TypeOf(rt)
	if t.Kind() != reflect.Pointer || !strings.HasSuffix(t.Elem().PkgPath(), "k8s.io/client-go/transport") {
		return ""
	}
	return t.Elem().Name()
}
