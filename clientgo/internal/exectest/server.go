// Package exectest stands in for what runs commands in containers: the far end
// of kubectl exec.
package exectest

import (
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
	"k8s.io/streaming/pkg/httpstream/wsstream"
)

// Server runs "cat" for exec requests, by WebSocket or SPDY, or resets
// their connection if Die is set.
type Server struct {
	Requests atomic.Int32 // so far
	Die      atomic.Bool
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.Requests.Add(1)
	switch {
	case s.Die.Load():
		if c, _, err := w.(http.Hijacker).Hijack(); err == nil {
			reset(c)
		}
	case strings.EqualFold(r.Header.Get("Upgrade"), "websocket"):
		c := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{
			remotecommand.StreamProtocolV5Name: {Binary: true, Channels: []wsstream.ChannelType{
				wsstream.ReadChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.ReadChannel,
			}},
		})
		_, streams, err := c.Open(w, r)
		if err != nil {
			return
		}
		defer c.Close()
		cat(streams[0], streams[1], streams[3])
	default:
		if _, err := httpstream.Handshake(r, w, []string{remotecommand.StreamProtocolV4Name}); err != nil {
			return
		}
		streams := make(chan httpstream.Stream, 10)
		c := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, replied <-chan struct{}) error {
			go func() { <-replied; streams <- s }()
			return nil
		})
		if c == nil {
			return
		}
		defer c.Close()
		by := make(map[string]httpstream.Stream)
		for len(by) < 3 {
			select {
			case s := <-streams:
				by[s.Headers().Get(corev1.StreamType)] = s
			case <-c.CloseChan():
				return
			}
		}
		cat(by[corev1.StreamTypeStdin], by[corev1.StreamTypeStdout], by[corev1.StreamTypeError])
	}
}

func cat(in io.Reader, out, status io.WriteCloser) {
	io.Copy(out, in)
	out.Close()
	io.WriteString(status, `{"metadata":{},"status":"Success"}`)
	status.Close()
}

// reset ends c with a RST.
func reset(c net.Conn) {
	for {
		u, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		c = u.NetConn()
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	c.Close()
}
