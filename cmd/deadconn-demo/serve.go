package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/debug"
	"github.com/deadconn/deadconn/internal/faultnet"
)

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// observed is one Transport for all scenarios, and its debug page.
type observed struct {
	url string
	t   *deadconn.Transport
	srv *http.Server

	mu    sync.Mutex
	dials map[string]dialFunc // by the server's address
}

// observe serves the page.
func observe() (*observed, error) {
	o := &observed{dials: make(map[string]dialFunc)}
	server := faultnet.NewServer(http.NotFoundHandler())
	defer server.Close()
	o.t = deadconn.Options{
		Base: &http.Transport{
			DialContext:       o.dial,
			TLSClientConfig:   server.ClientTLS(), // it fits them all
			ForceAttemptHTTP2: true,
		},
		Health: health,
	}.NewTransport()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("the debug page: %w", err)
	}
	const path = "/debug/deadconn"
	mux := http.NewServeMux()
	mux.Handle(path, debug.Handler(o.t))
	mux.Handle("/{$}", http.RedirectHandler(path, http.StatusFound))
	o.url = "http://" + ln.Addr().String() + path
	o.srv = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go o.srv.Serve(ln)
	return o, nil
}

func (o *observed) close() { o.srv.Close() }

// way is the way to send requests that can be watched.
func (o *observed) way() way {
	return way{owned, func(addr string, base *http.Transport) http.RoundTripper {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.dials[addr] = base.DialContext
		return o.t
	}}
}

func (o *observed) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	o.mu.Lock()
	dial := o.dials[addr]
	o.mu.Unlock()
	if dial == nil {
		return nil, errors.New("no server of the demo: " + addr)
	}
	return dial(ctx, network, addr)
}

// troubles befall a connection in turn.
var troubles = []func(*rig){
	func(r *rig) { r.kill((*conn).CloseUnderneath) },
	func(r *rig) { r.kill(func(c *conn) { c.FailWrites(syscall.EPIPE) }) },
	(*rig).reset,
	func(r *rig) { r.kill((*conn).Blackhole) },
	func(r *rig) { // for a while there is no other connection to be had
		r.dialer.SetErr(syscall.ECONNREFUSED)
		r.kill((*conn).CloseUnderneath)
		time.AfterFunc(150*time.Millisecond, func() { r.dialer.SetErr(nil) })
	},
	func(r *rig) { r.kill((*conn).HoldWrites) },
}

// goOn keeps some servers busy and lets their connections die, until ctx ends.
func (o *observed) goOn(ctx context.Context) {
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			r, err := newRig(scenario{}, o.way())
			if err != nil {
				return // it is a demo of a page that can do without
			}
			defer r.close()
			// Each at its own pace.
			o.traffic(ctx, r, i, time.Duration(3+2*i)*time.Second)
		})
	}
	wg.Wait()
}

func (o *observed) traffic(ctx context.Context, r *rig, next int, every time.Duration) {
	request := time.NewTicker(100 * time.Millisecond)
	defer request.Stop()
	trouble := time.NewTicker(every)
	defer trouble.Stop()
	for {
		select {
		case <-ctx.Done():
			r.client.CloseIdleConnections()
			r.dialer.CloseAll()
			r.hold.Wait()
			return
		case <-request.C:
			r.start(1)
		case <-trouble.C:
			troubles[next%len(troubles)](r)
			next++
		}
	}
}
