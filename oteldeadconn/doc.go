// Package oteldeadconn tells OpenTelemetry what a [deadconn.Transport] does:
// as metrics, and as events on the spans of the requests concerned.
//
//	t := deadconn.Options{Hooks: oteldeadconn.NewHooks()}.NewTransport()
//	reg, err := oteldeadconn.Observe(t) // what is open now
//	client := &http.Client{Transport: otelhttp.NewTransport(t)}
//
// [NewHooks] feeds the counters, the histogram and the span events; [Observe]
// adds what is read from the Transport when metrics are collected. Either works
// alone. A request that meets no dead connection costs nothing.
//
// # Metrics
//
// By the HTTP semantic conventions, version 1.43.0, where they have one
// (development status there):
//
//	http.client.open_connections      up-down counter  {connection}  http.connection.state *
//	http.client.connection.duration   histogram        s             *
//	deadconn.evictions                counter          {connection}  deadconn.cause *
//	deadconn.suspicions               counter          {connection}  *
//	deadconn.retries                  counter          {request}     deadconn.cause deadconn.outcome *
//	deadconn.dials.merged             counter          {dial}        *
//	deadconn.hooks.dropped            counter          {call}
//
// The star stands for server.address and server.port, and in the first three
// for network.protocol.version if it is known. They say what was dialed: the
// proxy, if there is one; and the peer's address for a connection that a
// wrapped transport dialed by itself. For deadconn.retries they are those of
// the request's URL, without a port if the URL has none. There are no more
// different servers than [WithServerLimit] says; what comes later goes by
// server.address "_other" and without a port.
//
// deadconn.cause is a [deadconn.Kind]'s name. deadconn.outcome is "rescued",
// "lost" (sent again, and failed again) or "not_retried". A connection is
// "active" if something was read or written within the last second, or if it
// is suspect, and otherwise "idle". A connection known to be dead is neither,
// and is not counted.
//
// Those of deadconn.Hooks that tell of connections are dropped when too many
// wait. deadconn.hooks.dropped says how many; evictions, suspicions, merged
// dials and durations may be short by as much. deadconn.retries is exact.
//
// # Span events
//
// On the span of the request's context, if it is recording:
//
//	deadconn.evicted   deadconn.cause                    its connection was found dead and closed
//	deadconn.retried   deadconn.cause deadconn.unsent    it is sent again
//
// Both are added when the request is about to be sent again; one that may not
// be sent again fails without an event. deadconn.unsent says that nothing of
// the request had been sent before. With
// otelhttp.NewTransport around the Transport that is the request's own client
// span; with otelhttp inside of deadconn.Wrap it is the span that the caller
// had, since otelhttp's has ended by then.
//
// Nothing of a request but its host gets into a metric, and nothing at all
// into an event: no header, body, path, query or credential, nor an error's
// text.
package oteldeadconn
