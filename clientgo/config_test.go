package clientgo

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/internal/faultnet"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	clientcmd "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/transport"
)

// What else a rest.Config can have, and what becomes of it.

func write(t *testing.T, name string, b []byte) string {
	t.Helper()
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// A credential plugin's token goes with every attempt; its dialer dials.
func TestExecPlugin(t *testing.T) {
	var tokens sync.Map
	server := faultnet.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tokens.Store(r.Header.Get("Authorization"), true)
	}))
	defer server.Close()
	eachWay(t, func(t *testing.T, protect func(*rest.Config)) {
		d := new(faultnet.Dialer)
		cfg := configFor(t, server.URL, server.ClientTLS())
		cfg.Dial = d.DialContext
		cfg.ExecProvider = &clientcmd.ExecConfig{
			APIVersion:      "client.authentication.k8s.io/v1",
			Command:         "echo",
			Args:            []string{`{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","status":{"token":"plugin"}}`},
			InteractiveMode: clientcmd.NeverExecInteractiveMode,
		}
		protect(cfg)
		c := httpClient(t, cfg)
		for range 3 {
			if err := do(c, http.MethodPut, server.URL, "x"); err != nil {
				t.Fatal(err)
			}
			d.Last().CloseUnderneath()
		}
		if _, ok := tokens.Load("Bearer plugin"); !ok || d.Dials() != 3 {
			t.Errorf("the plugin's token did not arrive, or %d dials", d.Dials())
		}
		tokens.Range(func(k, _ any) bool {
			if k != "Bearer plugin" {
				t.Errorf("a request came with Authorization %q", k)
			}
			return true
		})
	})
}

// When a certificate file changes, client-go closes its connections: the next
// requests show the new one, and none fails.
func TestCertificateRotation(t *testing.T) {
	defer func(was time.Duration) { transport.CertCallbackRefreshDuration = was }(transport.CertCallbackRefreshDuration)
	transport.CertCallbackRefreshDuration = 50 * time.Millisecond
	var last atomic.Value
	server := faultnet.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(r.TLS.PeerCertificates) > 0 {
			last.Store(r.TLS.PeerCertificates[0].Subject.CommonName)
		}
	}), faultnet.Configure(func(s *http.Server) { s.TLSConfig.ClientAuth = tls.RequestClientCert }))
	defer server.Close()
	eachWay(t, func(t *testing.T, protect func(*rest.Config)) {
		dir := t.TempDir()
		cfg := configFor(t, server.URL, server.ClientTLS())
		cert, key := newCert(t, "one")
		cfg.CertFile = write(t, filepath.Join(dir, "crt"), cert)
		cfg.KeyFile = write(t, filepath.Join(dir, "key"), key)
		protect(cfg)
		c := httpClient(t, cfg)
		request := func() {
			if err := do(c, http.MethodPut, server.URL, "x"); err != nil {
				t.Fatal(err)
			}
		}
		if request(); last.Load() != "one" {
			t.Fatalf("the server saw certificate %v", last.Load())
		}
		cert, key = newCert(t, "two")
		write(t, cfg.KeyFile, key)
		write(t, cfg.CertFile, cert)
		for deadline := time.Now().Add(10 * time.Second); last.Load() != "two"; {
			if time.Now().After(deadline) {
				t.Fatal("the new certificate is not used")
			}
			request()
			time.Sleep(5 * time.Millisecond)
		}
	})
}

// The dialer that closes connections when a certificate is rotated hides their
// sockets. Protect sees them all the same, so that silence is found out.
func TestSilenceWithCertificateFiles(t *testing.T) {
	a, d := newAPI(t), new(faultnet.Dialer)
	dir := t.TempDir()
	cert, key := newCert(t, "client")
	cfg := a.config()
	cfg.CertFile = write(t, filepath.Join(dir, "crt"), cert)
	cfg.KeyFile = write(t, filepath.Join(dir, "key"), key)
	cfg.Dial = d.DialContext
	Protect(cfg)
	c := httpClient(t, cfg)
	if err := get(c, a.URL); err != nil {
		t.Fatal(err)
	}
	switch err := faultnet.BlackholeSocket(d.Last()); {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, errors.ErrUnsupported):
		t.Skip("no black hole for a socket here: ", err)
	case err != nil:
		t.Fatal(err)
	}
	began := time.Now()
	if err := do(c, http.MethodPut, a.URL, "x"); err != nil {
		t.Error(err)
	}
	if d := time.Since(began); d > 4*time.Second {
		t.Errorf("rescued after %v", d)
	}
}

func newCert(t *testing.T, name string) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	kd, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: kd})
}

// A CA file that changes is loaded by client-go, when a request comes and five
// minutes have passed. Its transport is another one then, and so is ours.
func TestCAReload(t *testing.T) {
	oldCert, oldKey := newCert(t, "old")
	newCA, newKey := newCert(t, "new")
	var serving atomic.Pointer[tls.Certificate]
	serve := func(cert, key []byte) {
		c, err := tls.X509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		serving.Store(&c)
	}
	serve(oldCert, oldKey)
	server := faultnet.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.Proto) }),
		faultnet.Configure(func(s *http.Server) {
			s.TLSConfig.Certificates = nil
			s.TLSConfig.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return serving.Load(), nil }
		}))
	defer server.Close()
	eachWay(t, func(t *testing.T, protect func(*rest.Config)) {
		serve(oldCert, oldKey)
		file := write(t, filepath.Join(t.TempDir(), "ca"), oldCert)
		d := new(faultnet.Dialer)
		cfg := &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAFile: file}, Dial: d.DialContext}
		protect(cfg)
		c := httpClient(t, cfg)
		if err := get(c, server.URL); err != nil {
			t.Fatal(err)
		}
		serve(newCA, newKey)
		write(t, file, newCA)
		d.CloseAll()
		if err := get(c, server.URL); err == nil {
			t.Fatal("the new certificate was trusted too early")
		}
		age(t, c.Transport)
		if err := get(c, server.URL); err != nil {
			t.Error("after the CA file was due for a look:", err)
		}
		before := d.Dials()
		for range 3 {
			if err := get(c, server.URL); err != nil {
				t.Error(err)
			}
		}
		if d.Dials() != before {
			t.Errorf("%d dials after the new transport had a connection", d.Dials()-before)
		}
	})
}

// age makes client-go look at its CA file with the next request.
func age(t *testing.T, rt http.RoundTripper) {
	t.Helper()
	for {
		if g, ok := rt.(*guard); ok {
			g.asked.Store(0)
			rt = g.base
		}
		if cacheType(rt) == "atomicTransportHolder" {
			f := reflect.ValueOf(rt).Elem().FieldByName("transportLastChecked")
			*(*time.Time)(f.Addr().UnsafePointer()) = time.Time{}
			return
		}
		u, ok := rt.(utilnet.RoundTripperWrapper)
		if !ok {
			t.Fatal("client-go does not reload its CA file")
		}
		rt = u.WrappedRoundTripper()
	}
}

func TestProxy(t *testing.T) {
	a := newAPI(t)
	var connects atomic.Int32
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		connects.Add(1)
		out, err := net.Dial("tcp", r.Host)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer out.Close()
		in, buffered, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer in.Close()
		io.WriteString(in, "HTTP/1.1 200 OK\r\n\r\n")
		go func() { io.Copy(out, buffered); out.Close() }()
		io.Copy(in, out)
	}))
	defer proxy.Close()
	eachWay(t, func(t *testing.T, protect func(*rest.Config)) {
		connects.Store(0)
		d := new(faultnet.Dialer)
		cfg := a.config()
		cfg.Dial = d.DialContext
		cfg.Proxy = func(*http.Request) (*url.URL, error) { return url.Parse(proxy.URL) }
		protect(cfg)
		c := clientset(t, cfg)
		for range 3 {
			if err := updateLease(c); err != nil {
				t.Fatal(err)
			}
			d.Last().CloseUnderneath()
		}
		if connects.Load() != 3 || d.Dials() != 3 {
			t.Errorf("%d CONNECTs, %d dials", connects.Load(), d.Dials())
		}
		d.CloseAll()
	})
}

func TestEnvironment(t *testing.T) {
	a := newAPI(t)
	config := func(o ...deadconn.Options) *rest.Config {
		cfg := a.config()
		cfg.Dial = new(faultnet.Dialer).DialContext // not from the cache
		Protect(cfg, o...)
		return cfg
	}
	pings := func(o ...deadconn.Options) [2]time.Duration {
		c := httpClient(t, config(o...))
		own := below(c.Transport).WrappedRoundTripper().(*http.Transport)
		return [2]time.Duration{own.HTTP2.SendPingTimeout, own.HTTP2.PingTimeout}
	}
	off := deadconn.Options{Health: deadconn.Health{Disable: true}}
	if got := pings(off); got != [2]time.Duration{30 * time.Second, 15 * time.Second} {
		t.Errorf("without ours, client-go's own health check is %v", got)
	}
	t.Setenv("HTTP2_READ_IDLE_TIMEOUT_SECONDS", "3")
	t.Setenv("HTTP2_PING_TIMEOUT_SECONDS", "4")
	for _, o := range []deadconn.Options{{}, off} {
		if got := pings(o); got != [2]time.Duration{3 * time.Second, 4 * time.Second} {
			t.Errorf("health check %v", got)
		}
	}
	t.Setenv("HTTP2_READ_IDLE_TIMEOUT_SECONDS", "0")
	if got := pings(); got[0] != never {
		t.Errorf("health check turned off: %v", got)
	}
	t.Setenv("DISABLE_HTTP2", "1")
	resp, err := httpClient(t, config()).Get(a.URL)
	if err != nil || resp.ProtoMajor != 1 {
		t.Fatalf("with DISABLE_HTTP2: %v, %v", resp, err)
	}
	resp.Body.Close()
}

// Clients without TLS settings use http.DefaultTransport, which stays as it is.
func TestDefaultTransport(t *testing.T) {
	server := faultnet.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {}), faultnet.NoTLS())
	defer server.Close()
	was := fmt.Sprintf("%p", http.DefaultTransport.(*http.Transport).DialContext)
	cfg := &rest.Config{Host: server.URL}
	Protect(cfg)
	c := httpClient(t, cfg)
	for range 3 {
		if err := get(c, server.URL); err != nil {
			t.Fatal(err)
		}
	}
	if fmt.Sprintf("%p", http.DefaultTransport.(*http.Transport).DialContext) != was {
		t.Error("http.DefaultTransport was changed")
	}
}

// Many goroutines, many clients, deaths in between: for the race detector.
func TestConcurrently(t *testing.T) {
	a := newAPI(t)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	file := write(t, filepath.Join(t.TempDir(), "ca"), a.ca)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				cfg := &rest.Config{Host: a.URL, TLSClientConfig: rest.TLSClientConfig{CAFile: file}}
				Protect(cfg)
				c := httpClient(t, cfg)
				for range 20 {
					// One may meet two deaths, or one while the body is read.
					if err := do(c, http.MethodPut, a.URL, "x"); err != nil && !deadconn.Classify(err).Dead() {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	wg.Go(func() {
		for ctx.Err() == nil {
			time.Sleep(20 * time.Millisecond)
			a.KillConns()
		}
	})
	wg.Wait()
}
