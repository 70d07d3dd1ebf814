package wait_test

import (
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/wait"
)

// TestForDisk: free space does not help a disk that has no inodes left.
func TestForDisk(t *testing.T) {
	for _, test := range []struct{ missing, fix string }{
		{"the worker's disk is full: no inodes are left (`df -i /state`): [Errno 28] No space left on device", "delete files"},
		{"the worker's disk is full: [Errno 28] No space left on device", "free some space"},
	} {
		if w := wait.ForDisk(test.missing); !strings.HasPrefix(w.GetFix(), test.fix) || !strings.HasSuffix(w.GetEvidence(), test.missing) {
			t.Errorf("the fix for %q is %q, want %q", test.missing, w.GetFix(), test.fix)
		}
	}
}
