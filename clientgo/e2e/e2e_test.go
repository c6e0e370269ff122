//go:build linux

// Package e2e runs a real workload against a real kube-apiserver, breaks the
// path between them, and measures what the workload notices: with client-go as
// it is, with clientgo.Protect, and with cfg.Wrap(deadconn.Wrap) alone.
//
//	DEADCONN_E2E=1 go test                       # black hole, RST, restart
//	DEADCONN_E2E=1 go test -run TestFaults -full # every fault
//
// The test binary is the API server as well: it starts itself again for that.
package e2e

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/deadconn/deadconn/clientgo/e2e/kubeserver"
	"github.com/deadconn/deadconn/internal/netlab"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

var (
	full  = flag.Bool("full", false, "try every fault, not only black hole, RST and restart")
	only  = flag.String("only", "", "try only faults with this in their name")
	plain = flag.Bool("plain", true, "try client-go as it is, too; it takes longest")
	table = flag.String("table", "", "write the table of results into this file, between its marks")
)

const (
	roleEnv = "DEADCONN_E2E_ROLE" // what a child process is for
	dirEnv  = "DEADCONN_E2E_DIR"
	hostEnv = "DEADCONN_E2E_HOST"
	nsEnv   = "DEADCONN_E2E_NAMESPACE"
	port    = 6443
)

func TestMain(m *testing.M) {
	c := kubeserver.Config{Dir: os.Getenv(dirEnv), Host: os.Getenv(hostEnv), Port: port}
	var err error
	switch os.Getenv(roleEnv) {
	case "server":
		err = c.Run(context.Background())
	case "writer":
		err = write(c, os.Getenv(nsEnv))
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// cluster is an API server in the server namespace of a lab.
type cluster struct {
	t   *testing.T
	lab *netlab.Lab
	kubeserver.Config
	admin *kubernetes.Clientset // by a connection that no fault but that of the path is for

	mu     sync.Mutex
	server *exec.Cmd // guarded by mu
}

func newCluster(t *testing.T) *cluster {
	lab := netlab.ForTest(t, netlab.Options{})
	c := &cluster{t: t, lab: lab, Config: kubeserver.Config{Dir: t.TempDir(), Host: lab.ServerAddr(), Port: port}}
	began := time.Now()
	if err := c.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	for _, err := os.Stat(c.CAFile()); err != nil; _, err = os.Stat(c.CAFile()) {
		c.wait(began)
	}
	cfg := c.config()
	cfg.Timeout = 5 * time.Second
	cfg.Dial = lab.Dial
	var err error
	if c.admin, err = kubernetes.NewForConfig(cfg); err != nil {
		t.Fatal(err)
	}
	for !c.ready() {
		c.wait(began)
	}
	t.Logf("kube-apiserver is ready after %v", time.Since(began).Round(100*time.Millisecond))
	return c
}

func (c *cluster) wait(began time.Time) {
	if time.Since(began) > 2*time.Minute {
		c.t.Fatal("kube-apiserver does not get ready:\n" + c.log())
	}
	time.Sleep(50 * time.Millisecond)
}

func (c *cluster) ready() bool {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_, err := c.admin.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
	return err == nil
}

func (c *cluster) config() *rest.Config {
	return &rest.Config{
		Host:            fmt.Sprintf("https://%s:%d", c.Host, c.Port),
		BearerToken:     kubeserver.Token,
		TLSClientConfig: rest.TLSClientConfig{CAFile: c.CAFile()},
		QPS:             -1,
	}
}

// child prepares this binary to run in a role.
func (c *cluster) child(role string, env ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"="+role, dirEnv+"="+c.Dir, hostEnv+"="+c.Host)
	cmd.Env = append(cmd.Env, env...)
	return cmd
}

func (c *cluster) start() error {
	log, err := os.OpenFile(filepath.Join(c.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := c.child("server")
	cmd.Stdout, cmd.Stderr = log, log
	if err := c.lab.StartServer(cmd); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.server = cmd
	return nil
}

func (c *cluster) signal(s syscall.Signal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.server.Process.Signal(s)
}

func (c *cluster) kill() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.server.Process.Kill()
	c.server.Wait()
}

// log returns the end of the server's log.
func (c *cluster) log() string {
	b, _ := os.ReadFile(filepath.Join(c.Dir, "log"))
	lines := strings.Split(string(b), "\n")
	return strings.Join(lines[max(0, len(lines)-40):], "\n")
}

// A writer is a process beside the API server, so that no fault of the path
// keeps it from writing. It makes 50 ConfigMaps a second and tells which of
// them the server has acknowledged, and when.
type writer struct {
	cmd  *exec.Cmd
	done chan struct{}

	mu    sync.Mutex
	acked map[string]time.Time // guarded by mu; by name
}

func (c *cluster) startWriter(namespace string) *writer {
	w := &writer{cmd: c.child("writer", nsEnv+"="+namespace), done: make(chan struct{}), acked: make(map[string]time.Time)}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	w.cmd.Stderr = os.Stderr
	if err := c.lab.StartServer(w.cmd); err != nil {
		c.t.Fatal(err)
	}
	go func() {
		defer close(w.done)
		for s := bufio.NewScanner(out); s.Scan(); {
			var name string
			var at int64
			if _, err := fmt.Sscan(s.Text(), &name, &at); err == nil {
				w.mu.Lock()
				w.acked[name] = time.Unix(0, at)
				w.mu.Unlock()
			}
		}
	}()
	c.t.Cleanup(w.stop)
	return w
}

func (w *writer) stop() {
	w.cmd.Process.Kill()
	<-w.done
	w.cmd.Wait()
}

// times returns what was acknowledged so far.
func (w *writer) times() map[string]time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := make(map[string]time.Time, len(w.acked))
	for name, at := range w.acked {
		m[name] = at
	}
	return m
}

const writes = 20 * time.Millisecond // apart

// write is the writer's process.
func write(c kubeserver.Config, namespace string) error {
	client, err := kubernetes.NewForConfig((&cluster{Config: c}).config())
	if err != nil {
		return err
	}
	tick := time.NewTicker(writes)
	for n := 0; ; n++ {
		<-tick.C
		name := fmt.Sprintf("write-%06d", n)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		_, err := client.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		cancel()
		if err == nil {
			fmt.Println(name, time.Now().UnixNano())
		}
	}
}

var errNotReady = errors.New("kube-apiserver did not come back")
