package audit

import (
	"slices"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/audit"
)

func TestEpochsThatAreAlikeShareALine(t *testing.T) {
	t.Parallel()
	whole := func(n uint64) audit.Epoch { return audit.Epoch{Epoch: n, Consumed: 29, Excluded: 1} }
	report := &audit.Report{Epochs: []audit.Epoch{whole(0), whole(1), whole(2), {Epoch: 3, Consumed: 30}, whole(4), {Epoch: 5, InFlight: 2}}}
	var lines []string
	for line := range strings.Lines(reportText(output.Style{}, report)) {
		if strings.HasPrefix(line, "epoch") {
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
	}
	want := []string{
		"epochs 0 to 2 each 29 consumed once, 1 excluded, 0 in flight, 0 not reached",
		"epoch 3 30 consumed once, 0 excluded, 0 in flight, 0 not reached",
		"epoch 4 29 consumed once, 1 excluded, 0 in flight, 0 not reached",
		"epoch 5 0 consumed once, 0 excluded, 2 in flight, 0 not reached",
	}
	if !slices.Equal(lines, want) {
		t.Errorf("%q", lines)
	}
}
