package planner

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/probe"
)

// The plan reports what trackers lack.
func TestPlanChecksTrackers(t *testing.T) {
	t.Parallel()
	dir := project(t, "def exact(samples):\n    return [1.0] * len(samples)\n")
	s := server(t)
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	s.prober.Env = append(s.prober.Env, "WANDB_API_KEY=", "NETRC="+filepath.Join(dir, "file"))
	for set, want := range map[string]string{
		`sinks.wandb={}`:                                      "",
		`sinks.wandb={mode="online"}`:                         "needs an API key of Weights & Biases",
		`sinks.wandb={mode="onlin"}`:                          `did you mean "online"?`,
		`sinks.tensorboard={directory="file"}`:                "file is a file, not a folder",
		`sinks.tensorboard={}`:                                "",
		`sinks.mlflow={tracking_uri="http://me:secret@host"}`: "`sinks.mlflow.tracking_uri`",
		`sinks.aim={}`:                                        "unknown table [sinks.aim]",
		`sinks={}`:                                            "",
	} {
		got := ""
		for _, p := range create(t, s, dir, set).GetProblems() {
			got += fmt.Sprintln(p.GetReason(), p.GetField(), p.GetMessage(), p.GetFix())
		}
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", set, got, want)
		}
	}
	with := server(t)
	with.prober.Env = append(with.prober.Env, "WANDB_API_KEY=k")
	if got := create(t, with, dir, `sinks.wandb={mode="online"}`); got.GetPlan() == nil {
		t.Error(got.GetProblems())
	}
	if plan := create(t, s, dir).GetPlan(); plan.GetConfig().GetSinks() != nil {
		t.Errorf("the plan has sinks without a table: %v", plan.GetConfig().GetSinks())
	}
}

func checksOf(t *testing.T, s *Server, dir string, set ...string) *checks {
	t.Helper()
	return s.checks(s.reader.Read(&planv1.ConfigSource{Toml: []byte(configText), File: "run.toml", BaseDir: dir, Set: set}), dir, nil)
}

func TestMissingTrackerLibraryNamesItsExtra(t *testing.T) {
	t.Parallel()
	s := server(t)
	dir := project(t, "def exact(samples):\n    return [1.0] * len(samples)\n")
	d := checksOf(t, s, dir, "sinks.mlflow={}", "sinks.tensorboard={}")
	there := "2.21.0"
	d.trackers.answer(&probe.Answer{Packages: map[string]*string{"tensorboard": &there}})
	problems := d.Sorted()
	if len(problems) != 1 || problems[0].GetReason() != "PACKAGE_MISSING" || !strings.Contains(problems[0].GetFix(), "rollout-workers[mlflow]") {
		t.Errorf("%v", problems)
	}
	d = checksOf(t, s, dir, "sinks.mlflow={}")
	d.trackers.answer(&probe.Answer{Packages: map[string]*string{"mlflow-skinny": &there}})
	if problems := d.Sorted(); len(problems) != 0 {
		t.Errorf("%v", problems)
	}
}
