package clientgo

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// api is an API server that answers GET /version and gives back what it is
// sent.
type api struct {
	*faultnet.Server

	ca []byte
}

func newAPI(t *testing.T, opts ...faultnet.ServerOption) *api {
	t.Helper()
	a := new(api)
	a.Server = faultnet.NewServer(a, opts...)
	t.Cleanup(a.Close)
	a.ca = caOf(t, a.URL, a.ClientTLS())
	return a
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	w.Header().Set("Content-Type", "application/json")
	switch {
	case r.URL.Path == "/version":
		io.WriteString(w, `{"gitVersion":"v1.37.2"}`)
	case len(body) > 0:
		w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
		w.Write(body)
	default:
		io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Success"}`)
	}
}

// config returns a new rest.Config for a, as clientcmd would make it.
func (a *api) config() *rest.Config { return configOf(a.URL, a.ca) }

// configFor is that for a Peer.
func configFor(t *testing.T, url string, cfg *tls.Config) *rest.Config {
	t.Helper()
	return configOf(url, caOf(t, url, cfg))
}

func configOf(url string, ca []byte) *rest.Config {
	return &rest.Config{
		Host:            url,
		TLSClientConfig: rest.TLSClientConfig{CAData: ca},
		QPS:             -1,
		Timeout:         20 * time.Second,
	}
}

// caOf returns the certificate of the server at url as a PEM file.
func caOf(t *testing.T, url string, cfg *tls.Config) []byte {
	t.Helper()
	cfg = cfg.Clone()
	cfg.Certificates = []tls.Certificate{faultnet.ClientCert()}
	c, err := tls.Dial("tcp", strings.TrimPrefix(url, "https://"), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.ConnectionState().PeerCertificates[0].Raw})
}

func clientset(t *testing.T, cfg *rest.Config) *kubernetes.Clientset {
	t.Helper()
	c, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// httpClient returns the http.Client for cfg: without the retries that the
// clients of client-go make of their own for GET.
func httpClient(t *testing.T, cfg *rest.Config) *http.Client {
	t.Helper()
	c, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func get(c *http.Client, url string) error { return do(c, http.MethodGet, url, "") }

func do(c *http.Client, method, url, body string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var r io.Reader
	if body != "" {
		r = bytes.NewReader([]byte(body))
	}
	req, err := http.NewRequestWithContext(ctx, method, url, r)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

func updateLease(c *kubernetes.Clientset) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := c.CoordinationV1().Leases("ns").Update(ctx, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "node", Namespace: "ns", ResourceVersion: "7"},
	}, metav1.UpdateOptions{})
	return err
}

// ways are the two documented ways in.
var ways = map[string]func(*rest.Config){
	"Protect":    func(cfg *rest.Config) { Protect(cfg) },
	"Wrap alone": func(cfg *rest.Config) { cfg.Wrap(deadconn.Wrap) },
}

// eachWay runs f for both.
func eachWay(t *testing.T, f func(t *testing.T, protect func(*rest.Config))) {
	for name, protect := range ways {
		t.Run(name, func(t *testing.T) { f(t, protect) })
	}
}
