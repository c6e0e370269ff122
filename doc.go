// Package deadconn keeps HTTP requests from failing because a connection in
// the client's pool has died.
//
// # The failure
//
// An [http.Transport] keeps its connections for the next request. When one
// dies in a way that the pool does not see, the pool goes on handing it out.
// The requests on it fail, with errors such as
//
//	write tcp 10.0.0.5:41822->10.0.0.1:443: use of closed network connection
//	http2: client connection lost
//	unexpected EOF
//
// though the server is up, or they hang until their deadlines, one after
// another. net/http sends few of them again: over HTTP/2 none that a write
// error, a reset or a lost PING ended, not even a GET (golang/go#39750).
//
// # The cure
//
// A [Transport] is an [http.RoundTripper]. When a request fails it asks what
// the error says about the connection ([Classify]). If the connection is dead
// it closes that one, and no other, waits until the HTTP layer has taken it
// out of its pool, and sends the request once more if that is safe.
//
// There are two ways to get one. [NewTransport] has connections of its own,
// and knows the most about them. [Wrap] protects a transport that somebody
// else has built, and may share; it changes nothing in it:
//
//	client.Transport = deadconn.Wrap(client.Transport) // a client that exists
//	cfg.Wrap(deadconn.Wrap)                            // client-go's rest.Config
//	client := &http.Client{Transport: deadconn.NewTransport()}
//
// Between the two, [Registry.DialContext] as the dialer of somebody else's
// transport gives Wrap most of what NewTransport knows.
//
// # What is sent again
//
// A request is sent twice at most, and the second time only if
//
//   - the server cannot have processed it, whatever its method: nothing of it
//     had been sent, or HTTP/2 says so; or it is idempotent ([IsIdempotent]:
//     GET, HEAD, OPTIONS, TRACE, PUT, DELETE, or an Idempotency-Key header),
//     or what [Options.Retryable] says instead;
//   - its body can be had again: it has none, it has a GetBody, or nothing
//     was read of it;
//   - its context is still good.
//
// A request that was not sent at all, because the pool held several dead
// connections, does not count as sent. If both attempts fail the error is a
// [*RetryError], else it is the very value that the base returned.
//
// Nothing is concluded from a timeout, a cancellation, an HTTP status, a stream
// error, a failed dial, or an error of the request's own body. A connection
// that the server ends as soon as it is up is taken for a refusal and not
// tried again; after ENHANCE_YOUR_CALM nothing is sent at once.
//
// A second PUT or DELETE may get another answer than the first would have
// got, such as 404 for what the first has deleted.
//
// # Silent death
//
// Some dead connections give no error. They are found by what is known of
// them: bytes that were written and not answered, what the kernel says of the
// path (Linux, TCP_INFO), a write that makes no progress, an HTTP/2 PING
// without an answer. With NewTransport on Linux, new requests avoid a
// connection whose segments are not acknowledged after about half a second,
// and after 2.6 seconds it is closed and its requests are sent again, if
// another can be opened: while the client's own link is down nothing is. PINGs
// find within 22 seconds what the kernel cannot see. A slow server, a silent
// stream and an upload that the server holds back are alive. [Health] has the
// durations; README.md says what is found where, and how fast.
//
// NewTransport also asks the socket, on Linux, whether the peer has closed it
// before it sends on a connection that was at rest, and merges the dials of
// requests that want a connection to one server at the same time.
//
// # Limits
//
// RoundTrip ends when the response's header is there: if the connection dies
// while the body is read, that is the reader's to handle. Upgraded connections
// (WebSocket, CONNECT) are not looked at. Behind a proxy, the kernel knows the
// path to the proxy only. Outside Linux no socket is asked, so that silent
// death is left to HTTP/2 PINGs and the bound on a stalled write. Wrap cannot
// prove that a request was not sent, save by the socket or the error, and does
// not merge dials.
package deadconn
