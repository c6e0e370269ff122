package promdeadconn

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/deadconn/deadconn"
)

// NewCollector returns a Collector of t's counters. The labels, which may be
// nil, are on all of its metrics; give each of several Transports its own,
// such as {"client": "billing"}. Registering a second Collector with the same
// labels fails with a [prometheus.AlreadyRegisteredError].
//
// Transports that share a Registry each tell of all its open connections.
func NewCollector(t *deadconn.Transport, labels prometheus.Labels) prometheus.Collector {
	desc := func(name, help string, variable ...string) *prometheus.Desc {
		return prometheus.NewDesc("deadconn_"+name, help, variable, labels)
	}
	return &collector{
		transport:    t,
		open:         desc("open_connections", "Connections that are open now."),
		dials:        desc("dials_total", "Connections that were dialed."),
		dialsMerged:  desc("dials_merged_total", "Dials that waited for another and were not made."),
		suspicions:   desc("suspicions_total", "Connections that fell under suspicion, so that new requests went elsewhere."),
		evictions:    desc("evictions_total", "Connections that were found dead and closed, by what they died of.", "cause"),
		retries:      desc("retries_total", "How often a request was sent again."),
		notRetried:   desc("requests_not_retried_total", "Requests that met a dead connection and could not be sent again."),
		resent:       desc("requests_resent_total", "Requests that were sent again, by what became of them: rescued or lost.", "outcome"),
		hooksDropped: desc("hooks_dropped_total", "Hook calls and log lines that were dropped, since a hook was slow."),
	}
}

type collector struct {
	transport *deadconn.Transport

	open, dials, dialsMerged, suspicions, evictions, retries, resent, notRetried, hooksDropped *prometheus.Desc
}

// Describe implements [prometheus.Collector].
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.open, c.dials, c.dialsMerged, c.suspicions, c.evictions, c.retries, c.resent, c.notRetried, c.hooksDropped} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	s := c.transport.Stats()
	counter := func(d *prometheus.Desc, n int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	ch <- prometheus.MustNewConstMetric(c.open, prometheus.GaugeValue, float64(s.Open))
	counter(c.dials, s.Dialed)
	counter(c.dialsMerged, s.DialsMerged)
	counter(c.suspicions, s.Suspected)
	for k, n := range s.EvictedBy {
		if k := deadconn.Kind(k); k.Dead() || n > 0 {
			counter(c.evictions, n, k.String())
		}
	}
	counter(c.retries, s.Retried)
	counter(c.resent, s.Rescued, "rescued")
	counter(c.resent, s.Lost, "lost")
	counter(c.notRetried, s.NotRetried)
	counter(c.hooksDropped, s.HooksDropped)
}
