// Command kubeserver is kube-apiserver with an etcd inside, for trying things
// out. It needs no root and keeps its state in one folder.
//
//	kubeserver [flags] [-- command arguments...]
//
// With a command it starts the command when the server is ready, with
// KUBECONFIG set, and ends with it.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/deadconn/deadconn/clientgo/e2e/kubeserver"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "kubeserver:", err)
		os.Exit(1)
	}
}

func run() error {
	var c kubeserver.Config
	flag.StringVar(&c.Dir, "dir", "", "keep the state in this folder; none: in a temporary one")
	flag.StringVar(&c.Host, "host", "127.0.0.1", "listen at this IP address")
	flag.IntVar(&c.Port, "port", 0, "listen at this port; 0: a free one")
	flag.Parse()
	if c.Dir == "" {
		dir, err := os.MkdirTemp("", "kubeserver")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		c.Dir = dir
	}
	if c.Port == 0 {
		ln, err := net.Listen("tcp", net.JoinHostPort(c.Host, "0"))
		if err != nil {
			return err
		}
		c.Port = ln.Addr().(*net.TCPAddr).Port
		ln.Close()
	}
	failed := make(chan error, 1)
	go func() { failed <- c.Run(context.Background()) }()
	config := filepath.Join(c.Dir, "kubeconfig")
	for !ready(c, config) {
		select {
		case err := <-failed:
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
	fmt.Fprintf(os.Stderr, "ready: KUBECONFIG=%s\n", config)
	if flag.NArg() == 0 {
		return <-failed
	}
	cmd := exec.Command(flag.Arg(0), flag.Args()[1:]...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+config)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run() // the server ends with the process
}

// ready asks the server whether it is, by the kubeconfig that it writes.
func ready(c kubeserver.Config, config string) bool {
	if err := c.WriteKubeconfig(config); err != nil {
		return false
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", config)
	if err != nil {
		return false
	}
	cfg.Timeout = 2 * time.Second
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return false
	}
	_, err = client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(context.Background())
	return err == nil
}
