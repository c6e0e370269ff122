package main

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	out := strings.ReplaceAll(`goos: linux
cpu: Some CPU
BenchmarkWrapNoBase/bare-N   1	         2.1 ns/op	       0 B/op	       0 allocs/op
BenchmarkWrapNoBase/Wrap-N   1	       314.0 ns/op	     688 B/op	       5 allocs/op
BenchmarkGET/NewTransport-N  1	     25000 bare-ns/op	     25500 ours-ns/op	         1.020 ratio
BenchmarkGET/NewTransport-N  1	     25000 bare-ns/op	     25200 ours-ns/op	         1.008 ratio
BenchmarkGET/NewTransport-N  1	     25000 bare-ns/op	     25100 ours-ns/op	         1.004 ratio
BenchmarkGET/Wrap-N          1	     25600 bare-ns/op	     26200 ours-ns/op	         1.022 ratio
BenchmarkGETParallel/net/http-N      1	     29338 ns/op	    6074 B/op	      54 allocs/op
BenchmarkGETParallel/NewTransport-N  1	     24491 ns/op	    5972 B/op	      54 allocs/op
BenchmarkTrack-N     1	       131.7 ns/op	     224 B/op	       1 allocs/op
BenchmarkEvict-N     1	       184.2 ns/op
BenchmarkCheckout-N  1	       394.6 ns/op	       0 B/op	       0 allocs/op
PASS
`, "-N", fmt.Sprint("-", runtime.GOMAXPROCS(0)))
	block, err := table(parse(out), 3)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"25.2 µs (ratio 1.008) | 25.0 µs", "314 ns, 5 allocations, 688 B | 2 ns", "| 54 | 54 |", "| 224 B |", "Medians of 3 runs", "(Some CPU)"} {
		if !strings.Contains(block, want) {
			t.Errorf("no %q in\n%s", want, block)
		}
	}
	if _, err := table(parse("PASS\n"), 3); err == nil || !strings.Contains(err.Error(), "Track ns/op") {
		t.Errorf("nothing was measured: %v", err)
	}

	got, err := replace([]byte("a\n"+begin+"\nold\n"+end+"\nb\n"), "new\n")
	if want := "a\n" + begin + "\nnew\n" + end + "\nb\n"; string(got) != want || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := replace([]byte("a\n"+begin), "new\n"); err == nil {
		t.Error("no error without marks")
	}
}
