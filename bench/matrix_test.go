package bench

import (
	"fmt"
	"os"
	"slices"
	"testing"
)

func TestMain(m *testing.M) {
	Child()
	os.Exit(m.Run())
}

// TestRequired runs the rows of CI once with deadconn and checks what is
// required of it: no idempotent request lost, no side effect twice, no healthy
// stream killed.
func TestRequired(t *testing.T) {
	if testing.Short() {
		t.Skip("takes half a minute")
	}
	rows := slices.DeleteFunc(slices.Clone(Rows), func(r Row) bool { return !r.Quick })
	who := slices.DeleteFunc(slices.Clone(Contestants), func(c Contestant) bool { return c.Name != Ours && c.Name != Wrap })
	for _, r := range RunAll(rows, who, 1, true, func(_ Result, s string) { t.Log(s) }) {
		cell := fmt.Sprintf("%s, %s", r.Row, r.Contestant)
		if r.Broken != "" {
			t.Errorf("%s: %s", cell, r.Broken)
			continue
		}
		if r.Sent+r.PostSent+r.HealthySent == 0 {
			t.Errorf("%s: nothing was sent", cell)
		}
		if r.Failed > 0 {
			t.Errorf("%s: %d of %d idempotent requests lost: %v", cell, r.Failed, r.Sent, r.Errors)
		}
		if r.Twice > 0 {
			t.Errorf("%s: %d POSTs ran twice", cell, r.Twice)
		}
		if r.Killed > 0 {
			t.Errorf("%s: %d of %d healthy streams killed: %v", cell, r.Killed, r.HealthySent, r.Errors)
		}
	}
}
