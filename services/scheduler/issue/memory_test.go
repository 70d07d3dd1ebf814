package issue

import (
	"runtime"
	"testing"

	"github.com/rollout-rl/rollout/libs/bus"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// An issuer remembers what is in flight, and nothing about groups that are complete: after 20,000
// steps with 200,000 groups, of which every tenth needed a second attempt and every hundredth was
// lost, it has the memory that it had after 1,000 steps. This test does not run in parallel with
// others, because it measures the whole process.
func TestMemoryDoesNotGrowWithTheGroups(t *testing.T) {
	const perStep, early, late = 10, 1000, 20_000
	i, a := bench(t, 0, running, &bufferv1.LedgerState{})
	i.window = Window{Sync: true, GroupsPerStep: perStep, Steps: late}
	a.servers = &bus.RunState{Trajectories: bus.Backlog{First: 1}} // all are ingested
	do := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	var before uint64
	for step := uint64(1); step <= late; step++ {
		first := (step - 1) * perStep
		do("issue", i.act(t.Context()))
		if want := step * perStep; i.position != want {
			t.Fatalf("step %d: the cursor is at %d, want %d", step, i.position, want)
		}
		if step%10 == 0 { // the first sweep finds a group nowhere, and the second publishes it again
			a.known = nil
			for p := first + 1; p < first+perStep; p++ {
				a.known = append(a.known, group(p, 0, ready, 0))
			}
			asked := len(a.asked)
			do("sweep", i.sweep(t.Context()))
			do("sweep", i.sweep(t.Context()))
			if len(a.asked) != asked+1 {
				t.Fatalf("step %d: asked %q after a group was lost", step, a.asked[asked:])
			}
		}
		a.ledger = &bufferv1.LedgerState{Step: step - 1, Dissolved: []*bufferv1.GroupRecord{group(first, 0, dissolved, 1)}}
		asked := len(a.asked)
		do("settle", i.act(t.Context()))
		if len(a.asked) != asked+2 { // reissue, publish
			t.Fatalf("step %d: asked %q after a group was dissolved", step, a.asked[asked:])
		}
		a.ledger = &bufferv1.LedgerState{Step: step}
		if a.asked = a.asked[:0]; step == early {
			before = heap()
		}
	}
	if after := heap(); after > before+256<<10 {
		t.Errorf("%d KiB after %d groups, %d KiB after %d", before>>10, early*perStep, after>>10, late*perStep)
	}
}
