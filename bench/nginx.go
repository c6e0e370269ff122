package bench

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// An nginx is one of its own, in front of a world's server.
type nginx struct {
	cmd *exec.Cmd
}

const nginxConf = `
daemon off; worker_processes 1; pid %[1]s/pid; error_log %[1]s/error.log; %[4]s
events { worker_connections 512; }
http {
	access_log off;
	client_body_temp_path %[1]s/t1; proxy_temp_path %[1]s/t2; fastcgi_temp_path %[1]s/t3; uwsgi_temp_path %[1]s/t4; scgi_temp_path %[1]s/t5;
	keepalive_requests 40;
	server {
		listen %[2]s ssl http2;
		ssl_certificate %[1]s/cert.pem; ssl_certificate_key %[1]s/key.pem;
		location / { proxy_pass https://%[3]s; proxy_http_version 1.1; proxy_next_upstream off; }
	}
}
`

func startNginx(backend string) (n *nginx, addr string, stop func(), err error) {
	dir, err := os.MkdirTemp("", "deadconn-nginx-")
	if err != nil {
		return nil, "", nil, err
	}
	stop = func() { os.RemoveAll(dir) }
	fail := func(err error) (*nginx, string, func(), error) { stop(); return nil, "", nil, err }
	cert := faultnet.ClientCert()
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		return fail(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // a port that is free
	if err != nil {
		return fail(err)
	}
	addr = l.Addr().String()
	l.Close()
	user := ""
	if os.Geteuid() == 0 {
		user = "user root;"
	}
	conf := filepath.Join(dir, "nginx.conf")
	if err := errors.Join(
		os.WriteFile(filepath.Join(dir, "cert.pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]}), 0o600),
		os.WriteFile(filepath.Join(dir, "key.pem"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}), 0o600),
		os.WriteFile(conf, fmt.Appendf(nil, nginxConf, dir, addr, backend, user), 0o600),
	); err != nil {
		return fail(err)
	}
	n = &nginx{cmd: exec.Command("nginx", "-p", dir, "-e", filepath.Join(dir, "error.log"), "-c", conf)}
	if err := n.cmd.Start(); err != nil {
		return fail(err)
	}
	stop = func() {
		n.signal(syscall.SIGTERM)
		n.cmd.Wait()
		os.RemoveAll(dir)
	}
	for range 100 {
		if c, err := net.Dial("tcp", addr); err == nil {
			c.Close()
			return n, addr, stop, nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	text, _ := os.ReadFile(filepath.Join(dir, "error.log"))
	return fail(fmt.Errorf("nginx does not listen: %s", text))
}

func (n *nginx) signal(s os.Signal) { n.cmd.Process.Signal(s) }

// killWorkers kills the workers; the main process keeps the listening socket
// and starts others.
func (n *nginx) killWorkers() {
	pid := strconv.Itoa(n.cmd.Process.Pid)
	b, err := os.ReadFile("/proc/" + pid + "/task/" + pid + "/children")
	if err != nil {
		return
	}
	for _, f := range strings.Fields(string(b)) {
		if child, err := strconv.Atoi(f); err == nil {
			syscall.Kill(child, syscall.SIGKILL)
		}
	}
}

func behindNginx(traffic func(*world, *nginx)) func(Contestant, *cellEnv) (*world, error) {
	return func(c Contestant, env *cellEnv) (*world, error) {
		w, err := newWorld(c, nil, nil)
		if err != nil {
			return nil, err
		}
		n, addr, stop, err := startNginx(w.srv.l.Addr().String())
		if err != nil {
			return w, err
		}
		w.cleanup(stop)
		w.to(addr)
		traffic(w, n)
		return w, nil
	}
}
