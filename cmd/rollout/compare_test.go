package main

import (
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
	schedulerstore "github.com/rollout-rl/rollout/services/scheduler/sqlstore"
	snapshotstore "github.com/rollout-rl/rollout/services/snapshot/sqlstore"
	storagestore "github.com/rollout-rl/rollout/services/storage/sqlstore"
)

const otherID = "run-01kapr4p8jz3gq5p1cs0e8q0vd"

// twoRuns is a state folder with the story of a run, and a second run with DAPO, another rate,
// another dataset, higher rewards, and one step less.
func twoRuns(t *testing.T) (state string) {
	t.Helper()
	state = t.TempDir()
	place := sqldb.Files(filepath.Join(state, "db"))
	runs, events := sqldbtest.Store(t, place, schedulerstore.Open), sqldbtest.Store(t, place, storagestore.Open)
	sqldbtest.Store(t, place, snapshotstore.Open)
	first, second := (&fake{}).run(runv1.RunState_RUN_STATE_SUCCEEDED, 3), (&fake{}).run(runv1.RunState_RUN_STATE_CANCELLED, 2)
	second.RunId, second.Name, second.EndTime = otherID, "addition-dapo", at(45)
	config := second.GetPlan().GetConfig()
	config.Name, config.Train.LearningRate = proto.String("addition-dapo"), proto.Float64(3e-4)
	config.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Dapo{Dapo: &configv1.DapoConfig{Loss: &configv1.PolicyLossConfig{ClipHigh: proto.Float64(0.28)}}}}
	second.Plan.Inputs[0].Digest = "blake3-" + strings.Repeat("99", 32)
	var others []*eventv1.Event
	for _, e := range story() {
		if e.GetStep() == 3 {
			continue
		}
		e.EventId, e.RunId = "other-"+e.GetEventId(), otherID
		for name := range e.GetMetrics() {
			if strings.HasSuffix(name, "reward/mean") || name == "eval/reward" {
				e.Metrics[name] += 0.05
			}
		}
		others = append(others, e)
	}
	for _, run := range []*runv1.Run{first, second} {
		if _, err := runs.Create(t.Context(), run, run.GetRunId(), scheduler.Cursor{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, list := range [][]*eventv1.Event{story(), others} {
		if _, err := events.Append(t.Context(), list); err != nil {
			t.Fatal(err)
		}
	}
	return state
}

func TestCompare(t *testing.T) {
	t.Parallel()
	state, out := twoRuns(t), t.TempDir()
	compare := func(args ...string) result {
		return call{}.run(t, append([]string{"compare", "--state-dir", state}, args...)...)
	}
	got := compare("addition-grpo", "addition-dapo")
	golden(t, "testdata/command/compare.text", strings.ReplaceAll(got.text(), state, "STATE"))
	got = compare("addition-grpo", "addition-dapo", "--format", "json", "--metric", "eval/accuracy")
	golden(t, "testdata/command/compare.json", got.text())
	page, picture := filepath.Join(out, "page.html"), filepath.Join(out, "curves.png")
	if got := compare("addition-grpo", otherID[:12], "--html", page, "--png", picture); got.code != 0 || !strings.Contains(got.stderr, "wrote "+page) {
		t.Fatal(got.text())
	}
	text := read(t, page)
	golden(t, "testdata/command/compare.html", text)
	for _, banned := range []string{"http://", "https://", "<script", "src="} {
		if strings.Contains(text, banned) {
			t.Errorf("the page needs the network: it has %q", banned)
		}
	}
	file, err := os.Open(picture)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if image, err := png.Decode(file); err != nil || image.Bounds().Dx() < 800 {
		t.Errorf("%v %v", image, err)
	}
}

func TestCompareRefuses(t *testing.T) {
	t.Parallel()
	state := twoRuns(t)
	for text, args := range map[string][]string{
		"no run has the metric":    {"addition-grpo", "addition-dapo", "--metric", "rewards"},
		"cannot write":             {"addition-grpo", "addition-dapo", "--html", "/proc/nowhere/x.html"},
		"requires at least 2 arg":  {"addition-grpo"},
		`run "unknown" does not`:   {"addition-grpo", "unknown"},
		"`rollout runs list`":      {"addition-grpo", "unknown"},
		"eval/accuracy, eval/":     {"addition-grpo", "addition-dapo", "--metric", "rewards"},
		"is named twice":           {runID, runID},
		"name different runs":      {runID, runID},
		"no daemon is running in ": {"a", "b", "--state-dir", filepath.Join(state, "none")},
	} {
		got := call{}.run(t, append([]string{"compare", "--state-dir", state}, args...)...)
		if got.code == 0 || !strings.Contains(got.stderr, text) {
			t.Errorf("%s: %s", text, got.text())
		}
	}
}
