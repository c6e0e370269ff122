// Package suites runs the tests that well-known client libraries have of
// themselves with deadconn under them: what their authors expect of a transport
// must hold of deadconn as well.
//
//	DEADCONN_SUITES=1 go test -v
//
// Each suite runs three times: bare, over deadconn.Wrap and over
// deadconn.NewTransport. A test that passes bare has to pass over both. It runs
// from a copy of the module, in which each package with tests gets a file that
// imports package under; so deadconn is http.DefaultTransport. Where the library
// or its tests make an *http.Transport of their own, they are edited to put
// deadconn there too; the edits are below, and that is all of them. (The overlay
// of the go command cannot do this: it refuses files in the module cache.)
package suites

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/deadconn/deadconn/bench/suites/under"

	// What is run: with these imports go mod tidy keeps the libraries, and
	// what their tests need.
	_ "github.com/google/go-github/v89/github"
	_ "github.com/hashicorp/go-retryablehttp"
	_ "oras.land/oras-go/v2/registry/remote"
)

// A suite is the tests of one library.
type suite struct {
	name     string
	packages string   // as a pattern of go list
	modules  []string // those to be copied, the library's own first
	edits    []edit

	// netHTTPOnly are the tests, with the reason, that hold for no
	// RoundTripper but net/http's own. They are left out, and have to fail
	// over one that does nothing but pass on.
	netHTTPOnly map[string]string
}

// An edit puts new for each old in a file of a module.
type edit struct{ module, file, old, new string }

const (
	retryable = "github.com/hashicorp/go-retryablehttp"
	cleanhttp = "github.com/hashicorp/go-cleanhttp" // makes the former's transports
	goGitHub  = "github.com/google/go-github/v89"
	oras      = "oras.land/oras-go/v2"
)

// The body of an error is read and not closed. With a Client.Timeout, net/http's
// Client then keeps a goroutine until the time is out, unless it knows the
// RoundTripper's type (setRequestCancel in net/http's client.go).
const leftOpen = "a goroutine of net/http is left in the test's synctest bubble"

var suites = []suite{{
	name:     "go-retryablehttp",
	packages: retryable,
	modules:  []string{retryable, cleanhttp},
	edits: []edit{
		{cleanhttp, "cleanhttp.go", "Transport: DefaultTransport(),", "Transport: under.Over(DefaultTransport()),"},
		{cleanhttp, "cleanhttp.go", "Transport: DefaultPooledTransport(),", "Transport: under.Over(DefaultPooledTransport()),"},
	},
}, {
	name:     "go-github",
	packages: goGitHub + "/github",
	modules:  []string{goGitHub},
	edits: []edit{
		{goGitHub, "github/github_test.go", "Transport: transport,\n\t\tTimeout:", "Transport: under.Over(transport),\n\t\tTimeout:"},
	},
	netHTTPOnly: map[string]string{
		"Test_newClient/with_env_proxy":                        "go-github sets the proxy of an *http.Transport, else it returns an error",
		"TestDo_rateLimit_abuseRateLimitError_retryAfter":      leftOpen,
		"TestDo_rateLimit_abuseRateLimitError_xRateLimitReset": leftOpen,
	},
}, {
	name:     "oras-go",
	packages: oras + "/registry/...",
	modules:  []string{oras},
	edits: []edit{
		{oras, "registry/example_test.go", "= ts.Client().Transport\n", "= under.Over(ts.Client().Transport)\n"},
		{oras, "registry/remote/example_test.go", "= ts.Client().Transport\n", "= under.Over(ts.Client().Transport)\n"},
		{oras, "registry/remote/registry_test.go", "reg.Client = ts.Client()\n", "reg.Client = &http.Client{Transport: under.Over(ts.Client().Transport)}\n"},
		{oras, "registry/remote/repository_test.go", "underlyingTransport: transport,", "underlyingTransport: under.Over(transport),"},
		{oras, "registry/remote/auth/client_test.go", "Client{Transport: transport}", "Client{Transport: under.Over(transport)}"},
		{oras, "registry/remote/auth/client_test.go", "&http.Transport{DialContext: hostDialer(t, hosts)}", "under.Over(&http.Transport{DialContext: hostDialer(t, hosts)})"},
		{oras, "registry/remote/auth/client_test.go", "Client: origin.Client(),", "Client: &http.Client{Transport: under.Over(origin.Client().Transport)},"},
		{oras, "registry/remote/auth/client_upgrade_test.go", "Client{Transport: transport}", "Client{Transport: under.Over(transport)}"},
	},
}}

func TestSuites(t *testing.T) {
	if os.Getenv("DEADCONN_SUITES") == "" {
		t.Skip("whole test suites of others: set DEADCONN_SUITES=1 to run them")
	}
	for _, s := range suites {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel() // they mostly wait
			s.run(t)
		})
	}
}

func (s suite) run(t *testing.T) {
	modfile, version := s.copy(t)
	bare := s.test(t, modfile, under.Bare)
	t.Logf("%s %s, bare: %v", s.name, version, bare)
	for _, test := range bare.tests("fail") {
		t.Logf("fails bare, too: %s", test)
	}

	var args []string
	if len(s.netHTTPOnly) > 0 {
		args = append(args, "-skip", pattern(slices.Collect(maps.Keys(s.netHTTPOnly))...))
	}
	for _, test := range slices.Sorted(maps.Keys(s.netHTTPOnly)) {
		t.Logf("left out: %s: %s", test, s.netHTTPOnly[test])
		if r := s.test(t, modfile, under.PassOn, "-run", pattern(test)); len(r.tests("fail")) == 0 {
			t.Errorf("%s passes over any RoundTripper: let it run", test)
		}
	}

	for _, variant := range []string{under.Wrap, under.New} {
		r := s.test(t, modfile, variant, args...)
		t.Logf("%s %s, %s: %v", s.name, version, variant, r)
		if failed := r.tests("fail"); len(failed) > 0 {
			t.Logf("once more, since a test of others may fail by chance: %s", failed)
			r = s.test(t, modfile, variant, args...)
			t.Logf("%s %s, %s: %v", s.name, version, variant, r)
		}
		if r.sent == 0 {
			t.Errorf("no request went through %s", variant)
		}
		var missing []string
		for _, test := range bare.tests("pass") {
			switch {
			case r.outcome[test] == "fail":
				t.Errorf("%s passes bare, and fails over %s:\n%s", test, variant, r.output[test])
			case r.outcome[test] != "pass" && !s.leavesOut(test):
				missing = append(missing, test)
			}
		}
		if len(missing) > 0 {
			t.Errorf("%d tests pass bare, and did not run over %s, the first of them %s:\n%s", len(missing), variant, missing[0], r.output[noTest])
		}
	}
}

// leavesOut reports whether test is one of netHTTPOnly.
func (s suite) leavesOut(test string) bool {
	for name := range s.netHTTPOnly {
		if strings.HasSuffix(test, "."+name) {
			return true
		}
	}
	return false
}

// pattern matches these tests, and no others.
func pattern(tests ...string) string {
	var all []string
	for _, test := range tests {
		all = append(all, "^"+strings.ReplaceAll(test, "/", "$/^")+"$")
	}
	return strings.Join(all, "|")
}

// copy copies the modules of s, edits the copies, and returns a go.mod that
// has them in place of the real ones, and the library's version.
func (s suite) copy(t *testing.T) (modfile, version string) {
	dir := t.TempDir()
	for _, name := range []string{"go.mod", "go.sum"} {
		write(t, filepath.Join(dir, name), read(t, filepath.Join("..", name)))
	}
	modfile = filepath.Join(dir, "go.mod")
	copies := make(map[string]string) // of a module
	for i, module := range s.modules {
		m := goList[struct{ Version, Dir string }](t, "-m", module)[0]
		if i == 0 {
			version = m.Version
		}
		copies[module] = filepath.Join(dir, strconv.Itoa(i))
		if err := os.CopyFS(copies[module], os.DirFS(m.Dir)); err != nil {
			t.Fatal(err)
		}
		goCommand(t, "mod", "edit", "-replace="+module+"="+copies[module], modfile)
	}

	const imports, ours = "import (\n", `"github.com/deadconn/deadconn/bench/suites/under"` + "\n"
	for _, e := range s.edits {
		file := filepath.Join(copies[e.module], e.file)
		text := read(t, file)
		if !strings.Contains(text, e.old) {
			t.Fatalf("%s of %s has changed: it lacks %q", e.file, e.module, e.old)
		}
		if !strings.Contains(text, ours) {
			text = strings.Replace(text, imports, imports+ours, 1)
		}
		write(t, file, strings.ReplaceAll(text, e.old, e.new))
	}
	type goPackage struct {
		Name, Dir   string
		TestGoFiles []string
	}
	for _, p := range goList[goPackage](t, "-modfile="+modfile, s.packages) {
		if len(p.TestGoFiles) > 0 {
			write(t, filepath.Join(p.Dir, "deadconn_test.go"), "package "+p.Name+"\n\nimport _ "+ours)
		}
	}
	return modfile, version
}

// noTest is whose output it is if no test wrote it.
const noTest = ""

// A result is what came of a run, by the names of the tests with their
// package's path before them.
type result struct {
	outcome       map[string]string // pass, fail or skip
	output        map[string]string
	sent, retried int // requests that went through deadconn, and those sent again
	seconds       float64
}

// tests returns the tests with an outcome, sorted.
func (r result) tests(outcome string) []string {
	var tests []string
	for test, o := range r.outcome {
		if o == outcome {
			tests = append(tests, test)
		}
	}
	slices.Sort(tests)
	return tests
}

func (r result) String() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped in %.1f s; %d requests through deadconn, %d retried",
		len(r.tests("pass")), len(r.tests("fail")), len(r.tests("skip")), r.seconds, r.sent, r.retried)
}

// test runs the tests of s over a variant.
func (s suite) test(t *testing.T, modfile, variant string, args ...string) result {
	tally := filepath.Join(t.TempDir(), "tally")
	write(t, tally, "")
	args = append([]string{"test", "-modfile=" + modfile, "-json", "-count=1", "-vet=off", "-timeout=3m", s.packages}, args...)
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Env = append(os.Environ(), under.VariantEnv+"="+variant, under.TallyEnv+"="+tally)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run() // fails if a test does; the outcomes tell

	r := result{outcome: make(map[string]string), output: make(map[string]string)}
	for _, e := range decode[struct {
		Action, Package, Test, Output string
		Elapsed                       float64
	}](t, &stdout) {
		test := noTest
		if e.Test != "" {
			test = e.Package + "." + e.Test
		}
		switch e.Action {
		case "output", "build-output":
			r.output[test] += e.Output
		case "pass", "fail", "skip":
			if test == noTest {
				r.seconds += e.Elapsed
			} else {
				r.outcome[test] = e.Action
			}
		}
	}
	if len(r.outcome) == 0 {
		t.Fatalf("no test ran: %v\n%s%s", err, r.output[noTest], &stderr)
	}
	marks := read(t, tally)
	r.sent = strings.Count(marks, string(under.Sent))
	r.retried = strings.Count(marks, string(under.Retried))
	return r
}

// goCommand runs the go command and returns what it wrote.
func goCommand(t *testing.T, args ...string) *bytes.Buffer {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, &stderr)
	}
	return &stdout
}

// goList returns what go list -json says, one T for each module or package.
func goList[T any](t *testing.T, args ...string) []T {
	list := decode[T](t, goCommand(t, append([]string{"list", "-json"}, args...)...))
	if len(list) == 0 {
		t.Fatalf("go list %q found nothing", args)
	}
	return list
}

// decode returns all values of a stream of JSON.
func decode[T any](t *testing.T, r io.Reader) []T {
	var all []T
	for d := json.NewDecoder(r); ; {
		var v T
		if err := d.Decode(&v); err == io.EOF {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, v)
	}
}

func read(t *testing.T, file string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func write(t *testing.T, file, text string) {
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
