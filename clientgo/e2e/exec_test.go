//go:build linux

package e2e

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/deadconn/deadconn/clientgo/internal/exectest"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
)

// kubectl exec, by WebSocket and by SPDY, through the API server to a stand-in
// for a kubelet. It is sent once, whatever becomes of it.
func TestExec(t *testing.T) {
	c := ready(t)
	kubelet := c.startKubelet()
	ctx := t.Context()
	proxy := httptest.NewServer(http.HandlerFunc(c.connect)) // exec does not use cfg.Dial
	defer proxy.Close()
	for _, way := range ways {
		for name, executor := range map[string]func(*rest.Config, *url.URL) (remotecommand.Executor, error){
			"WebSocket": func(cfg *rest.Config, u *url.URL) (remotecommand.Executor, error) {
				return remotecommand.NewWebSocketExecutor(cfg, http.MethodGet, u.String())
			},
			"SPDY": func(cfg *rest.Config, u *url.URL) (remotecommand.Executor, error) {
				return remotecommand.NewSPDYExecutor(cfg, http.MethodPost, u)
			},
		} {
			t.Run(way.name+", "+name, func(t *testing.T) {
				cfg := c.config()
				cfg.Proxy = func(*http.Request) (*url.URL, error) { return url.Parse(proxy.URL) }
				way.protect(cfg)
				u := c.admin.CoreV1().RESTClient().Post().Namespace("default").Resource("pods").Name("pod").SubResource("exec").
					VersionedParams(&corev1.PodExecOptions{Container: "c", Command: []string{"cat"}, Stdin: true, Stdout: true}, scheme.ParameterCodec).URL()
				run := func() (string, error) {
					e, err := executor(cfg, u)
					if err != nil {
						return "", err
					}
					var out bytes.Buffer
					err = e.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: strings.NewReader("hello"), Stdout: &out})
					return out.String(), err
				}
				kubelet.Die.Store(false)
				if out, err := run(); err != nil || out != "hello" {
					t.Fatalf("%q, %v", out, err)
				}
				kubelet.Die.Store(true)
				before := kubelet.Requests.Load()
				if out, err := run(); err == nil {
					t.Errorf("on a kubelet that dies: %q", out)
				}
				if n := kubelet.Requests.Load() - before; n != 1 {
					t.Errorf("the kubelet was asked %d times", n)
				}
			})
		}
	}
}

// startKubelet starts it, with a Node and a Pod.
func (c *cluster) startKubelet() *exectest.Server {
	t, ctx := c.t, c.t.Context()
	ln, err := c.lab.Listen(0)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	handler := new(exectest.Server)
	server := &http.Server{Handler: handler, TLSConfig: &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		NextProtos:   []string{"http/1.1"},
	}}
	go server.ServeTLS(ln, "", "")
	t.Cleanup(func() { server.Close() })

	node, err := c.admin.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: c.lab.ServerAddr()}}
	node.Status.DaemonEndpoints.KubeletEndpoint.Port = int32(ln.Addr().(*net.TCPAddr).Port)
	if _, err := c.admin.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	grace := int64(0)
	if _, err := c.admin.CoreV1().Pods("default").Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "pod"},
		Spec: corev1.PodSpec{
			NodeName: "node", Containers: []corev1.Container{{Name: "c", Image: "none"}},
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}}, TerminationGracePeriodSeconds: &grace,
		},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return handler
}

// connect is an HTTP proxy into the lab.
func (c *cluster) connect(w http.ResponseWriter, r *http.Request) {
	out, err := c.lab.Dial(r.Context(), "tcp", r.Host)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer out.Close()
	in, buffered, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer in.Close()
	io.WriteString(in, "HTTP/1.1 200 OK\r\n\r\n")
	go func() {
		io.Copy(out, buffered)
		out.(*net.TCPConn).CloseWrite()
	}()
	io.Copy(in, out)
}

// ready returns a new cluster, or skips.
func ready(t *testing.T) *cluster {
	if os.Getenv("DEADCONN_E2E") != "1" {
		t.Skip("starts a kube-apiserver, needs root and minutes: set DEADCONN_E2E=1")
	}
	return newCluster(t)
}
