// Package promdeadconn gives Prometheus the counters of a
// [deadconn.Transport].
//
//	t := deadconn.NewTransport()
//	prometheus.MustRegister(promdeadconn.NewCollector(t, nil))
//
// A scrape reads t.Stats, which does not stop traffic and costs the same for
// one connection as for a million. Requests cost nothing. The metrics:
//
//	deadconn_open_connections               gauge    connections that the Registry has open
//	deadconn_dials_total                    counter  connections that were dialed
//	deadconn_dials_merged_total             counter  dials that waited for another and were not made
//	deadconn_suspicions_total               counter  connections that new requests avoided
//	deadconn_evictions_total{cause}         counter  connections found dead and closed
//	deadconn_retries_total                  counter  how often a request was sent again
//	deadconn_requests_resent_total{outcome} counter  requests that were sent again, "rescued" or "lost"
//	deadconn_requests_not_retried_total     counter  requests that met a dead connection and could not be sent again
//	deadconn_hooks_dropped_total            counter  hook calls and log lines dropped
//
// There is no label of hosts. cause is a [deadconn.Kind]'s name: 11 causes are
// always there, with 0 if nothing has happened, so that the first death shows
// in a rate.
//
// In this folder of the repository are a dashboard for Grafana, grafana.json,
// and alert rules, alerts.yml.
package promdeadconn
