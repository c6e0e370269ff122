// Command deadconn-demo shows on this machine what a dead connection does to
// a Go HTTP client, and what deadconn makes of it.
//
// It starts a real HTTP/2 server, talks to it over TLS, and breaks the
// connections underneath: once with net/http alone, once with
// deadconn.NewTransport, once with deadconn.Wrap around net/http. It takes
// about 10 seconds and needs no rights and no network.
//
//	go run ./cmd/deadconn-demo         a table, live
//	go run ./cmd/deadconn-demo -json   one JSON document at the end
//
// It exits with 1 if deadconn lost a request that it promises to save.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
)

func main() {
	os.Exit(demo(os.Args[1:], os.Stdout, os.Stderr))
}

// demo is main with its outside made explicit; it returns the exit code.
func demo(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("deadconn-demo", flag.ContinueOnError)
	flags.SetOutput(stderr)
	asJSON := flags.Bool("json", false, "print one JSON document instead of the table")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if flags.NArg() > 0 {
		fmt.Fprintf(stderr, "deadconn-demo takes no arguments, not %q\n", flags.Args())
		return 2
	}

	var show display = newTable(stdout)
	if *asJSON {
		show = jsonDoc{stdout}
	}
	rep, err := run(scenarios, show)
	if err != nil {
		fmt.Fprintln(stderr, "deadconn-demo:", err)
		return 2
	}
	if !rep.OK {
		if *asJSON {
			fmt.Fprintln(stderr, "deadconn-demo: deadconn lost a request that it promises to save")
		}
		return 1
	}
	return 0
}

// isTerminal reports whether w is one that understands colours.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	if runtime.GOOS == "windows" && os.Getenv("WT_SESSION") == "" {
		return false // the old console shows escape sequences as they are
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0 && f.Name() != os.DevNull
}
