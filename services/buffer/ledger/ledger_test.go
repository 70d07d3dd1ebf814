package ledger

import (
	"errors"
	"testing"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// Only the transitions of the drawing are possible, and the counts follow them.
func TestTransitions(t *testing.T) {
	t.Parallel()
	states := []State{Open, Ready, Leased, Consumed, Excluded, Dissolved}
	possible := map[[2]State]bool{
		{0, Open}: true, {0, Dissolved}: true, {0, Excluded}: true,
		{Open, Open}: true, {Open, Ready}: true, {Open, Dissolved}: true, {Open, Excluded}: true,
		{Ready, Leased}: true, {Ready, Dissolved}: true, {Ready, Excluded}: true,
		{Leased, Consumed}:    true,
		{Dissolved, Open}:     true,
		{Dissolved, Excluded}: true,
	}
	for _, from := range append(states, 0) {
		for _, to := range states {
			l, g := &Ledger{}, &Group{State: from}
			l.Groups[from] = 1
			err := l.move(g, to, "")
			if possible[[2]State{from, to}] != (err == nil) || err != nil && !errors.Is(err, ErrGroupState) {
				t.Errorf("%s to %s: %v", stateName(from), stateName(to), err)
			}
			if err == nil && l.Groups[to] != 1 {
				t.Errorf("%s to %s: counts %v", stateName(from), stateName(to), l.Groups)
			}
		}
	}
}

// A waiting lease looks again only after a change that can give it a batch.
func TestChangesThatMayLease(t *testing.T) {
	t.Parallel()
	c := &bufferv1.LedgerConfig{GroupsPerStep: 2}
	receipts := &bufferv1.LedgerConfig{GroupsPerStep: 2, Receipts: true}
	one, two := &bufferv1.LedgerState{Ready: 1}, &bufferv1.LedgerState{Ready: 2}
	for name, test := range map[string]struct {
		config    *bufferv1.LedgerConfig
		last, now *bufferv1.LedgerState
		want      bool
	}{
		"one of two groups":        {c, &bufferv1.LedgerState{}, one, false},
		"both groups":              {c, one, two, true},
		"one ready, one excluded":  {c, one, &bufferv1.LedgerState{Ready: 1, Excluded: 1}, true},
		"excluded by earlier step": {c, one, &bufferv1.LedgerState{Ready: 1, Excluded: 1, Skipped: 1}, false},
		"leased by another call":   {c, one, &bufferv1.LedgerState{Leased: 2}, true},
		"committed":                {c, one, &bufferv1.LedgerState{Step: 1}, true},
		"may be stale":             {receipts, &bufferv1.LedgerState{}, one, true},
	} {
		if got := MayLease(test.config, 1, test.last, test.now); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
