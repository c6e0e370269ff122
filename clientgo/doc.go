// Package clientgo makes Kubernetes clients survive dead connections: one call
// between the making of a rest.Config and the making of its clients.
//
//	cfg, err := rest.InClusterConfig()
//	...
//	clientgo.Protect(cfg)
//	client, err := kubernetes.NewForConfig(cfg)
//
// A connection to the API server that dies silently (a NAT entry that is gone,
// a node that vanished, a load balancer that forgot) costs client-go 30 to 45
// seconds of everything: leases are lost, informers are silent. With Protect
// the path is found dead after about 2.6 seconds on Linux, new requests avoid
// it after half a second, and requests that may be sent again are.
//
// # What is sent again
//
// A request whose connection died is sent once more, on another connection, if
// the server cannot have processed it, or if it is idempotent: GET, HEAD, PUT,
// DELETE. POST (create, eviction, binding, token requests) and PATCH are not,
// unless it is known that nothing was sent. In Kubernetes terms:
//
//   - PUT (Update, UpdateStatus, a Lease's renewal) carries a resourceVersion.
//     If the first one was processed, the second is answered 409 Conflict, for
//     the success of the first. Callers deal with conflicts anyway: get, and
//     decide again. Leader election does so at its next try. A PUT without a
//     resourceVersion, where the resource allows that, is done twice, to the
//     same end.
//   - DELETE of what the first one has removed is answered 404 NotFound, which
//     callers take for success; with a precondition on a uid, an object of that
//     name made in between is safe (409). Without one, it would be deleted:
//     set Preconditions, or narrow what is sent again.
//   - PATCH is not sent again. A server-side apply could be: it has the same
//     effect twice, for the same field manager. A JSON or merge patch need not
//     (append to a list). See the example of Protect with Retryable.
//   - POST is not sent again: the second create would be answered 409
//     AlreadyExists, and with generateName it would make a second object.
//   - exec, attach, port-forward and every other upgrade are never sent again.
//
// Watches end when their connection dies, as ever, and reflectors resume them
// from the last resourceVersion: nothing is missed.
//
// To narrow it, give Retryable:
//
//	clientgo.Protect(cfg, deadconn.Options{
//		Retryable: func(r *http.Request) bool { return r.Method == http.MethodGet },
//	})
package clientgo
