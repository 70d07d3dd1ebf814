package run

import (
	"strings"
	"testing"

	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

func TestFinishedNamesTheGateThatStoppedTheRun(t *testing.T) {
	t.Parallel()
	run := &runv1.Run{RunId: "run-1", Name: "sums", Step: 40, TotalSteps: 60, WeightsDirectory: "/w"}
	const next = "; its weights are in /w\nto train further, raise `train.steps` or `train.epochs` and run: rollout run --config FILE --from run-1 --continue"
	if got, want := Finished(run), "sums run-1 is finished: it has made all 60 steps"+next; got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
	run.Reason, run.Message = "STOPPED_BY_GATE", "gate good: `eval/reward >= 0.8` holds at step 40: eval/reward is 0.85"
	got := Finished(run)
	if want := "sums run-1 is finished: it was stopped by " + run.GetMessage() + next; got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
	if strings.Contains(got, "all 60 steps") {
		t.Error("a run that a gate stopped has made all steps")
	}
}
