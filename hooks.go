package deadconn

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// Hooks are functions that a [Transport] calls on what happens, in the manner
// of httptrace.ClientTrace. A nil function is not called. They are called on
// the goroutine that found out, without locks held, and may be called
// concurrently; one that is slow delays the request that it tells of, and no
// other. A panic in one is the caller's.
type Hooks struct {
	// ConnEvicted is called once for each connection that was found dead
	// and closed, after it was closed.
	ConnEvicted func(ConnEvictedInfo)

	// Retried is called when a request was sent a second time, after the
	// outcome is known.
	Retried func(RetriedInfo)
}

// ConnEvictedInfo tells of an evicted connection.
type ConnEvictedInfo struct {
	Kind         Kind          // why
	Err          error         // the error that said so
	Addr         string        // host:port as dialed; empty if it was not dialed by a Registry
	LocalAddr    net.Addr      // of the socket
	RemoteAddr   net.Addr      // of the socket; a proxy's, if there is one
	Age          time.Duration // since it was dialed; 0 if not dialed by a Registry
	BytesRead    int64         // on the wire, TLS included; 0 if not dialed by a Registry
	BytesWritten int64
}

// RetriedInfo tells of a request that was sent a second time.
type RetriedInfo struct {
	Method string
	Host   string // of the request's URL
	First  error  // what the first attempt failed with
	Err    error  // what the second failed with; nil: the request was rescued
}

// evicted tells the world that c was closed.
func (t *Transport) evicted(c *conn) {
	t.stats.evicted.Add(1)
	if t.hooks.ConnEvicted == nil && t.log == nil {
		return
	}
	d := c.fate.Load()
	info := ConnEvictedInfo{
		Kind:         d.kind,
		Err:          d.err,
		Addr:         c.addr,
		LocalAddr:    c.LocalAddr(),
		RemoteAddr:   c.RemoteAddr(),
		BytesRead:    c.read.Load(),
		BytesWritten: c.wrote.Load(),
	}
	if !c.foreign {
		info.Age = time.Duration(d.at - c.born)
	}
	if t.log != nil {
		t.log.LogAttrs(context.Background(), slog.LevelWarn, "deadconn: connection evicted",
			slog.String("kind", info.Kind.String()),
			slog.String("addr", info.Addr),
			slog.Any("local", info.LocalAddr),
			slog.Any("remote", info.RemoteAddr),
			slog.Duration("age", info.Age),
			slog.String("error", info.Err.Error()))
	}
	if t.hooks.ConnEvicted != nil {
		t.hooks.ConnEvicted(info)
	}
}

// retried tells the world that req was sent twice: first is what the first
// attempt failed with (nil: it was not sent, so this is no retry), err the
// second.
func (t *Transport) retried(req *http.Request, first, err error) {
	if first == nil {
		return
	}
	if err == nil {
		t.stats.rescued.Add(1)
	} else {
		t.stats.lost.Add(1)
	}
	if t.log != nil {
		t.log.LogAttrs(req.Context(), slog.LevelDebug, "deadconn: request sent again",
			slog.String("method", req.Method),
			slog.String("host", req.URL.Host),
			slog.Bool("rescued", err == nil),
			slog.String("error", first.Error()))
	}
	if t.hooks.Retried != nil {
		t.hooks.Retried(RetriedInfo{Method: req.Method, Host: req.URL.Host, First: first, Err: err})
	}
}
