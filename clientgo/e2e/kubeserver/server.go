// Package kubeserver runs kube-apiserver with an etcd inside, in this process.
package kubeserver

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

// Token is the bearer token of the one user, who may do everything.
const Token = "tok"

// Config says where the server keeps its state and listens.
type Config struct {
	Dir  string // state: certificates, etcd's data; kept over restarts
	Host string // an IP address
	Port int
}

// CAFile is the certificate to trust: the server's own.
func (c Config) CAFile() string { return filepath.Join(c.Dir, "certs", "apiserver.crt") }

// WriteKubeconfig writes a kubeconfig file for the server, which must have made
// its certificate.
func (c Config) WriteKubeconfig(name string) error {
	if _, err := os.Stat(c.CAFile()); err != nil {
		return err
	}
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["e2e"] = &clientcmdapi.Cluster{Server: fmt.Sprintf("https://%s:%d", c.Host, c.Port), CertificateAuthority: c.CAFile()}
	cfg.AuthInfos["e2e"] = &clientcmdapi.AuthInfo{Token: Token}
	cfg.Contexts["e2e"] = &clientcmdapi.Context{Cluster: "e2e", AuthInfo: "e2e"}
	cfg.CurrentContext = "e2e"
	return clientcmd.WriteToFile(*cfg, name)
}

// Run runs until ctx ends or the server fails.
func (c Config) Run(ctx context.Context) error {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return err
	}
	etcd, err := c.startEtcd(ctx)
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	defer etcd.Close()
	key, err := c.signingKey()
	if err != nil {
		return err
	}
	tokens := filepath.Join(c.Dir, "tokens.csv")
	if err := os.WriteFile(tokens, []byte(Token+`,admin,admin,"system:masters"`+"\n"), 0o600); err != nil {
		return err
	}
	cmd := app.NewAPIServerCommand()
	cmd.SetArgs([]string{
		"--etcd-servers=" + etcd.Config().ListenClientUrls[0].String(),
		"--bind-address=" + c.Host,
		"--advertise-address=" + c.Host,
		fmt.Sprintf("--secure-port=%d", c.Port),
		"--cert-dir=" + filepath.Dir(c.CAFile()),
		"--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=192.0.2.0/24",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file=" + key,
		"--service-account-key-file=" + key,
		"--token-auth-file=" + tokens,
		"--authorization-mode=AlwaysAllow",
		"--disable-admission-plugins=ServiceAccount",
	})
	return cmd.ExecuteContext(ctx)
}

func (c Config) startEtcd(ctx context.Context) (*embed.Etcd, error) {
	cfg := embed.NewConfig()
	cfg.Dir = filepath.Join(c.Dir, "etcd")
	cfg.LogLevel = "error"
	cfg.UnsafeNoFsync = true
	client, err := freeURL()
	if err != nil {
		return nil, err
	}
	peer, err := freeURL()
	if err != nil {
		return nil, err
	}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	etcd, err := embed.StartEtcd(cfg)
	if err != nil {
		return nil, err
	}
	select {
	case <-etcd.Server.ReadyNotify():
		return etcd, nil
	case err = <-etcd.Err():
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(30 * time.Second):
		err = errors.New("not ready after 30 s")
	}
	etcd.Close()
	return nil, err
}

func freeURL() (url.URL, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return url.URL{}, err
	}
	defer ln.Close()
	return url.URL{Scheme: "http", Host: ln.Addr().String()}, nil
}

// signingKey returns the file of a key to sign service accounts' tokens.
func (c Config) signingKey() (string, error) {
	name := filepath.Join(c.Dir, "sa.key")
	if _, err := os.Stat(name); err == nil {
		return name, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return "", err
	}
	return name, os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
}
