package scheduler

import "testing"

func TestTransitionsMatchTheDrawing(t *testing.T) {
	t.Parallel()
	drawn := map[State]string{
		Pending: "S...FCI", Starting: "RP.DFCI", Running: "P.DsFCI", Paused: "SRDsFCI", Draining: "sFCI", Interrupted: "SC", Failed: "S", Cancelled: "S",
	}
	letters := map[State]rune{Starting: 'S', Running: 'R', Paused: 'P', Draining: 'D', Succeeded: 's', Failed: 'F', Cancelled: 'C', Interrupted: 'I'}
	for from := Pending; from <= Cancelled; from++ {
		for to := Pending; to <= Cancelled; to++ {
			run := &Run{State: from}
			want := false
			for _, l := range drawn[from] {
				want = want || l == letters[to] && to != Pending
			}
			if got := move(run, to) == nil; got != want || got && run.GetState() != to || !got && run.GetState() != from {
				t.Errorf("%s to %s: allowed %v, want %v", stateName(from), stateName(to), got, want)
			}
		}
	}
}
