package inference

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/exit"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/reward"
	"github.com/rollout-rl/rollout/libs/trainstate"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Recorded is the model of a snapshot.
type Recorded struct {
	Snapshot *snapshotv1.Snapshot
	Run      *runv1.Run
	Folder   string // of the weights and the tokenizer
	Digest   string // of the weights
}

// Record writes the model of a snapshot, or of the newest one of a run, into a folder in scratch.
func Record(ctx context.Context, r record.Reader, name string, worker []string, scratch string) (*Recorded, error) {
	snapshot, err := record.SnapshotOf(ctx, r, name)
	if err != nil {
		return nil, err
	}
	status, err := r.Run(ctx, snapshot.GetRunId())
	if err != nil {
		return nil, err
	}
	found := &Recorded{Snapshot: snapshot, Run: status.GetRun(), Folder: filepath.Join(scratch, "weights")}
	if !algorithm.Generates(found.Run.GetPlan().GetConfig()) {
		return nil, scores("the model of run " + snapshot.GetRunId())
	}
	found.Digest, err = record.Export{Reader: r, Worker: worker}.Write(ctx, snapshot, trainstate.Weights, found.Folder)
	return found, err
}

// scores returns the error for a reward model.
func scores(what string) error {
	return exit.New(exit.Data, "choose a model that generates text; use a reward model as `[reward.model]` of a configuration",
		"%s is a reward model: it scores completions and cannot generate them", what)
}

// Generates returns an error for the folder of a reward model. The worker checks everything else.
func Generates(folder string) error {
	var config struct{ Architectures []string }
	text, err := os.ReadFile(filepath.Join(folder, "config.json"))
	if err == nil && json.Unmarshal(text, &config) == nil && len(config.Architectures) > 0 &&
		reward.Scores(config.Architectures[0]) {
		return scores(folder)
	}
	return nil
}

// Folder returns the model that a flag names, a folder or a name on the hub, or else that of a
// configuration whose paths begin at base.
func Folder(flag string, config *configv1.RunConfig, base string) (string, error) {
	path := config.GetModel().GetPath()
	switch {
	case planformat.OnHub("", flag):
		return flag, nil
	case flag != "":
		return filepath.Abs(flag)
	case filepath.IsAbs(path) || planformat.OnHub(base, path):
		return path, nil
	}
	return filepath.Join(base, path), nil
}

// Data returns a dataset as the worker finds it: an absolute path or pattern, or a name on the hub.
func Data(data, base string) (string, error) {
	if planformat.OnHub(base, data) {
		return data, nil
	}
	if !filepath.IsAbs(data) {
		data = filepath.Join(base, data)
	}
	if _, err := os.Stat(data); err != nil && !strings.ContainsAny(data, "*?[") {
		return "", exit.New(exit.NoInput, "correct the path", "cannot read the dataset %s: %w", data, cli.PathCause(err))
	}
	return data, nil
}

// EvalSubset is the subset of the data set that `data.eval` names.
func EvalSubset(data *configv1.DataConfig) string {
	train, _, _ := strings.Cut(data.GetTrain(), "@")
	eval, _, _ := strings.Cut(data.GetEval(), "@")
	if data.EvalSubset == nil && train == eval {
		return data.GetSubset()
	}
	return data.GetEvalSubset()
}
