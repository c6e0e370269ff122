package bench

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// A realServer is a program, Debian's, that stands between the client and a
// world's server. In its arguments and its configuration $dir is a directory
// of its own, which holds the configuration and the certificate, $addr, $host
// and $port are where it listens, $backend and $backport the world's server,
// and $root makes the rest of a line a comment unless we are root.
type realServer struct {
	name   string // of the program, too
	args   string
	conf   string
	reload func(*proxy) error
	takes  time.Duration // until a reload has reached the old process, and a new one answers
}

var realServers = []realServer{
	{
		name: "nginx",
		args: "-p $dir -e $dir/log -c $dir/conf",
		conf: `
daemon off; worker_processes 1; pid $dir/pid; error_log $dir/log; ${root}user root;
events { worker_connections 512; }
http {
	access_log off;
	client_body_temp_path $dir/t1; proxy_temp_path $dir/t2; fastcgi_temp_path $dir/t3; uwsgi_temp_path $dir/t4; scgi_temp_path $dir/t5;
	keepalive_requests 40;
	server {
		listen $addr ssl http2;
		ssl_certificate $dir/cert.pem; ssl_certificate_key $dir/key.pem;
		location / { proxy_pass https://$backend; proxy_http_version 1.1; proxy_next_upstream off; }
	}
}
`,
		reload: send(syscall.SIGHUP),
		takes:  100 * time.Millisecond,
	},
	{
		name: "haproxy",
		args: "-W -f $dir/conf",
		conf: `
global
	maxconn 512
	nbthread 1
defaults
	mode http
	retries 0
	timeout connect 5s
	timeout client 60s
	timeout server 60s
frontend f
	bind $addr ssl crt $dir/both.pem alpn h2,http/1.1
	default_backend b
backend b
	server s $backend ssl verify none
`,
		reload: send(syscall.SIGUSR2),
		takes:  300 * time.Millisecond,
	},
	{
		name: "apache2",
		args: "-DFOREGROUND -d $dir -f $dir/conf",
		conf: `
ServerName example.test
DefaultRuntimeDir $dir
PidFile $dir/pid
ErrorLog $dir/log
${root}User www-data
${root}Group www-data
LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule ssl_module /usr/lib/apache2/modules/mod_ssl.so
LoadModule http2_module /usr/lib/apache2/modules/mod_http2.so
LoadModule proxy_module /usr/lib/apache2/modules/mod_proxy.so
LoadModule proxy_http_module /usr/lib/apache2/modules/mod_proxy_http.so
StartServers 1
Listen $addr
Protocols h2 http/1.1
SSLEngine on
SSLCertificateFile $dir/cert.pem
SSLCertificateKeyFile $dir/key.pem
SSLProxyEngine on
SSLProxyVerify none
SSLProxyCheckPeerName off
ProxyPass / https://$backend/
`,
		reload: send(syscall.SIGUSR1),
		takes:  time.Second,
	},
	{
		name: "nghttpx",
		args: "--conf=$dir/conf",
		conf: `
frontend=$host,$port
backend=127.0.0.1,$backport;;tls
insecure=yes
private-key-file=$dir/key.pem
certificate-file=$dir/cert.pem
errorlog-file=$dir/log
workers=1
no-ocsp=yes
`,
		reload: send(syscall.SIGHUP),
		takes:  200 * time.Millisecond,
	},
	{
		name: "h2o",
		args: "-m master -c $dir/conf",
		conf: `
${root}user: root
num-threads: 1
pid-file: $dir/pid
error-log: $dir/log
listen:
  host: $host
  port: $port
  ssl:
    certificate-file: $dir/cert.pem
    key-file: $dir/key.pem
proxy.ssl.verify-peer: OFF
hosts:
  default:
    paths:
      /:
        proxy.reverse.url: https://$backend/
`,
		reload: send(syscall.SIGHUP),
		takes:  time.Second,
	},
	{
		name: "caddy",
		args: "run --config $dir/conf --adapter caddyfile",
		conf: `
{
	admin unix/$dir/admin
	auto_https off
	log {
		output file $dir/log
	}
}
https://:$port {
	bind $host
	tls $dir/cert.pem $dir/key.pem
	reverse_proxy https://$backend {
		transport http {
			tls_insecure_skip_verify
		}
	}
}
`,
		reload: func(p *proxy) error {
			return p.command("reload", "--force", "--config", p.dir+"/conf", "--adapter", "caddyfile", "--address", "unix/"+p.dir+"/admin").Run()
		},
	},
}

var versionRE = regexp.MustCompile(`\d+(\.\d+)+\S*`)

// serverVersions asks the real servers that are there.
func serverVersions() (all []string) {
	for _, s := range realServers {
		flag := "-v"
		if s.name == "caddy" {
			flag = "version"
		}
		if out, err := exec.Command(s.name, flag).CombinedOutput(); err == nil {
			all = append(all, s.name+" "+versionRE.FindString(string(out)))
		}
	}
	return all
}

func send(s syscall.Signal) func(*proxy) error {
	return func(p *proxy) error { return p.cmd.Process.Signal(s) }
}

// A proxy is a real server that runs.
type proxy struct {
	realServer
	w    *world
	dir  string
	addr string
	args []string

	cmd *exec.Cmd

	// Dials wait while it is down, as if the service manager kept its
	// listening socket.
	down sync.RWMutex
}

// newProxy makes the files of a proxy and finds it an address.
func newProxy(s realServer, w *world) (*proxy, error) {
	key, err := x509.MarshalPKCS8PrivateKey(faultnet.ClientCert().PrivateKey)
	if err != nil {
		return nil, err
	}
	// A port that is free. The address is one that nobody else is likely to
	// use: on 127.0.0.1 another cell takes the port now and then before the
	// proxy does, or while it is down.
	n := rand.Uint32()
	l, err := net.Listen("tcp", fmt.Sprintf("127.%d.%d.%d:0", 1+n>>16%250, n>>8&0xff, n&0xff))
	if err != nil {
		return nil, err
	}
	p := &proxy{realServer: s, w: w, addr: l.Addr().String()}
	l.Close()
	if p.dir, err = os.MkdirTemp("", "deadconn-"+s.name+"-"); err != nil {
		return nil, err
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: faultnet.ClientCert().Certificate[0]})
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})
	backend := w.srv.l.Addr().String()
	vars := map[string]string{"dir": p.dir, "addr": p.addr, "backend": backend}
	vars["host"], vars["port"], _ = net.SplitHostPort(p.addr)
	_, vars["backport"], _ = net.SplitHostPort(backend)
	if os.Geteuid() != 0 {
		vars["root"] = "#"
	}
	expand := func(s string) string { return os.Expand(s, func(name string) string { return vars[name] }) }
	p.args = strings.Fields(expand(s.args))
	return p, errors.Join(
		os.Chmod(p.dir, 0o755), // apache2's workers are another user
		os.WriteFile(filepath.Join(p.dir, "cert.pem"), certPEM, 0o600),
		os.WriteFile(filepath.Join(p.dir, "key.pem"), keyPEM, 0o600),
		os.WriteFile(filepath.Join(p.dir, "both.pem"), append(certPEM, keyPEM...), 0o600),
		os.WriteFile(filepath.Join(p.dir, "conf"), []byte(expand(s.conf)), 0o600),
	)
}

func (p *proxy) command(args ...string) *exec.Cmd {
	cmd := exec.Command(p.name, args...)
	cmd.Env = append(os.Environ(), "HOME="+p.dir, "XDG_CONFIG_HOME=", "XDG_DATA_HOME=") // where caddy keeps things
	return cmd
}

// start returns when p serves: a main process may listen before its workers
// are there.
func (p *proxy) start() error {
	cmd := p.command(p.args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // for kill
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmd = cmd
	for range 500 {
		if c, err := tls.DialWithDialer(&net.Dialer{Timeout: 5 * time.Second}, "tcp", p.addr, clientTLS()); err == nil {
			return c.Close()
		}
		time.Sleep(10 * time.Millisecond)
	}
	p.kill()
	text, _ := os.ReadFile(filepath.Join(p.dir, "log"))
	return fmt.Errorf("%s does not serve: %s", p.name, text)
}

// kill kills all processes of p.
func (p *proxy) kill() {
	syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	p.cmd.Wait()
	for { // the workers may take longer to go
		c, err := net.Dial("tcp", p.addr)
		if err != nil {
			return
		}
		c.Close()
		time.Sleep(time.Millisecond)
	}
}

// restart kills p and starts it again. How long the start takes is nobody's
// merit: the time to the first success counts from its end.
func (p *proxy) restart() error {
	p.down.Lock()
	defer p.down.Unlock()
	p.kill()
	err := p.start()
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	p.w.fault = time.Now()
	return err
}

func behind(s realServer, traffic func(*world, *proxy) error) func(Contestant, *cellEnv) (*world, error) {
	return func(c Contestant, env *cellEnv) (*world, error) {
		var p *proxy
		w, err := newWorld(c, nil, func(ctx context.Context, network, addr string) (net.Conn, error) {
			p.down.RLock()
			defer p.down.RUnlock()
			return new(net.Dialer).DialContext(ctx, network, addr)
		})
		if err != nil {
			return nil, err
		}
		if p, err = newProxy(s, w); err != nil {
			return w, err
		}
		w.cleanup(func() { os.RemoveAll(p.dir) })
		if err := p.start(); err != nil {
			return w, err
		}
		w.cleanup(p.kill)
		w.to(p.addr)
		return w, traffic(w, p)
	}
}

// serverRows are the rows that every real server has.
func serverRows() (rows []Row) {
	for _, s := range realServers {
		for _, f := range []struct {
			name, what string
			fault      func(*proxy) error
			rest, work time.Duration // from the fault at rest to a request, and how long a request in flight takes
		}{
			{"reload", "a graceful reload", s.reload, s.takes + 50*time.Millisecond, s.takes + 400*time.Millisecond},
			{"killed", "kill -9 of all its processes, and a start at once that the dials wait for,", (*proxy).restart, 50 * time.Millisecond, 200 * time.Millisecond},
		} {
			rows = append(rows, Row{
				Name: s.name + " " + f.name + ", idle", Group: groupReal, Program: s.name,
				What: fmt.Sprintf("%s while the connection is at rest; a request follows after %v, 4 times", f.what, f.rest),
				run: behind(s, func(w *world, p *proxy) (err error) {
					w.faultsAtRest(4, f.rest, func() { err = errors.Join(err, f.fault(p)) })
					return err
				}),
			}, Row{
				Name: s.name + " " + f.name + ", in flight", Group: groupReal, Program: s.name,
				What: f.what + " while it works on one request of each kind; 2 times",
				run: behind(s, func(w *world, p *proxy) (err error) {
					w.faultsInFlight(2, f.work, func() { err = errors.Join(err, f.fault(p)) })
					return err
				}),
			})
		}
	}
	return rows
}
