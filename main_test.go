package deadconn

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// TestMain fails the package if goroutines are left behind.
func TestMain(m *testing.M) {
	flag.Parse()
	// The parallel tests wait for kernels and clocks, not for processors.
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		flag.Set("test.parallel", "12")
	}
	code := m.Run()
	if code == 0 {
		if left := leakedGoroutines(); left != "" {
			fmt.Fprintf(os.Stderr, "goroutines left behind:\n%s\n", left)
			code = 1
		}
	}
	os.Exit(code)
}

func leakedGoroutines() string {
	var left string
	for range 100 {
		buf := make([]byte, 1<<20)
		buf = buf[:runtime.Stack(buf, true)]
		left = ""
		for i, g := range strings.Split(string(buf), "\n\n") {
			if i > 0 && !strings.Contains(g, "os/signal.") && !strings.Contains(g, "testing.(*F)") {
				left += g + "\n\n"
			}
		}
		if left == "" {
			return ""
		}
		time.Sleep(50 * time.Millisecond) // goroutines end on their own time
	}
	return left
}
