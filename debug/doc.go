// Package debug has a page about a deadconn.Transport, in the manner of
// net/http/pprof and expvar: which connections died, of what, what was done
// about it, and how those that are open are doing.
//
//	mux.Handle("/debug/deadconn", debug.Handler(t))
//
// It is never registered by itself. It tells addresses and error texts, so
// put it where only operators get at it, such as the port that has pprof. It
// tells no header, body, path or query of any request.
//
// The page is HTML that needs no JavaScript and loads nothing. With
// ?format=json it is one JSON document with the same data. Durations are
// numbers of seconds, times are RFC 3339 in UTC. Fields may be added;
// those here keep their names and meaning:
//
//	version                   1
//	time                      when it was made
//	status                    "quiet", "deaths", "suspect" or "lost", see below
//	summary                   the same in a sentence
//	counters                  deadconn.Stats, in its own JSON
//	connections
//	  total                   open connections that were dialed for the Transport
//	  by_state                how many in each deadconn.ConnState, those with none left out
//	  list                    the first 200, those in trouble first, then the newest
//	    addr                  host:port as dialed, a proxy's if there is one
//	    local, remote         addresses
//	    protocol              "h2", "http/1.1", or "" if not known
//	    tls                   whether TLS is known to be on it
//	    state                 a deadconn.ConnState
//	    age_seconds
//	    since_read_seconds    null: nothing was read
//	    unanswered_seconds    null: all that was written was answered
//	    bytes_read            on the wire, TLS included
//	    bytes_written
//	    path                  the kernel's account; null: not known
//	      rtt_seconds
//	      unacked             segments sent and not acknowledged
//	      retransmits         timeouts in a row
//	      probes              probes in a row
//	      since_ack_seconds
//	deaths                    the last 100, the newest first
//	  time
//	  cause                   the name of a deadconn.Kind
//	  error                   what said so
//	  addr, local, remote, protocol, tls
//	  age_seconds             null: not known
//	  since_read_seconds      null: not known, or nothing was read
//	  unanswered_seconds      null: all that was written was answered
//	  writing_seconds         how long a write was stuck; null: none was
//	  bytes_read, bytes_written, path
//	  rescued                 requests that were on it and succeeded elsewhere
//	  lost                    and those that failed there too
//
// The status is what matters most: "lost" if a death of the last 15 minutes
// has lost requests, else "suspect" if a connection looks dead now, else
// "deaths" if any died in the last 15 minutes, else "quiet". Texts of more
// than 1000 bytes are cut.
package debug
