// Command matrix runs the fault matrix and writes RESULTS.md, results.json and
// the pictures. Run it in bench/:
//
//	go run ./cmd/matrix
//
// The rows in network namespaces want root on Linux, with ip and nft, and those
// of real servers Debian's packages nginx-light, haproxy, apache2,
// nghttp2-proxy, h2o and caddy; without, they are left out and named.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"time"

	"github.com/deadconn/deadconn/bench"
)

func main() {
	bench.Child()
	log.SetFlags(0)
	runs := flag.Int("runs", 3, "how often each cell is run")
	quick := flag.Bool("quick", false, "only the rows of CI, once")
	only := flag.String("only", "", "only the rows whose names match this regular expression")
	who := flag.String("who", "", "only the contestants whose names match this regular expression")
	out := flag.String("out", ".", "directory to write to; empty: write nothing")
	keep := flag.Bool("keep", false, "keep in results.json what is not run now")
	verbose := flag.Bool("v", false, "print each cell's errors")
	redraw := flag.Bool("redraw", false, "run nothing: write RESULTS.md and the pictures from results.json")
	flag.Parse()

	if *redraw {
		rep, err := bench.ReadReport(*out)
		if err != nil {
			log.Fatal(err)
		}
		if err := rep.Write(*out); err != nil {
			log.Fatal(err)
		}
		return
	}

	lab, filter := bench.Able()
	rep := bench.NewReport(*runs)
	rows := slices.Clone(bench.Rows)
	rowRE, whoRE := regexp.MustCompile(*only), regexp.MustCompile(*who)
	rows = slices.DeleteFunc(rows, func(r bench.Row) bool {
		switch {
		case !rowRE.MatchString(r.Name), *quick && !r.Quick:
			return true
		case r.Lab && lab != nil:
			rep.LeaveOut(r.Name + ": needs network namespaces: " + lab.Error())
			return true
		case r.Root && filter != nil:
			rep.LeaveOut(r.Name + ": needs a socket filter: " + filter.Error())
			return true
		case r.Program != "":
			if _, err := exec.LookPath(r.Program); err != nil {
				rep.LeaveOut(r.Name + ": " + err.Error())
				return true
			}
		}
		return false
	})
	contestants := slices.DeleteFunc(slices.Clone(bench.Contestants), func(c bench.Contestant) bool { return !whoRE.MatchString(c.Name) })
	if *quick {
		*runs = 1
		rep.Runs = 1
	}
	begin := time.Now()
	rep.Results = bench.RunAll(rows, contestants, *runs, *quick, func(res bench.Result, s string) {
		fmt.Fprintln(os.Stderr, s)
		if *verbose {
			for text, n := range res.Errors {
				fmt.Fprintf(os.Stderr, "      %d x %s\n", n, text)
			}
		}
	})
	if rowRE.MatchString("cost") {
		rep.Costs = bench.MeasureCosts(contestants)
	}
	rep.Took = time.Since(begin).Round(time.Second).String()
	if *out == "" {
		return
	}
	if *keep {
		old, err := bench.ReadReport(*out)
		if err != nil {
			log.Fatal(err)
		}
		rep.Keep(old)
	}
	if err := rep.Write(*out); err != nil {
		log.Fatal(err)
	}
}
