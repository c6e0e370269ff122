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
//	go run ./cmd/deadconn-demo -serve  with the debug page, until Ctrl-C
//
// It exits with 1 if deadconn lost a request that it promises to save.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
)

func main() {
	os.Exit(demo(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}

// demo is main with its outside made explicit; it returns the exit code. The
// end of ctx is a Ctrl-C.
func demo(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("deadconn-demo", flag.ContinueOnError)
	flags.SetOutput(stderr)
	asJSON := flags.Bool("json", false, "print one JSON document instead of the table")
	serve := flags.Bool("serve", false, "serve the debug page of deadconn's connections on loopback, until Ctrl-C")
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
	if !*serve {
		rep, err := run(ctx, scenarios, ways, show)
		return exitCode(rep, err, *asJSON, stderr)
	}

	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	o, err := observe()
	if err != nil {
		fmt.Fprintln(stderr, "deadconn-demo:", err)
		return 2
	}
	defer o.close()
	fmt.Fprintf(stderr, "The debug page of deadconn's connections is at %s until Ctrl-C.\n", o.url)
	watched := slices.Clone(ways)
	for i := range watched {
		if watched[i].name == owned {
			watched[i] = o.way()
		}
	}
	code := make(chan int, 1)
	go func() {
		rep, err := run(ctx, scenarios, watched, show)
		if ctx.Err() == nil {
			code <- exitCode(rep, err, *asJSON, stderr)
		}
	}()
	select {
	case <-ctx.Done():
		return interrupted
	case code := <-code:
		if code != 2 {
			fmt.Fprintf(stderr, "Connections go on dying, to be watched at %s. Ctrl-C ends it.\n", o.url)
			o.goOn(ctx)
		}
		return code
	}
}

// interrupted is the exit code of a shell's job that Ctrl-C ended.
const interrupted = 130

// exitCode says how the demo went.
func exitCode(rep report, err error, asJSON bool, stderr io.Writer) int {
	if err != nil {
		fmt.Fprintln(stderr, "deadconn-demo:", err)
		return 2
	}
	if !rep.OK {
		if asJSON {
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
