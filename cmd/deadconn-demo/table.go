package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

// jsonDoc prints the report as one JSON document.
type jsonDoc struct{ w io.Writer }

func (jsonDoc) begin()                      {}
func (jsonDoc) scenario(int, int, scenario) {}
func (jsonDoc) running(string)              {}
func (jsonDoc) result(result)               {}
func (jsonDoc) end(outcome)                 {}
func (j jsonDoc) finish(rep report) error {
	enc := json.NewEncoder(j.w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(rep)
}

// table prints for people, as it goes.
type table struct {
	w      io.Writer
	tty    bool // lines can be taken back
	colour bool
}

func newTable(w io.Writer) *table {
	tty := isTerminal(w)
	return &table{w: w, tty: tty, colour: tty && os.Getenv("NO_COLOR") == ""}
}

const (
	bold   = "1"
	dim    = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
)

func (t *table) paint(code, s string) string {
	if !t.colour {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

func (t *table) begin() {
	fmt.Fprintln(t.w, t.paint(bold, "What a dead connection does to a Go HTTP client, and what deadconn makes of it"))
	fmt.Fprint(t.w, `
A real HTTP/2 server runs in this process. Its clients keep one connection in
their pool, which is broken in one way after another while requests are sent:

  net/http       http.Transport as it is
  deadconn       deadconn.NewTransport()
  deadconn.Wrap  deadconn.Wrap(http.Transport)

sent: requests.  failed: errors that reached the caller.  dials: new connections made.
back after: how long until requests were answered again (of a burst: all).
`)
}

func (t *table) scenario(i, n int, s scenario) {
	fmt.Fprintf(t.w, "\n%s\n", t.paint(bold, fmt.Sprintf("%d/%d %s", i+1, n, s.title)))
	t.lines(s.what)
	fmt.Fprintf(t.w, "    %s\n", t.paint(dim, fmt.Sprintf("%-14s%6s%8s%7s%12s  %s", "", "sent", "failed", "dials", "back after", "verdict")))
}

func (t *table) running(client string) {
	if t.tty {
		fmt.Fprintf(t.w, "    %-14s%s", client, t.paint(dim, "..."))
	}
}

func (t *table) result(r result) {
	if t.tty {
		fmt.Fprint(t.w, "\r\x1b[K")
	}
	back := "-"
	switch {
	case r.Recovered != nil && *r.Recovered < 10:
		back = fmt.Sprintf("%.1f ms", *r.Recovered)
	case r.Recovered != nil && *r.Recovered < 1000:
		back = fmt.Sprintf("%.0f ms", *r.Recovered)
	case r.Recovered != nil:
		back = fmt.Sprintf("%.1f s", *r.Recovered/1000)
	case r.stuck:
		back = "never"
	}
	code := green
	switch {
	case !r.kept, r.Failed > 0 && r.Client == plain:
		code = red
	case r.Failed > 0:
		code = yellow
	}
	fmt.Fprintf(t.w, "    %-14s%6d%s%7d%12s  %s\n", r.Client, r.Requests,
		t.paint(code, fmt.Sprintf("%8d", r.Failed)), r.Dials, back, t.paint(code, r.Verdict))
}

func (t *table) end(o outcome) {
	for _, r := range o.Runs {
		if text := r.Counters.String(); text != "" {
			t.lines(r.Client + ": " + text)
		}
	}
	for _, r := range o.Runs {
		if r.Error != "" && (r.Client == plain || r.Promised) {
			fmt.Fprintf(t.w, "    %s says: %s\n", r.Client, t.paint(dim, r.Error))
		}
		if r.Why != "" && r.Failed > 0 {
			t.lines(r.Client + " " + r.Why + ".")
		}
	}
}

func (t *table) finish(rep report) error {
	fmt.Fprintf(t.w, "\n%s\n", t.paint(bold, "In all"))
	for _, tot := range rep.Totals {
		line := fmt.Sprintf("%-14s lost %3d of %d requests, dialed %3d times", tot.Client, tot.Failed, tot.Requests, tot.Dials)
		if tot.Stuck > 0 {
			line += fmt.Sprintf(", stuck for good in %d of %d", tot.Stuck, len(rep.Scenarios))
		}
		fmt.Fprintf(t.w, "    %s\n", line)
	}
	for _, tot := range rep.Totals {
		if text := tot.Counters.String(); text != "" {
			t.lines(tot.Client + ": " + text)
		}
	}
	verdict := t.paint(green, "deadconn kept every promise.")
	if !rep.OK {
		verdict = t.paint(red, "deadconn LOST requests that it promises to save: a bug, please report it.")
	}
	_, err := fmt.Fprintf(t.w, "    %s (%s, %s, %.1f s)\n", verdict, rep.Go, rep.Platform, rep.Seconds)
	return err
}

// lines prints s, broken into lines.
func (t *table) lines(s string) {
	for _, line := range wrap(s, 74) {
		fmt.Fprintf(t.w, "    %s\n", line)
	}
}

// wrap breaks s into lines of at most width characters.
func wrap(s string, width int) []string {
	var lines []string
	var line string
	for _, word := range strings.Fields(s) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
