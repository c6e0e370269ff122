package debug

import (
	"bytes"
	"fmt"
	"image"
	"image/png"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/deadconn/deadconn/internal/faultnet"
)

// The page in a real browser: narrow and wide, light and dark, with 0, 5 and
// 1000 connections. The pictures go to DEADCONN_PICTURES, if that is set.
func TestPictures(t *testing.T) {
	b := newBrowser(t)
	dir := os.Getenv("DEADCONN_PICTURES")
	if dir == "" {
		dir = t.TempDir()
	}
	mux := http.NewServeMux()
	mux.Handle("/0", Handler(newRig(t, "orders.test").tr))
	mux.Handle("/5", illustrated(t))
	mux.Handle("/1000", crowded(t))
	s := httptest.NewServer(mux)
	defer s.Close()

	for _, conns := range []int{0, 5, 1000} {
		for width, name := range map[int]string{360: "narrow", 1180: "wide"} {
			for _, scheme := range []string{"light", "dark"} {
				name := fmt.Sprintf("%d-%s-%s", conns, name, scheme)
				t.Run(name, func(t *testing.T) {
					b.t = t
					url := fmt.Sprintf("%s/%d", s.URL, conns)
					b.open(url, width, 800, scheme)
					var got struct {
						Width, Height, Rows, Marks int
						Outside                    []string
						Background                 string
					}
					b.ask(measure, &got)
					if got.Width > width {
						t.Errorf("it is %d pixels wide in a window of %d", got.Width, width)
					}
					if len(got.Outside) > 0 {
						t.Errorf("these stick out: %q", got.Outside)
					}
					if got.Rows != min(conns, maxShown) {
						t.Errorf("%d connections are to be seen", got.Rows)
					}
					if conns > 0 && got.Marks == 0 {
						t.Error("no mark is to be seen in the time line")
					}
					for _, e := range b.events {
						if !strings.HasPrefix(e, "Network") || !strings.Contains(e, `"url":"`+url+`"`) {
							t.Errorf("the page complains, or wants more: %s", e)
						}
					}
					data := b.picture(width, min(got.Height, 4000))
					img, err := png.Decode(bytes.NewReader(data))
					if err != nil {
						t.Fatal(err)
					}
					if img.Bounds().Dx() != width {
						t.Errorf("the picture is %v", img.Bounds())
					}
					light, colours := brightness(img)
					if colours < 20 {
						t.Errorf("blank: %d colours", colours)
					}
					if (light > 128) != (scheme == "light") {
						t.Errorf("%s, but its median is %d", scheme, light)
					}
					if err := os.WriteFile(filepath.Join(dir, name+".png"), data, 0o644); err != nil {
						t.Fatal(err)
					}
				})
			}
		}
	}
}

const measure = `(() => {
	const width = document.documentElement.clientWidth;
	const outside = [];
	for (const e of document.querySelectorAll("body *")) {
		const r = e.getBoundingClientRect();
		if (r.width > 0 && (r.right > width + 0.5 || r.left < -0.5)) outside.push(e.tagName + " " + (e.textContent || "").trim().slice(0, 60));
		if (e instanceof HTMLElement && e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 && getComputedStyle(e).display != "inline")
			outside.push("inside " + e.tagName + " " + (e.textContent || "").trim().slice(0, 60));
	}
	const seen = (q) => [...document.querySelectorAll(q)].filter(e => e.getBoundingClientRect().width > 0).length;
	return {
		Width: document.documentElement.scrollWidth,
		Height: document.documentElement.scrollHeight,
		Rows: seen(".conns tbody tr"),
		Marks: seen("svg .mark"),
		Outside: outside.slice(0, 5),
	};
})()`

// brightness returns the median brightness of a picture, and how many colours it has.
func brightness(img image.Image) (light, colours int) {
	seen := make(map[[3]uint32]bool)
	var all []int
	r := img.Bounds()
	for y := r.Min.Y; y < r.Max.Y; y += 2 {
		for x := r.Min.X; x < r.Max.X; x += 2 {
			r, g, b, _ := img.At(x, y).RGBA()
			seen[[3]uint32{r, g, b}] = true
			all = append(all, int(r+g+b)/3>>8)
		}
	}
	slices.Sort(all)
	return all[len(all)/2], len(seen)
}

// illustrated has 5 connections, and deaths that happened for real, in
// seconds, but are shown as if it had been in half an hour.
func illustrated(t *testing.T) http.Handler {
	r := newRig(t, "orders.test", "search.test", "auth.test", "metrics.test")
	hosts := []string{"orders.test", "search.test", "auth.test", "metrics.test"}
	for _, host := range hosts {
		r.mustGet("https://" + host)
	}
	black := func(c *faultnet.Conn) {
		if err := faultnet.BlackholeSocket(c); err != nil {
			c.FailWrites(os.ErrDeadlineExceeded) // not Linux: it looks alike
		}
	}
	r.die("orders.test", 3, (*faultnet.Conn).CloseUnderneath)
	r.die("orders.test", 1, epipe)
	r.die("search.test", 0, epipe)
	r.die("auth.test", 12, (*faultnet.Conn).Reset)
	r.die("search.test", 7, black)
	r.die("orders.test", 0, (*faultnet.Conn).CloseUnderneath)
	r.die("metrics.test", 1, (*faultnet.Conn).CloseUnderneath)
	r.lose("metrics.test")
	r.mustGet("https://metrics.test")
	r.die("search.test", 4, black)
	r.mustGet("http://legacy.test")
	ages := []time.Duration{ // of the deaths, the newest first
		41 * time.Second, 3*time.Minute + 12*time.Second, 3*time.Minute + 40*time.Second, 7 * time.Minute,
		9*time.Minute + 30*time.Second, 9*time.Minute + 33*time.Second, 9*time.Minute + 36*time.Second,
		11 * time.Minute, 13*time.Minute + 20*time.Second,
	}
	return handler{func() snapshot {
		s := look(r.tr, time.Now())
		for i := range s.Deaths {
			if i < len(ages) {
				s.Deaths[i].Time = s.Time.Add(-ages[i])
			}
			*s.Deaths[i].Age *= 100
		}
		s.Status, s.Summary = s.sumUp()
		return s
	}}
}

// crowded has 1000 connections, and has lost more than a page remembers.
func crowded(t *testing.T) http.Handler {
	r := newRig(t, "orders.test", "search.test")
	r.mustGet("https://orders.test")
	r.mustGet("https://search.test")
	for i := range 60 {
		r.die("orders.test", i%3, epipe)
		r.die("search.test", 0, (*faultnet.Conn).CloseUnderneath)
	}
	r.hold("http://legacy.test", 998, func() {})
	return Handler(r.tr)
}
