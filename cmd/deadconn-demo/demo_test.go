package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// The whole demo, as a script sees it.
func TestJSON(t *testing.T) {
	var stdout, stderr bytes.Buffer
	code := demo(t.Context(), []string{"-json"}, &stdout, &stderr)
	if code != 0 || stderr.Len() > 0 {
		t.Errorf("exit code %d, stderr %q", code, &stderr)
	}
	var rep report
	dec := json.NewDecoder(&stdout)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&rep); err != nil {
		t.Fatal(err)
	}
	if dec.More() {
		t.Error("more than one JSON document")
	}
	if !rep.OK || rep.Go == "" || rep.Platform == "" || rep.Seconds <= 0 {
		t.Errorf("ok %v, go %q, platform %q, %v s", rep.OK, rep.Go, rep.Platform, rep.Seconds)
	}
	if rep.Seconds > 15 {
		t.Errorf("took %v s", rep.Seconds)
	}
	if len(rep.Scenarios) != len(scenarios) || len(rep.Totals) != len(ways) {
		t.Fatalf("%d scenarios, %d totals", len(rep.Scenarios), len(rep.Totals))
	}
	for i, o := range rep.Scenarios {
		if o.Name != scenarios[i].name || o.Title == "" || o.What == "" || len(o.Runs) != len(ways) {
			t.Errorf("scenario %d: %+v", i, o)
			continue
		}
		for j, r := range o.Runs {
			if r.Client != ways[j].name || r.Requests == 0 || r.Verdict == "" {
				t.Errorf("%s: %+v", o.Name, r)
			}
			if (r.Failed > 0) != (r.Error != "") {
				t.Errorf("%s, %s: %d failed, error %q", o.Name, r.Client, r.Failed, r.Error)
			}
			if (r.Client == plain) != (r.Counters == nil) {
				t.Errorf("%s, %s: counters %v", o.Name, r.Client, r.Counters)
			}
			if r.Promised && r.Failed > 0 {
				t.Errorf("%s: %s lost %d of %d: %s", o.Name, r.Client, r.Failed, r.Requests, r.Error)
			}
			// What is shown is worth showing only as long as it is so.
			if r.Client == plain && r.Breaks > 0 && r.Failed == 0 {
				t.Errorf("%s: net/http lost nothing: has the fault been cured?", o.Name)
			}
		}
		if r := o.Runs[1]; r.Client != owned || !r.Promised || r.Breaks > 0 && r.Recovered == nil {
			t.Errorf("%s: %+v", o.Name, r)
		}
	}
	if tot := rep.Totals[1]; tot.Client != owned || tot.Failed != 0 || tot.Stuck != 0 {
		t.Errorf("totals: %+v", tot)
	} else if c := tot.Counters; c.Evicted < 20 || c.EvictedBy["closed"] < 10 || c.Rescued < 70 || c.Lost != 0 {
		t.Errorf("counters: %+v", c)
	}
}

// The table, on what is no terminal.
func TestTable(t *testing.T) {
	t.Setenv("NO_COLOR", "")
	var out bytes.Buffer
	if _, err := run(t.Context(), scenarios[:1], ways, newTable(&out)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"use of closed network connection", // the line that people know from their logs
		"each break costs a request",
		"all rescued",
		"deadconn: 10 evicted (closed 10), 10 retried, 10 rescued",
		"deadconn kept every promise.",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if strings.ContainsAny(out.String(), "\x1b\r") {
		t.Errorf("control characters in\n%q", &out)
	}
	for line := range strings.Lines(out.String()) {
		if len(line) > 100 && !strings.Contains(line, "http") {
			t.Errorf("a long line: %s", line)
		}
	}
}

// The debug page is there while the demo runs and after, and things go on.
func TestServe(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	o, err := observe()
	if err != nil {
		t.Fatal(err)
	}
	defer o.close()
	rep, err := run(t.Context(), scenarios[:1], []way{o.way()}, jsonDoc{new(bytes.Buffer)})
	if err != nil {
		t.Fatal(err)
	}
	if c := rep.Scenarios[0].Runs[0].Counters; !rep.OK || c.EvictedBy["closed"] != 10 || c.Rescued != 10 {
		t.Errorf("%+v", c)
	}
	var page struct {
		Counters counters
		Deaths   []struct{ Cause string }
	}
	look := func() {
		resp, err := http.Get(o.url + "?format=json")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if err := json.NewDecoder(resp.Body).Decode(&page); err != nil {
			t.Fatal(err)
		}
	}
	if look(); page.Counters.Evicted != 10 || len(page.Deaths) != 10 {
		t.Errorf("%+v", page)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		o.goOn(ctx)
	}()
	for end := time.Now().Add(20 * time.Second); page.Counters.Evicted < 12; time.Sleep(50 * time.Millisecond) {
		if look(); time.Now().After(end) {
			t.Fatalf("nothing goes on: %+v", page)
		}
	}
	resp, err := http.Get(strings.TrimSuffix(o.url, "/debug/deadconn") + "/")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if !strings.Contains(string(body), "What died, why") {
		t.Errorf("at /: %s", body)
	}
	cancel()
	<-done
}

// Ctrl-C ends it at any time.
func TestInterrupt(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	stderr := new(lockedBuffer)
	if code := demo(ctx, []string{"-serve", "-json"}, new(lockedBuffer), stderr); code != interrupted {
		t.Errorf("exit code %d", code)
	}
	if text := stderr.String(); !strings.Contains(text, "http://127.0.0.1:") {
		t.Errorf("stderr %q", text)
	}
}

// lockedBuffer is a buffer that a demo may go on writing to.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A promise that is not kept makes itself heard.
func TestBrokenPromise(t *testing.T) {
	list := slices.Clone(scenarios[:1])
	list[0].do = func(r *rig) {
		r.kill((*conn).CloseUnderneath)
		r.dialer.SetErr(errNoRoute) // no connection can be had again
		r.get(1)
	}
	var out bytes.Buffer
	rep, err := run(t.Context(), list, ways, newTable(&out))
	if err != nil {
		t.Fatal(err)
	}
	if rep.OK || !strings.Contains(out.String(), "LOST") {
		t.Errorf("ok %v:\n%s", rep.OK, &out)
	}
}

// Neither does giving up a sound connection pass.
func TestGivenUp(t *testing.T) {
	list := slices.Clone(scenarios[:1])
	list[0].do = func(r *rig) {
		r.get(1)
		r.dialer.Last().CloseUnderneath() // not told to the record
		r.get(1)
	}
	rep, err := run(t.Context(), list, ways, jsonDoc{new(bytes.Buffer)})
	if err != nil {
		t.Fatal(err)
	}
	if rep.OK {
		t.Errorf("ok: %+v", rep)
	}
}

func TestUsage(t *testing.T) {
	for _, tt := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"-h"}, 0, "-json"},
		{[]string{"-nonsense"}, 2, "-json"},
		{[]string{"word"}, 2, "no arguments"},
	} {
		var stdout, stderr bytes.Buffer
		if code := demo(t.Context(), tt.args, &stdout, &stderr); code != tt.code || !strings.Contains(stderr.String(), tt.says) || stdout.Len() > 0 {
			t.Errorf("%q: exit code %d, stderr %q, stdout %q", tt.args, code, &stderr, &stdout)
		}
	}
}

var errNoRoute = errors.New("no route to host")
