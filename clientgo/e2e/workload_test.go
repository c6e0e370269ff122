//go:build linux

package e2e

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/deadconn/deadconn"
	"github.com/deadconn/deadconn/clientgo"
	"github.com/deadconn/deadconn/internal/faultnet"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// ways are what is compared. All of them run at the same time, each over its
// own connections.
var ways = []struct {
	name    string
	protect func(*rest.Config)
}{
	{"client-go", func(*rest.Config) {}},
	{"Protect", func(cfg *rest.Config) { clientgo.Protect(cfg) }},
	{"Wrap alone", func(cfg *rest.Config) { cfg.Wrap(deadconn.Wrap) }},
}

// A workload is what a kubelet and a controller do all day, by one client: an
// informer, a leader election, a Lease renewed each second, and creates that
// must not happen twice.
type workload struct {
	t         *testing.T
	way       string
	namespace string
	client    *kubernetes.Clientset
	dialer    dialer

	mu            sync.Mutex
	renewed       []time.Time          // guarded by mu
	seen          map[string]time.Time // guarded by mu; by the ConfigMap's name
	failures      []error              // guarded by mu; calls other than creates
	created       time.Time            // guarded by mu; when the last create began
	failedCreates int                  // guarded by mu
	leading       bool                 // guarded by mu
	lost          int                  // guarded by mu; leaderships

	stopCreates context.CancelFunc
	creates     sync.WaitGroup
	stop        context.CancelFunc
	wg          sync.WaitGroup
}

// dialer remembers connections. Each ends as a *net.TCPConn of the lab.
type dialer struct {
	lab    func(context.Context, string, string) (net.Conn, error)
	buffer int // of the socket, for sending; 0: the kernel's choice

	mu    sync.Mutex
	conns []*faultnet.Conn // guarded by mu
	dials int              // guarded by mu
}

func (d *dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	d.mu.Lock()
	d.dials++
	d.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second) // client-go's
	defer cancel()
	raw, err := d.lab(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	tcp := raw.(*net.TCPConn)
	tcp.SetKeepAlivePeriod(30 * time.Second) // client-go's
	if d.buffer > 0 {
		tcp.SetWriteBuffer(d.buffer)
	}
	c := faultnet.NewConn(raw)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.conns = append(d.conns, c)
	return c, nil
}

// live returns the connections that their user has not closed.
func (d *dialer) live() (live []*faultnet.Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.conns {
		if !c.Closed() {
			live = append(live, c)
		}
	}
	return live
}

func (d *dialer) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dials
}

const (
	renewal  = time.Second
	creation = 500 * time.Millisecond
	patience = 10 * time.Second // of a call; a kubelet's
)

// startWorkload starts it and waits until it runs well.
func (c *cluster) startWorkload(way string, protect func(*rest.Config), namespace string, sendBuffer, payload int) *workload {
	w := &workload{t: c.t, way: way, namespace: namespace, seen: make(map[string]time.Time)}
	w.dialer.lab, w.dialer.buffer = c.lab.Dial, sendBuffer
	cfg := c.config()
	cfg.Dial = w.dialer.DialContext
	protect(cfg)
	var err error
	if w.client, err = kubernetes.NewForConfig(cfg); err != nil {
		c.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	creating, stopCreates := context.WithCancel(ctx)
	w.stopCreates = func() {
		stopCreates()
		w.creates.Wait()
	}
	w.stop = sync.OnceFunc(func() {
		stop()
		w.wg.Wait()
		w.creates.Wait()
	})
	c.t.Cleanup(w.stop)

	factory := informers.NewSharedInformerFactoryWithOptions(w.client, 0, informers.WithNamespace(namespace))
	informer := factory.Core().V1().ConfigMaps().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: w.added}); err != nil {
		c.t.Fatal(err)
	}
	w.wg.Go(func() { informer.RunWithContext(ctx) })
	w.wg.Go(func() { w.lead(ctx) })
	w.wg.Go(func() { w.renew(ctx) })
	w.creates.Go(func() { w.create(creating, payload) })

	for deadline := time.Now().Add(30 * time.Second); !informer.HasSynced() || !w.well(time.Time{}); {
		if time.Now().After(deadline) {
			c.t.Fatalf("%s: the workload does not get going: %v", way, w.failures)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return w
}

// added is the informer's handler: of objects that are new to it.
func (w *workload) added(o any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, ok := w.seen[o.(*corev1.ConfigMap).Name]; !ok {
		w.seen[o.(*corev1.ConfigMap).Name] = time.Now()
	}
}

func (w *workload) failed(ctx context.Context, what string, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures = append(w.failures, fmt.Errorf("%s: %w", what, err))
}

// renew is the kubelet's heartbeat: an update each second, tried again 5 times
// at once if it fails.
func (w *workload) renew(ctx context.Context) {
	leases := w.client.CoordinationV1().Leases(w.namespace)
	name := "node-" + id(w.way)
	var lease *coordinationv1.Lease
	once := func() error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		now := metav1.NowMicro()
		var err error
		if lease == nil {
			if lease, err = leases.Get(ctx, name, metav1.GetOptions{}); err != nil {
				lease = nil
				_, err = leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
				return err
			}
		}
		next := lease.DeepCopy()
		next.Spec.RenewTime = &now
		updated, err := leases.Update(ctx, next, metav1.UpdateOptions{})
		if err != nil {
			lease = nil // get it again
			return err
		}
		lease = updated
		w.mu.Lock()
		defer w.mu.Unlock()
		w.renewed = append(w.renewed, time.Now())
		return nil
	}
	for tick := time.NewTicker(renewal); ; {
		for range 5 {
			err := once()
			w.failed(ctx, "renew", err)
			if err == nil || ctx.Err() != nil {
				break
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// create makes ConfigMaps with generated names, each for one operation.
func (w *workload) create(ctx context.Context, payload int) {
	data := map[string]string{"payload": string(make([]byte, payload))}
	if payload == 0 {
		data = nil
	}
	tick := time.NewTicker(creation)
	defer tick.Stop()
	for n := 0; ; n++ {
		w.creates.Go(func() {
			call, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			w.mu.Lock()
			w.created = time.Now()
			w.mu.Unlock()
			_, err := w.client.CoreV1().ConfigMaps(w.namespace).Create(call, &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{GenerateName: "op-", Labels: map[string]string{"way": id(w.way), "op": fmt.Sprint(n)}},
				Data:       data,
			}, metav1.CreateOptions{})
			if err != nil && ctx.Err() == nil {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.failedCreates++
			}
		})
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// lead runs for leader again and again.
func (w *workload) lead(ctx context.Context) {
	for ctx.Err() == nil {
		e, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: &lock{Interface: &resourcelock.LeaseLock{
				LeaseMeta:  metav1.ObjectMeta{Name: "leader-" + id(w.way), Namespace: w.namespace},
				Client:     w.client.CoordinationV1(),
				LockConfig: resourcelock.ResourceLockConfig{Identity: w.way},
			}, w: w},
			LeaseDuration: 15 * time.Second,
			RenewDeadline: 10 * time.Second,
			RetryPeriod:   2 * time.Second,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(context.Context) { w.setLeading(ctx, true) },
				OnStoppedLeading: func() { w.setLeading(ctx, false) },
			},
		})
		if err != nil {
			panic(err)
		}
		e.Run(ctx)
	}
}

func (w *workload) setLeading(ctx context.Context, now bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.leading && !now && ctx.Err() == nil {
		w.lost++
	}
	w.leading = now
}

// lock counts the failures of leader election, which only logs them.
type lock struct {
	resourcelock.Interface
	w *workload
}

func (l *lock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Update(ctx, r)
	l.w.failed(context.Background(), "leader election", err)
	return err
}

// awaitPause returns in the middle between two creates, so that no way has the
// bad luck of one that is under way.
func (w *workload) awaitPause() {
	for {
		w.mu.Lock()
		since := time.Since(w.created)
		w.mu.Unlock()
		if since > creation*2/5 && since < creation/2 {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// well reports whether everything has worked since then.
func (w *workload) well(since time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := len(w.renewed)
	return w.leading && n > 0 && w.renewed[n-1].After(since)
}

// gap returns the longest time without a renewal after since.
func (w *workload) gap(since time.Time) (gap time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := time.Time{}
	for _, at := range append(w.renewed, time.Now()) {
		if at.After(since) && !last.IsZero() {
			gap = max(gap, at.Sub(last))
		}
		last = at
	}
	return gap
}

// staleness returns how long after its acknowledgement the informer learned
// of a write, for the latest, and how many it knows nothing of.
func (w *workload) staleness(acked map[string]time.Time) (staleness time.Duration, unseen int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	for name, at := range acked {
		seen, ok := w.seen[name]
		if !ok {
			unseen++
			seen = now
		}
		staleness = max(staleness, seen.Sub(at))
	}
	return staleness, unseen
}

// id makes a label of a way's name.
func id(way string) string {
	switch way {
	case "Wrap alone":
		return "wrap"
	case "Protect":
		return "protect"
	}
	return "plain"
}
