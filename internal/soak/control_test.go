package soak

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync/atomic"

	"github.com/deadconn/deadconn"
)

// naive sends every request again, as many a retry loop does.
func naive(c *client) { c.rt = naiveRetry{transportSettings(c)} }

type naiveRetry struct{ *http.Transport }

func (n naiveRetry) RoundTrip(req *http.Request) (resp *http.Response, err error) {
	var body []byte
	if req.Body != nil {
		body, _ = io.ReadAll(req.Body)
		req.Body.Close()
	}
	for range 3 {
		again := req.Clone(req.Context())
		if req.Body != nil {
			again.Body = io.NopCloser(bytes.NewReader(body))
			again.GetBody = nil
		}
		if resp, err = n.Transport.RoundTrip(again); err == nil || req.Context().Err() != nil {
			break
		}
	}
	if resp != nil {
		resp.Request = req
	}
	return resp, err
}

// A saboteur does harm to one request in ten.
type saboteur struct {
	*http.Transport
	c    *client
	harm harm
	n    atomic.Int64
}

type harm int

const (
	closesTwice harm = iota
	neverCloses
	truncates
	swaps
	fails
	evicts
)

func sabotage(h harm) makeClient {
	return func(c *client) { c.rt = &saboteur{Transport: transportSettings(c), c: c, harm: h} }
}

type unclosed struct{ io.Reader }

func (unclosed) Close() error { return nil }

func (s *saboteur) RoundTrip(req *http.Request) (*http.Response, error) {
	if s.n.Add(1)%10 != 0 {
		return s.Transport.RoundTrip(req)
	}
	orig := req
	switch {
	case s.harm == closesTwice && req.Body != nil:
		defer req.Body.Close()
	case s.harm == neverCloses && req.Body != nil:
		req = req.Clone(req.Context())
		req.Body = unclosed{req.Body}
		req.GetBody = nil
	case s.harm == fails:
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, errors.New("out of the blue")
	case s.harm == evicts:
		if r := s.c.anyConn(); r != nil {
			s.c.hooks().ConnEvicted(deadconn.ConnEvictedInfo{Autopsy: deadconn.Autopsy{LocalAddr: r.conn.LocalAddr()}})
		}
	}
	resp, err := s.Transport.RoundTrip(req)
	if resp == nil {
		return resp, err
	}
	resp.Request = orig
	switch s.harm {
	case truncates:
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(resp.Body, 10), resp.Body}
	case swaps:
		resp.Header.Set("X-Id", "1")
	}
	return resp, err
}
