package inference

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/exit"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/reward"
	"github.com/rollout-rl/rollout/libs/trainstate"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
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

// Rows is a dataset as the worker reads it. Subset and Split are of a data set that has some.
type Rows struct{ Path, Subset, Split string }

// Rows returns the rows that `data.eval` of a configuration names, whose paths begin at base. Those
// of the run are the ones of its plan, if they are of the hub or of a data source. r may be nil: no
// run.
func (r *Recorded) Rows(config *configv1.RunConfig, base string) (rows Rows, err error) {
	data := config.GetData()
	rows = Rows{Subset: evalSubset(data), Split: data.GetEvalSplit()}
	name := data.GetEval()
	if in := r.evalData(name); in != nil {
		switch from := in.GetSources()[0]; {
		case from.GetRevision() != "":
			name = from.GetPath() + "@" + from.GetRevision()
		case planformat.IsPlugin(name):
			path := planformat.InputsOf(r.Run.GetDirectory()).Locate(r.Run.GetBaseDir(), in)
			if _, err := os.Stat(path); err != nil {
				return rows, exit.New(exit.NoInput, "write its rows to a file and name that, or run this on the host of the control plane",
					"cannot read the rows of the data source %s that run %s has stored: %w", name, r.Run.GetRunId(), cli.PathCause(err))
			}
			return Rows{Path: path}, nil
		}
	}
	rows.Path, err = Data(name, base)
	return rows, err
}

// evalData returns the input of the run's evaluations, if it is what name names and the planner
// made it; else nil.
func (r *Recorded) evalData(name string) *planv1.Input {
	if r == nil || name != r.Run.GetPlan().GetConfig().GetData().GetEval() {
		return nil
	}
	inputs := r.Run.GetPlan().GetInputs()
	i := slices.IndexFunc(inputs, func(in *planv1.Input) bool {
		return in.GetRole() == planv1.InputRole_INPUT_ROLE_EVAL_DATA && len(in.GetSources()) > 0
	})
	if i < 0 {
		return nil
	}
	return inputs[i]
}

// Data returns a dataset as the worker finds it: an absolute path or pattern, or a name on the hub.
func Data(data, base string) (string, error) {
	if planformat.IsPlugin(data) {
		return "", &exit.Error{
			Code: exit.Data, Reason: "DATA_SOURCE_UNPLANNED", Fix: "write its rows to a JSON Lines file and name that",
			Err: fmt.Errorf("the rows of the data source %s are those of a plan: only a run that evaluates on them has them", data),
		}
	}
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

// evalSubset is the subset of the data set that `data.eval` names.
func evalSubset(data *configv1.DataConfig) string {
	train, _, _ := strings.Cut(data.GetTrain(), "@")
	eval, _, _ := strings.Cut(data.GetEval(), "@")
	if data.EvalSubset == nil && train == eval {
		return data.GetSubset()
	}
	return data.GetEvalSubset()
}
