package bench

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestReport writes a report of made-up results: what it finds, its words, and
// pictures that are well-formed.
func TestReport(t *testing.T) {
	r := NewReport(2)
	for run := range 2 {
		for _, c := range Contestants {
			res := Result{Row: "black hole", Contestant: c.Name, Run: run, Sent: 10, FirstOK: 600, FirstOKWorst: 600, Dials: 1}
			for i := range 10 {
				res.Requests = append(res.Requests, &Request{Kind: get, At: time.Duration(i) * time.Second})
			}
			switch c.Name {
			case Base:
				res.Failed = 9 + run
				res.FirstOK, res.FirstOKWorst = -1, -1
				res.Requests[3].Err = "lost"
			case "failsafehttp":
				res.Twice = 1
			case Ours:
				res.Failed = run
			}
			r.Results = append(r.Results, res)
		}
	}
	dir := t.TempDir()
	if err := r.Write(dir); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "RESULTS.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"**lost** 9.5 (9 to 10) of 10",
		"**ran twice**: 1 POSTs",
		"black hole: **requirement missed**: NewTransport had 1 idempotent requests lost in its worst run.",
		"failsafehttp 0 (but 1 ran twice)",
		"| never |",
		"](blackhole.svg)",
	} {
		if !strings.Contains(string(b), want) {
			t.Errorf("RESULTS.md lacks %q", want)
		}
	}
	pic, err := os.Open(filepath.Join(dir, "blackhole.svg"))
	if err != nil {
		t.Fatal(err)
	}
	defer pic.Close()
	for d := xml.NewDecoder(pic); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("blackhole.svg: %v", err)
		}
	}
	if again, err := ReadReport(dir); err != nil || len(again.Results) != len(r.Results) {
		t.Errorf("ReadReport: %d results, %v", len(again.Results), err)
	}
}
