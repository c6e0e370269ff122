package clientgo

import (
	"bytes"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/deadconn/deadconn/clientgo/internal/exectest"
	"github.com/deadconn/deadconn/internal/faultnet"
	"k8s.io/client-go/rest"
	exec "k8s.io/client-go/tools/remotecommand"
)

var executors = map[string]func(*rest.Config, *url.URL) (exec.Executor, error){
	"SPDY": func(cfg *rest.Config, u *url.URL) (exec.Executor, error) {
		return exec.NewSPDYExecutor(cfg, http.MethodPost, u)
	},
	"WebSocket": func(cfg *rest.Config, u *url.URL) (exec.Executor, error) {
		return exec.NewWebSocketExecutor(cfg, http.MethodGet, u.String())
	},
}

func TestUpgrades(t *testing.T) {
	for name, executor := range executors {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, protect func(*rest.Config)) {
				s := new(exectest.Server)
				server := faultnet.NewServer(s)
				defer server.Close()
				cfg := configFor(t, server.URL, server.ClientTLS())
				protect(cfg)
				u, err := url.Parse(server.URL + "/exec")
				if err != nil {
					t.Fatal(err)
				}
				run := func() (string, error) {
					e, err := executor(cfg, u)
					if err != nil {
						return "", err
					}
					var out bytes.Buffer
					err = e.StreamWithContext(t.Context(), exec.StreamOptions{Stdin: strings.NewReader("hello"), Stdout: &out})
					return out.String(), err
				}
				if out, err := run(); err != nil || out != "hello" {
					t.Fatalf("exec: %q, %v", out, err)
				}
				s.Die.Store(true)
				before := s.Requests.Load()
				if out, err := run(); err == nil {
					t.Errorf("exec on a server that dies: %q", out)
				} else if n := s.Requests.Load() - before; n != 1 {
					t.Errorf("an upgrade was sent %d times; %v", n, err)
				}
			})
		})
	}
}
