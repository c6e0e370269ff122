package bench

import (
	"bytes"
	"fmt"
	"image/color"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// A picture is drawn if its data are there.
type picture struct {
	file, alt string
	has       func(*Report) (*sheet, bool)
}

var pictures = []picture{
	{"blackhole.svg", "A time line for each contestant through a black hole: a mark for each request, answered, answered late, or failed",
		func(r *Report) (*sheet, bool) {
			return r.timeline("black hole", "A black hole on the pooled connection", "sent so many seconds after the fault", 5, 0)
		}},
	{"socketdeath.svg", "A time line for each contestant through four socket deaths: a mark for each request",
		func(r *Report) (*sheet, bool) {
			return r.timeline("socket closed underneath, load", "The socket is closed underneath, four times", "sent so many seconds after the first one", 0.4, 0, 0.4, 0.8, 1.2)
		}},
	{"stampede.svg", "Dials of each contestant when two connections to one server die under 300 requests", (*Report).stampede},
	{"cost.svg", "Microseconds a request on a healthy connection, for each contestant", (*Report).cost},
}

// Stand-ins, which svg replaces by colours that suit the page.
var (
	inkColor  = color.RGBA{1, 1, 1, 255}
	gridColor = color.RGBA{2, 2, 2, 255}
	okColor   = color.RGBA{3, 3, 3, 255}
	badColor  = color.RGBA{4, 4, 4, 255}
	postColor = color.RGBA{5, 5, 5, 255}
	barColor  = color.RGBA{6, 6, 6, 255}
	ourColor  = color.RGBA{7, 7, 7, 255}
)

const style = `<style>
svg{--ink:#1f2328;--grid:#d1d9e0;--ok:#1a7f37;--bad:#cf222e;--post:#9a6700;--bar:#818b98;--our:#0969da}
@media (prefers-color-scheme:dark){svg{--ink:#f0f6fc;--grid:#3d444d;--ok:#3fb950;--bad:#f85149;--post:#d29922;--bar:#9198a1;--our:#4493f8}}
</style>
`

var (
	fontFamily = regexp.MustCompile(`font-family:[^;"]*`)
	textStart  = regexp.MustCompile(`<text x="([0-9.]+)"([^>]*)>([^<]*)</text>`)
	fontSize   = regexp.MustCompile(`font-size:([0-9.]+)px`)
)

// strokes are lines through a mark's middle, thick enough for small screens.
type strokes []vg.Point

func (s strokes) DrawGlyph(c *draw.Canvas, sty draw.GlyphStyle, at vg.Point) {
	c.SetLineStyle(draw.LineStyle{Color: sty.Color, Width: 1.1})
	for _, d := range s {
		d = d.Scale(sty.Radius)
		var p vg.Path
		p.Move(at.Sub(d))
		p.Line(at.Add(d))
		c.Stroke(p)
	}
}

var (
	cross = strokes{{X: 0.8, Y: 0.8}, {X: 0.8, Y: -0.8}}
	plus  = strokes{{X: 1}, {Y: 1}}
)

// ticks are labelled marks every step.
func ticks(from, to, step float64) plot.ConstantTicks {
	var t plot.ConstantTicks
	for i := 0; from+float64(i)*step <= to; i++ {
		v := from + float64(i)*step
		t = append(t, plot.Tick{Value: v, Label: fmt.Sprintf("%.4g", v)})
	}
	return t
}

// A sheet is a plot with a legend above it.
type sheet struct {
	title  string
	plot   *plot.Plot
	legend plot.Legend
	lines  int // of the legend
	height vg.Length
}

const sheetWidth vg.Length = 360 // points

// roomy is how much wider than shown text is laid out, since gonum measures it
// in Liberation Sans and the reader's font may be as wide as DejaVu Sans.
const roomy = 1.17

func size(pt float64) font.Font {
	return font.Font{Typeface: "Liberation", Variant: "Sans", Size: vg.Points(pt * roomy)}
}

func newPlot() *plot.Plot {
	p := plot.New()
	p.BackgroundColor = color.Transparent
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Color = gridColor
		a.Tick.Color = gridColor
		a.Tick.Label.Color = inkColor
		a.Tick.Label.Font = size(10)
		a.Label.TextStyle.Color = inkColor
		a.Label.TextStyle.Font = size(9.5)
	}
	return p
}

// names labels the y axis, the first contestant on top, and returns where
// each one is.
func names(p *plot.Plot, who []Contestant) func(i int) float64 {
	var s []string
	for _, c := range slices.Backward(who) {
		s = append(s, c.Label())
	}
	p.NominalY(s...)
	p.Y.Min, p.Y.Max = -0.6, float64(len(who))-0.4
	p.Y.Tick.Length = 0
	p.Y.LineStyle.Width = 0
	return func(i int) float64 { return float64(len(who) - 1 - i) }
}

func (r *Report) timeline(row, title, axis string, step float64, faults ...float64) (*sheet, bool) {
	who := r.contestants()
	p := newPlot()
	at := names(p, who)
	p.X.Label.Text = axis
	marks := []struct {
		name  string
		shape draw.GlyphDrawer
		color color.Color
		r     float64
		pts   plotter.XYs
	}{
		{"answered", draw.CircleGlyph{}, okColor, 1.9, nil},
		{"answered, 0.5 s or more late", draw.RingGlyph{}, okColor, 2.2, nil},
		{"failed", cross, badColor, 2.4, nil},
		{"a POST failed", plus, postColor, 2.4, nil},
	}
	any := false
	for i, c := range who {
		for _, res := range r.cell(row, c.Name) {
			for _, q := range res.Requests {
				any = true
				m := 0
				switch {
				case q.Err != "" && !idempotent(q.Kind):
					m = 3
				case q.Err != "":
					m = 2
				case q.Took >= 500e6:
					m = 1
				}
				if q.At.Seconds() < -2 {
					continue
				}
				marks[m].pts = append(marks[m].pts, plotter.XY{X: q.At.Seconds(), Y: at(i)})
			}
		}
	}
	if !any {
		return nil, false
	}
	s := &sheet{title: title, plot: p, legend: newLegend(), height: vg.Points(float64(100 + 18*len(who)))}
	for _, x := range faults {
		l, err := plotter.NewLine(plotter.XYs{{X: x, Y: p.Y.Min}, {X: x, Y: p.Y.Max}})
		if err != nil {
			return nil, false
		}
		l.Color = badColor
		l.Dashes = []vg.Length{2, 2}
		p.Add(l)
	}
	p.X.Tick.Marker = ticks(0, 30, step)
	for _, m := range marks {
		if len(m.pts) == 0 {
			continue
		}
		sc, err := plotter.NewScatter(m.pts)
		if err != nil {
			return nil, false
		}
		sc.GlyphStyle = draw.GlyphStyle{Color: m.color, Radius: vg.Points(m.r), Shape: m.shape}
		p.Add(sc)
		s.legend.Add(m.name, sc)
		s.lines++
	}
	return s, true
}

func newLegend() plot.Legend {
	l := plot.NewLegend()
	l.TextStyle.Color = inkColor
	l.TextStyle.Font = size(9.5)
	l.Top, l.Left = true, true
	l.ThumbnailWidth = vg.Points(12)
	l.Padding = vg.Points(1.5)
	return l
}

// bars draws a bar for each contestant, ours in a colour of their own.
func (r *Report) bars(title, axis string, step float64, value func(Contestant) float64, label func(Contestant) string) *sheet {
	who := r.contestants()
	p := newPlot()
	at := names(p, who)
	p.X.Label.Text = axis
	p.X.Min = 0
	var labels plotter.XYLabels
	for i, c := range who {
		v := value(c)
		bar, err := plotter.NewBarChart(plotter.Values{v}, vg.Points(10))
		if err != nil {
			continue
		}
		bar.Horizontal = true
		bar.XMin = at(i)
		bar.LineStyle.Width = 0
		bar.Color = barColor
		if c.Name == Ours || c.Name == Wrap {
			bar.Color = ourColor
		}
		p.Add(bar)
		labels.XYs = append(labels.XYs, plotter.XY{X: v, Y: at(i)})
		labels.Labels = append(labels.Labels, label(c))
		p.X.Max = max(p.X.Max, v*1.6)
	}
	if l, err := plotter.NewLabels(labels); err == nil {
		for i := range l.TextStyle {
			l.TextStyle[i].Color = inkColor
			l.TextStyle[i].Font = size(9.5)
			l.TextStyle[i].YAlign = draw.YCenter
		}
		l.Offset = vg.Point{X: 4, Y: 2.5}
		p.Add(l)
	}
	p.Y.Min, p.Y.Max = -0.6, float64(len(who))-0.4
	p.X.Tick.Marker = ticks(0, p.X.Max, step)
	return &sheet{title: title, plot: p, height: vg.Points(float64(62 + 18*len(who)))}
}

func (r *Report) stampede() (*sheet, bool) {
	const row = "dies under 300 requests"
	if len(r.cell(row, Ours)) == 0 {
		return nil, false
	}
	return r.bars("Two connections die under 300 requests", "dials to the one server", 100,
		func(c Contestant) float64 { return r.cell(row, c.Name).med(dials) },
		func(c Contestant) string {
			x := r.cell(row, c.Name)
			s := count(x.med(dials)) + " dials"
			if x.max(failed) > 0 {
				s += ", " + x.number(failed, count) + " lost"
			}
			return s
		}), true
}

func (r *Report) cost() (*sheet, bool) {
	if len(r.Costs) == 0 {
		return nil, false
	}
	of := func(c Contestant) Cost {
		for _, x := range r.Costs {
			if x.Contestant == c.Name && x.Kind == get {
				return x
			}
		}
		return Cost{US: []float64{0}}
	}
	return r.bars("A GET on a healthy connection", "µs a request: median (lowest to highest)", 20,
		func(c Contestant) float64 { return median(of(c).US) },
		func(c Contestant) string {
			x := of(c).US
			return fmt.Sprintf("%.0f (%.0f to %.0f)", median(x), x[0], x[len(x)-1])
		}), true
}

// draw writes the pictures to dir.
func (r *Report) draw(dir string) error {
	for _, pic := range pictures {
		s, ok := pic.has(r)
		if !ok {
			continue
		}
		b, err := s.svg(pic.alt)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, pic.file), b, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// svg renders the sheet. gonum's canvas knows fixed colours only, so that the
// stand-ins are replaced by variables that follow the page's scheme.
func (s *sheet) svg(alt string) ([]byte, error) {
	canvas := vgsvg.New(sheetWidth, s.height)
	c := draw.New(canvas)
	title := draw.TextStyle{Color: inkColor, Font: size(12), Handler: plot.DefaultTextHandler, YAlign: draw.YTop}
	c.FillText(title, vg.Point{X: 4, Y: s.height - 2}, s.title)
	top := vg.Points(20)
	if s.lines > 0 {
		s.legend.Draw(draw.Crop(c, 4, 0, 0, -top))
		top += vg.Points(float64(14*s.lines) + 3)
	}
	s.plot.Draw(draw.Crop(c, 2, -8, 2, -top))
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, err
	}
	svg := b.String()
	for i, v := range []string{"ink", "grid", "ok", "bad", "post", "bar", "our"} {
		svg = strings.ReplaceAll(svg, fmt.Sprintf("#%02x%02[1]x%02[1]x", i+1), "var(--"+v+")")
	}
	svg = textStart.ReplaceAllStringFunc(svg, func(m string) string {
		part := textStart.FindStringSubmatch(m)
		name := part[3]
		if !slices.ContainsFunc(Contestants, func(c Contestant) bool { return c.Label() == name }) {
			return m
		}
		x, err := strconv.ParseFloat(part[1], 64)
		if err != nil {
			return m
		}
		x += s.plot.Y.Tick.Label.Width(name).Points() // its right edge stays where it was laid out
		return fmt.Sprintf("<text x=\"%.2f\" text-anchor=\"end\"%s>%s</text>", x, part[2], name)
	})
	svg = fontSize.ReplaceAllStringFunc(svg, func(m string) string {
		v, err := strconv.ParseFloat(fontSize.FindStringSubmatch(m)[1], 64)
		if err != nil {
			return m
		}
		return fmt.Sprintf("font-size:%.2fpx", v/roomy)
	})
	svg = fontFamily.ReplaceAllString(svg, "font-family:'Helvetica Neue',Arial,'Liberation Sans',sans-serif")
	if i := strings.Index(svg, "<svg"); i >= 0 {
		if j := strings.IndexByte(svg[i:], '>'); j >= 0 {
			svg = svg[:i+j+1] + "\n<title>" + alt + "</title>\n" + style + svg[i+j+1:]
		}
	}
	return []byte(svg), nil
}
