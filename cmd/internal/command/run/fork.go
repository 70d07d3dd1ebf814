package run

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/problem"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// InputsChanged reports whether the control plane refused a plan because its inputs have changed.
func InputsChanged(err error) bool { return rpcerr.Reason(err) == "PLAN_INPUTS_CHANGED" }

// Fork starts a new run with the configuration of an old one, overrides of it, and the current
// inputs, from a snapshot or, if that is nil, from the beginning. The old run is not changed: its
// ledger belongs to its plan.
func Fork(ctx context.Context, env *cli.Env, c *client.Client, old *runv1.Run, from *snapshotv1.Snapshot, set ...string) (*runv1.Run, error) {
	renewed, err := c.Planner.RenewPlan(ctx, &planv1.RenewPlanRequest{Plan: old.GetPlan(), BaseDir: old.GetBaseDir(), Set: set})
	if err != nil {
		return nil, err
	}
	if problems := renewed.GetProblems(); len(problems) > 0 {
		err := env.Message(renewed, func() string { return problem.Render(problems, env.Style()) })
		return nil, errors.Join(err, problem.Exit(problems))
	}
	run, err := create(ctx, c, old.GetProject(), renewed.GetLock(), old.GetBaseDir(), from.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	start := "starts from the beginning, because the run has no snapshot"
	if from != nil {
		start = fmt.Sprintf("starts from its snapshot %s of step %s", from.GetSnapshotId(), output.Count(from.GetStep()))
		if old.GetStep() > from.GetStep() {
			start += fmt.Sprintf(" (the old run made %s steps)", output.Count(old.GetStep()))
		}
	}
	changes := "Changed inputs: " + strings.Join(differences(old.GetPlan(), renewed.GetPlan()), ", ")
	if len(set) > 0 {
		changes += ". Changed settings: " + strings.Join(set, ", ")
	}
	env.Note("%s is not changed; the new run %s %s. %s", old.GetRunId(), run.GetRunId(), start, changes)
	return run, nil
}

// differences lists the inputs and packages in which two plans differ.
func differences(before, after *planv1.Plan) []string {
	digests := func(plan *planv1.Plan) map[string]string {
		out := map[string]string{}
		for _, in := range plan.GetInputs() {
			out[in.GetPath()] = in.GetDigest()
		}
		for name, version := range plan.GetPackages() {
			out[name+" (package)"] = version
		}
		return out
	}
	was, is := digests(before), digests(after)
	names := maps.Clone(was)
	maps.Copy(names, is)
	var out []string
	for _, name := range slices.Sorted(maps.Keys(names)) {
		switch {
		case was[name] == is[name]:
		case was[name] == "":
			out = append(out, name+" (new)")
		case is[name] == "":
			out = append(out, name+" (removed)")
		default:
			out = append(out, name)
		}
	}
	if len(out) == 0 {
		out = append(out, "nothing")
	}
	return out
}

// newest returns the newest snapshot that a run can be restored from, else the one that the run
// started from; nil if there is neither.
func newest(ctx context.Context, c *client.Client, run *runv1.Run) (*snapshotv1.Snapshot, error) {
	response, err := c.Snapshot.ListSnapshots(ctx, &snapshotv1.ListSnapshotsRequest{
		RunId: run.GetRunId(), Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, PageSize: 1,
	})
	if err != nil {
		return nil, err
	}
	if len(response.GetSnapshots()) > 0 {
		return response.GetSnapshots()[0], nil
	}
	if run.GetFromSnapshot() == "" {
		return nil, nil
	}
	got, err := c.Snapshot.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: run.GetFromSnapshot()})
	return got.GetSnapshot(), err
}

// startingPoint returns the snapshot that --from names, by its id or by its run; nil without a
// name.
func startingPoint(ctx context.Context, c *client.Client, name string) (*snapshotv1.Snapshot, error) {
	if name == "" {
		return nil, nil
	}
	if strings.HasPrefix(name, "snap-") {
		got, err := c.Snapshot.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: name})
		return got.GetSnapshot(), err
	}
	got, err := c.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: name})
	if err != nil {
		return nil, err
	}
	run := got.GetStatus().GetRun()
	from, err := newest(ctx, c, run)
	if err == nil && from == nil {
		err = exit.New(exit.NoInput, "start without --from, or choose a snapshot of `rollout snapshot list`", "run %s has no snapshot", run.GetRunId())
	}
	return from, err
}

// startWith makes the weights of a snapshot the model of a configuration: a run of it starts at
// step 0. The plan pins the copy of the weights, so the run does not depend on the snapshot.
func startWith(ctx context.Context, env *cli.Env, c *client.Client, source *planv1.ConfigSource, from *snapshotv1.Snapshot) error {
	models, err := env.Plane.ModelsDir(source.GetBaseDir())
	if err != nil {
		return err
	}
	var worker cli.WorkerFlag // its default: it merges adapters
	folder, err := record.Export{Reader: record.Services{Client: c}, Worker: worker.Command()}.Keep(ctx, from, models)
	if err != nil {
		return err
	}
	source.Set = append(slices.Clone(source.GetSet()), fmt.Sprintf("model.path=%q", folder))
	env.Note("the run starts at step 0 with the weights of %s (step %s of %s) instead of the configuration's model, copied to %s; --continue would keep the step, the optimizer, and the position in the data",
		from.GetSnapshotId(), output.Count(from.GetStep()), from.GetRunId(), folder)
	return nil
}
