package main

import (
	"encoding/json"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/libs/refusal"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// watched is a fake whose run goes through its story while it is watched.
func watched(t *testing.T) *fake {
	t.Helper()
	f := &fake{directory: t.TempDir(), events: story()}
	f.statuses = []*runv1.RunStatus{f.busy(), {Run: f.run(runv1.RunState_RUN_STATE_SUCCEEDED, 3)}}
	f.state = runv1.RunState_RUN_STATE_SUCCEEDED
	return f
}

func TestRunIsWatchedToTheEnd(t *testing.T) {
	t.Parallel()
	for _, format := range []string{cli.FormatText, cli.FormatJSON} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			f := watched(t)
			got := call{plane: newPlane(t, f)}.run(t, "run", "--config", filepath.Join(project(t), "run.toml"), "--set", "train.steps=3", "--format", format)
			golden(t, "testdata/run/config."+format, strings.ReplaceAll(sortStatus(got.text()), f.directory, "$RUN"))
			if want := "CreatePlan [train.steps=3]\nCreateRun \"the plan\\n\" key true"; f.calls() != want {
				t.Errorf("asked %q", f.calls())
			}
			file, err := os.Open(filepath.Join(f.directory, "report/reward.png"))
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			if image, err := png.Decode(file); err != nil || image.Bounds().Dx() < 800 {
				t.Errorf("the curve: %v %v", image, err)
			}
		})
	}
}

// sortStatus puts the status lines first: statuses and events are two streams, whose lines can
// arrive in any order.
func sortStatus(text string) string {
	var status, other []string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, `{"status"`) {
			status = append(status, line)
		} else {
			other = append(other, line)
		}
	}
	return strings.Join(append(status, other...), "")
}

func TestRunOfAPlanIsVerifiedFirst(t *testing.T) {
	t.Parallel()
	f := watched(t)
	path := filepath.Join(t.TempDir(), "plan.lock")
	write(t, path, "a plan\n")
	got := call{plane: newPlane(t, f)}.run(t, "run", "--plan", path, "--detach")
	if got.code != 0 || got.stdout != runID+"\n" {
		t.Error(got.text())
	}
	if want := "VerifyPlan a plan\n\nCreateRun \"a plan\\n\" key true"; f.calls() != want {
		t.Errorf("asked %q", f.calls())
	}
}

func TestResumeComparesWithEarlierEvaluations(t *testing.T) {
	t.Parallel()
	f := watched(t)
	f.history, f.events = f.events[:4], f.events[4:]
	f.state = runv1.RunState_RUN_STATE_INTERRUPTED
	got := call{plane: newPlane(t, f)}.run(t, "run", "--resume", "addition-grpo")
	if got.code != 0 || f.calls() != "ResumeRun "+runID {
		t.Errorf("%s, asked %q", got.text(), f.calls())
	}
	if strings.Contains(got.stdout, "step 1/3") || !strings.Contains(got.stdout, "step 2/3") {
		t.Errorf("printed again what was before:\n%s", got.stdout)
	}
	if !strings.Contains(got.stdout, "0.512") || !strings.Contains(got.stdout, "0.934") {
		t.Errorf("the comparison lacks what was before:\n%s", got.stdout)
	}
}

func TestFailedRun(t *testing.T) {
	t.Parallel()
	f := watched(t)
	f.events, f.state = append(f.events[:5:5], f.events[len(f.events)-1]), runv1.RunState_RUN_STATE_FAILED
	f.statuses[1] = &runv1.RunStatus{Run: f.run(runv1.RunState_RUN_STATE_FAILED, 1)}
	f.events[5].Attributes["state"] = "FAILED" // the end of the story
	got := call{plane: newPlane(t, f)}.run(t, "run", "--resume", runID)
	golden(t, "testdata/run/failed.text", strings.ReplaceAll(sortStatus(got.text()), f.directory, "$RUN"))
	if got.code != 70 {
		t.Errorf("exit %d", got.code)
	}
	page := read(t, filepath.Join(f.directory, "report/index.html"))
	if !strings.Contains(page, "The run failed: WORKER_CRASH_LOOP: inference-0 left 6 times") {
		t.Errorf("the report does not say why the run failed:\n%s", page)
	}
}

// A rejected gradient pauses the run: watching ends with the reason and commands to continue.
func TestRefusedGradient(t *testing.T) {
	t.Parallel()
	f := watched(t)
	f.events, f.state = append(f.events[:5:5], f.events[len(f.events)-1]), runv1.RunState_RUN_STATE_PAUSED
	paused := f.run(runv1.RunState_RUN_STATE_PAUSED, 1)
	paused.Reason, paused.Message = refusal.Exploding, "step 2: gradient norm 3e5. The batch is kept in "+f.directory+"/refused/step-000002.npz"
	f.statuses[1] = &runv1.RunStatus{Run: paused}
	f.events[5].Attributes["state"], f.events[5].Attributes["reason"] = "PAUSED", refusal.Exploding
	got := call{plane: newPlane(t, f)}.run(t, "run", "--resume", runID, "--no-report")
	golden(t, "testdata/run/refused.text", strings.ReplaceAll(sortStatus(got.text()), f.directory, "$RUN"))
	if got.code != 70 {
		t.Errorf("exit %d", got.code)
	}
}

// The first Ctrl-C drains the run and the second stops it immediately; both are printed.
func TestInterrupts(t *testing.T) {
	t.Parallel()
	f := watched(t)
	f.events, f.statuses, f.finish = nil, f.statuses[:1], make(chan runv1.RunState, 1)
	interrupts := make(chan os.Signal, 1)
	interrupts <- os.Interrupt
	f.onAsk = func(what string) {
		switch what {
		case "CancelRun " + runID + " drain true":
			interrupts <- os.Interrupt
		case "CancelRun " + runID + " drain false":
			f.finish <- runv1.RunState_RUN_STATE_CANCELLED
		}
	}
	got := call{plane: newPlane(t, f), interrupts: interrupts}.run(t, "run", "--resume", runID)
	if got.code != 130 {
		t.Errorf("exit %d", got.code)
	}
	for _, want := range []string{"stopping after the current step; press Ctrl-C again to stop immediately", "stopping immediately", "CANCELLED", "rollout run --resume " + runID} {
		if !strings.Contains(got.stdout, want) {
			t.Errorf("it does not say %q:\n%s", want, got.stdout)
		}
	}
}

func TestThirdInterruptDetaches(t *testing.T) {
	t.Parallel()
	f := watched(t)
	f.events, f.statuses, f.finish = nil, f.statuses[:1], make(chan runv1.RunState)
	interrupts := make(chan os.Signal, 3)
	for range 3 {
		interrupts <- os.Interrupt
	}
	got := call{plane: newPlane(t, f), interrupts: interrupts}.run(t, "run", "--resume", runID)
	if got.code != 130 || !strings.Contains(got.stderr, "the run continues") {
		t.Error(got.text())
	}
}

func TestLostServerIsReported(t *testing.T) {
	t.Parallel()
	f := watched(t)
	f.events, f.statuses, f.finish = nil, f.statuses[:1], make(chan runv1.RunState)
	plane := newPlane(t, f)
	f.onWatch = func() { go plane.stop() }
	got := call{plane: plane}.run(t, "run", "--resume", runID)
	if got.code != 69 || !strings.Contains(got.stderr, "the connection to the control plane was lost") || !strings.Contains(got.stderr, "rollout run --resume "+runID) {
		t.Error(got.text())
	}
}

func TestReport(t *testing.T) {
	t.Parallel()
	f := &fake{directory: t.TempDir(), history: story(), state: runv1.RunState_RUN_STATE_SUCCEEDED}
	out := filepath.Join(t.TempDir(), "out")
	got := call{plane: newPlane(t, f)}.run(t, "report", "addition-grpo", "--server", "here", "--out", out, "--format", "json")
	var paths struct{ PNG, HTML string }
	if err := json.Unmarshal([]byte(got.stdout), &paths); err != nil || got.code != 0 {
		t.Fatal(got.text())
	}
	page := read(t, paths.HTML)
	golden(t, "testdata/run/report.html", strings.ReplaceAll(page, f.directory, "$RUN"))
	for _, banned := range []string{"http://", "https://", "<script", "src="} {
		if strings.Contains(page, banned) {
			t.Errorf("the page needs the network: it has %q", banned)
		}
	}
	if got := (call{plane: newPlane(t, f)}).run(t, "report", "addition-grpo", "--server", "here", "--out", "/proc/nowhere"); got.code != 73 {
		t.Error(got.text())
	}
}
