package debug

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
)

// A timeline is a picture of the deaths: a lane for each cause with a mark for
// each death, and below them what became of the requests. Across it is in per
// cent of the width, so that it fits every screen; down in pixels.
type timeline struct {
	Height  float64
	Lanes   []lane
	Base    float64 // where the bars stand
	Bars    []bar
	Rescued int64
	Lost    int64
	Axis    float64
	Ticks   []tick
	Older   int   // deaths before it begins
	Stray   int64 // requests that were sent again, of connections that are not known
	Label   string
}

type lane struct {
	Cause  string
	Count  string
	LabelY float64
	Marks  []mark
}

type mark struct {
	X     string
	Y     float64
	Shape string // a path around the origin
	Lost  bool
	Title string
}

// A bar counts requests: rescued ones stand on the base, lost ones hang from it.
type bar struct {
	X, Width  string
	Y, Height float64
	Lost      bool
	Title     string
}

type tick struct {
	X, Anchor, Label string
}

// The layout, in pixels.
const (
	labelHeight = 18
	markHeight  = 18
	layerHeight = 8
	maxLayers   = 4
	laneGap     = 6
	barHeight   = 26
	hangHeight  = 16
	axisHeight  = 24
)

// shapes tell causes apart without colours. There is one for each Kind that
// kills, within 6 pixels of the origin.
var shapes = map[string]string{
	"closed":             "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",                                       // circle
	"reset":              "M0-6 6 0 0 6-6 0z",                                                          // diamond
	"timed_out":          "M-5-5.5H5L0 0 5 5.5H-5L0 0z",                                                // hourglass
	"eof":                "M-5.5-4.5h11L0 5.5z",                                                        // triangle, down
	"ping_lost":          "M-5.5-3-3-5.5 0-2.5 3-5.5 5.5-3 2.5 0 5.5 3 3 5.5 0 2.5-3 5.5-5.5 3-2.5 0z", // cross
	"silent":             "M-5.5 4.5h11L0-5.5z",                                                        // triangle, up
	"goaway":             "M0-6 5.7-1.9 3.5 4.9H-3.5L-5.7-1.9z",                                        // pentagon
	"goaway_unprocessed": "M-6 0-3-5.2H3L6 0 3 5.2H-3z",                                                // hexagon
	"goaway_calm":        "M-2-6h4v12h-4z",                                                             // upright bar
	"protocol":           "M0-6.5 1.6-2H6.2L2.5.8 3.8 5.3 0 2.6-3.8 5.3-2.5.8-6.2-2h4.6z",              // star
	"not_established":    "M-2-5.5h4v3.5h3.5v4H2v3.5h-4V2h-3.5v-4H-2z",                                 // plus
}

func shape(cause string) string {
	return cmp.Or(shapes[cause], "M-4.5-4.5h9v9h-9z") // square
}

// spans are what the picture may cover.
var spans = []time.Duration{
	time.Minute, 5 * time.Minute, 15 * time.Minute, time.Hour, 6 * time.Hour,
	24 * time.Hour, 7 * 24 * time.Hour, 30 * 24 * time.Hour,
}

// span returns the shortest that has four of five deaths in it, so that one
// from days ago does not squeeze those of this minute into a point.
func span(deaths []death, now time.Time) time.Duration {
	at := deaths[(len(deaths)*4-1)/5].Time
	for _, s := range spans {
		if now.Sub(at) <= s {
			return s
		}
	}
	return now.Sub(at)
}

// newTimeline draws deaths, the newest first. It is nil if there are none.
func newTimeline(deaths []death, now time.Time) *timeline {
	if len(deaths) == 0 {
		return nil
	}
	covers := span(deaths, now)
	begin := now.Add(-covers)
	t := &timeline{}
	byCause := make(map[string][]death)
	var causes []string
	bins := make(map[int]*[2]int64)
	for _, d := range slices.Backward(deaths) {
		if d.Time.Before(begin) {
			t.Older++
			continue
		}
		if byCause[d.Cause] == nil {
			causes = append(causes, d.Cause)
		}
		byCause[d.Cause] = append(byCause[d.Cause], d)
		b := int(across(d.Time, begin, covers))
		if bins[b] == nil {
			bins[b] = new([2]int64)
		}
		bins[b][0] += d.Rescued
		bins[b][1] += d.Lost
		t.Rescued += d.Rescued
		t.Lost += d.Lost
	}
	slices.SortFunc(causes, func(a, b string) int {
		return cmp.Or(cmp.Compare(len(byCause[b]), len(byCause[a])), cmp.Compare(a, b))
	})
	y := 0.0
	for _, cause := range causes {
		var l lane
		l, y = newLane(cause, byCause[cause], y, begin, covers)
		t.Lanes = append(t.Lanes, l)
	}
	t.Base = y + labelHeight + barHeight
	t.Bars = newBars(bins, t.Base)
	t.Axis = t.Base + hangHeight + labelHeight
	t.Height = t.Axis + axisHeight
	t.Ticks = newTicks(begin, now)
	t.Label = fmt.Sprintf("Time line of the last %s: %s, %s rescued, %d lost.", duration(covers.Seconds()),
		plural(int64(len(deaths)-t.Older), "death"), plural(t.Rescued, "request"), t.Lost)
	return t
}

func newLane(cause string, deaths []death, y float64, begin time.Time, covers time.Duration) (lane, float64) {
	l := lane{Cause: cause, Count: plural(int64(len(deaths)), "death"), LabelY: y + 12}
	top := y + labelHeight + markHeight/2
	layers := 1
	layer, last := 0, math.Inf(-1)
	for _, d := range deaths {
		x := across(d.Time, begin, covers)
		if x-last < 3 { // marks would touch
			layer = (layer + 1) % maxLayers
		} else {
			layer = 0
		}
		last = x
		layers = max(layers, layer+1)
		title := fmt.Sprintf("%s UTC: %s, %s", clock(d.Time), cause, cmp.Or(clean(d.Addr), clean(d.Remote)))
		if d.Rescued > 0 || d.Lost > 0 {
			title += fmt.Sprintf(": %d rescued, %d lost", d.Rescued, d.Lost)
		}
		l.Marks = append(l.Marks, mark{
			X: percent(x), Y: top + float64(layer)*layerHeight, Shape: shape(cause), Lost: d.Lost > 0, Title: title,
		})
	}
	return l, y + labelHeight + markHeight + float64(layers-1)*layerHeight + laneGap
}

func newBars(bins map[int]*[2]int64, base float64) []bar {
	var most int64
	for _, n := range bins {
		most = max(most, n[0], n[1])
	}
	var bars []bar
	for at := range 101 {
		n := bins[at]
		if n == nil {
			continue
		}
		for i, full := range []float64{barHeight, hangHeight} {
			if n[i] == 0 {
				continue
			}
			h := max(3, full*math.Sqrt(float64(n[i])/float64(most)))
			b := bar{X: percent(float64(at) + 0.05), Width: percent(0.9), Y: base - h, Height: h, Title: plural(n[i], "request") + " rescued"}
			if i == 1 {
				b.Y, b.Lost, b.Title = base, true, plural(n[i], "request")+" lost"
			}
			bars = append(bars, b)
		}
	}
	return bars
}

// across returns where t is, in per cent.
func across(t, begin time.Time, covers time.Duration) float64 {
	return 1 + 98*min(1, max(0, float64(t.Sub(begin))/float64(covers)))
}

func percent(x float64) string { return strconv.FormatFloat(x, 'f', 2, 64) + "%" }

// steps are between ticks.
var steps = []time.Duration{
	15 * time.Second, time.Minute, 5 * time.Minute, 15 * time.Minute, 30 * time.Minute, time.Hour,
	2 * time.Hour, 6 * time.Hour, 12 * time.Hour, 24 * time.Hour, 48 * time.Hour, 7 * 24 * time.Hour,
}

// newTicks marks round times, few enough for a phone, and now.
func newTicks(begin, now time.Time) []tick {
	covers := now.Sub(begin)
	step := covers / 4
	for _, s := range steps {
		if s >= covers/5 {
			step = s
			break
		}
	}
	format := "15:04"
	switch {
	case step < time.Minute:
		format = "15:04:05"
	case step >= 24*time.Hour:
		format = "Jan 2"
	case covers > 24*time.Hour:
		format = "Jan 2 15:04"
	}
	var ticks []tick
	for t := begin.Truncate(step).Add(step); t.Before(now); t = t.Add(step) {
		x := across(t, begin, covers)
		if x > 86 || x < 9 { // no room beside "now", or beyond the edge
			continue
		}
		ticks = append(ticks, tick{X: percent(x), Anchor: "middle", Label: t.Format(format)})
	}
	return append(ticks, tick{X: percent(99), Anchor: "end", Label: "now"})
}
