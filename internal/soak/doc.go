// Package soak is a test: mixed traffic through deadconn's three ways in, under
// random faults, with a book kept on both sides of every request.
//
//	go test ./internal/soak                          # 5 s
//	go test -race ./internal/soak -soak=10m -seed=7  # as long as wanted
//	DEADCONN_SOAK=60s go test ./internal/soak        # what .ci/run does
//
// The seed is printed. It alone decides the plan of the faults and what each
// worker sends in turn; which connection a fault hits, and in the middle of
// what, is up to the scheduler. Above 10 minutes go test wants its -timeout
// raised too.
//
// The rules that are checked are in rules_test.go. TestRulesBite sends the same
// traffic through transports that break them, and fails if nobody notices.
package soak
