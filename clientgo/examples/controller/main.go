// Command controller is a small, complete controller that survives dead
// connections to its API server: one of several replicas leads, and keeps on
// each ConfigMap that asks for it, by the label "example.com/count", an
// annotation with the number of its entries.
//
// Against a cluster:
//
//	go run ./examples/controller -kubeconfig ~/.kube/config
//
// Against a kube-apiserver of its own, which takes minutes to build, once:
//
//	cd e2e && go run ./cmd/kubeserver -- go run -C .. ./examples/controller -demo 10s
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/clientgo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/util/workqueue"
)

const (
	label      = "example.com/count"
	annotation = "example.com/entries"
	manager    = "count-controller"
)

func main() {
	kubeconfig := flag.String("kubeconfig", os.Getenv("KUBECONFIG"), "kubeconfig file; none: in a cluster")
	namespace := flag.String("namespace", "default", "namespace of the leader's Lease")
	demo := flag.Duration("demo", 0, "make a ConfigMap, wait until it is counted, and stop; after this time, fail")
	flag.Parse()
	if err := run(*kubeconfig, *namespace, *demo); err != nil {
		slog.Error("controller", "err", err)
		os.Exit(1)
	}
}

func run(kubeconfig, namespace string, demo time.Duration) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	cfg, err := config(kubeconfig)
	if err != nil {
		return err
	}
	// The one line that this is about. It says what happens; without options
	// it is clientgo.Protect(cfg).
	clientgo.Protect(cfg, deadconn.Options{Logger: slog.Default(), Retryable: retryable})
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}

	c := newController(client)
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Name: manager, Namespace: namespace},
			Client:     client.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: identity()},
		},
		LeaseDuration:   15 * time.Second,
		RenewDeadline:   10 * time.Second,
		RetryPeriod:     2 * time.Second,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: c.run,
			OnStoppedLeading: func() { slog.Info("not leading any more") },
		},
	})
	if err != nil {
		return err
	}
	if demo == 0 {
		elector.Run(ctx) // until the Lease is lost: then the process ends, and is started again
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, demo)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- show(ctx, client)
		cancel()
	}()
	elector.Run(ctx)
	return <-done
}

// retryable narrows what is sent again: a DELETE that may have run is not,
// since this controller wants to know whether it was its own. A server-side
// apply by one field manager has the same effect twice, so it is.
func retryable(r *http.Request) bool {
	switch r.Method {
	case http.MethodDelete:
		return false
	case http.MethodPatch:
		return r.Header.Get("Content-Type") == string(types.ApplyYAMLPatchType)
	}
	return deadconn.IsIdempotent(r)
}

func config(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		return rest.InClusterConfig()
	}
	return clientcmd.BuildConfigFromFlags("", kubeconfig)
}

func identity() string {
	host, _ := os.Hostname()
	return host + "-" + strconv.Itoa(os.Getpid())
}

type controller struct {
	client   kubernetes.Interface
	informer cache.SharedIndexInformer
	queue    workqueue.TypedRateLimitingInterface[cache.ObjectName]
}

func newController(client kubernetes.Interface) *controller {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 10*time.Minute,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = label }))
	return &controller{
		client:   client,
		informer: factory.Core().V1().ConfigMaps().Informer(),
		queue:    workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[cache.ObjectName]()),
	}
}

// run works until ctx ends.
func (c *controller) run(ctx context.Context) {
	slog.Info("leading")
	defer c.queue.ShutDown()
	if _, err := c.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    c.enqueue,
		UpdateFunc: func(_, o any) { c.enqueue(o) },
	}); err != nil {
		slog.Error("informer", "err", err)
		return
	}
	go c.informer.RunWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), c.informer.HasSynced) {
		return
	}
	context.AfterFunc(ctx, c.queue.ShutDown)
	for {
		key, shutdown := c.queue.Get()
		if shutdown {
			return
		}
		if err := c.reconcile(ctx, key); err != nil {
			slog.Warn("trying again later", "object", key.String(), "err", err)
			c.queue.AddRateLimited(key)
		} else {
			c.queue.Forget(key)
		}
		c.queue.Done(key)
	}
}

func (c *controller) enqueue(o any) {
	if key, err := cache.ObjectToName(o); err == nil {
		c.queue.Add(key)
	}
}

func (c *controller) reconcile(ctx context.Context, key cache.ObjectName) error {
	o, exists, err := c.informer.GetStore().GetByKey(key.String())
	if err != nil || !exists {
		return err
	}
	cm := o.(*corev1.ConfigMap)
	want := strconv.Itoa(len(cm.Data) + len(cm.BinaryData))
	if cm.Annotations[annotation] == want {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{"name": key.Name, "annotations": map[string]string{annotation: want}},
	})
	if err != nil {
		return err
	}
	force := true
	_, err = c.client.CoreV1().ConfigMaps(key.Namespace).Patch(ctx, key.Name, types.ApplyYAMLPatchType, patch,
		metav1.PatchOptions{FieldManager: manager, Force: &force})
	if apierrors.IsNotFound(err) {
		return nil // gone meanwhile
	}
	return err
}

// show makes a ConfigMap and waits until the controller has counted it.
func show(ctx context.Context, client kubernetes.Interface) error {
	maps := client.CoreV1().ConfigMaps("default")
	cm, err := maps.Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "demo-", Labels: map[string]string{label: "yes"}},
		Data:       map[string]string{"a": "1", "b": "2"},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	for {
		now, err := maps.Get(ctx, cm.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if n := now.Annotations[annotation]; n != "" {
			fmt.Printf("%s has %s entries, the controller says\n", cm.Name, n)
			return maps.Delete(ctx, cm.Name, metav1.DeleteOptions{})
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
