package planner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/lock"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

func (s *Server) verify(ctx context.Context, request *planv1.VerifyPlanRequest) (*planv1.VerifyPlanResponse, error) {
	plan, problems := lock.Read(request.GetLock(), request.GetFile())
	if plan == nil {
		return &planv1.VerifyPlanResponse{Problems: problems}, nil
	}
	inputs := plan.GetInputs()
	changed := make([]*planv1.Problem, len(inputs))
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, in := range inputs {
		group.Go(func() error {
			if err := groupCtx.Err(); err != nil {
				return err
			}
			changed[i] = compare(request.GetBaseDir(), in)
			return nil
		})
	}
	var answer *probe.Answer
	var probeErr error
	if len(plan.GetPackages()) > 0 {
		answer, probeErr = s.prober.Ask(ctx, probe.Request{Packages: slices.Sorted(maps.Keys(plan.GetPackages()))})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	for _, p := range changed {
		if p != nil {
			problems = append(problems, p)
		}
	}
	if probeErr != nil {
		problems = append(problems, probeProblem(probeErr))
	} else if answer != nil {
		problems = append(problems, packageProblems(plan, answer, request.GetFile())...)
	}
	return &planv1.VerifyPlanResponse{Problems: problems, Plan: plan}, nil
}

// compare reads one input again; nil if it is unchanged.
func compare(baseDir string, in *planv1.Input) *planv1.Problem {
	p := &planv1.Problem{Reason: problem.InputChanged, File: in.GetPath(), Fix: "restore the file, or create the plan again with `rollout plan`"}
	digest, size, err := input.DigestFile(input.Resolve(baseDir, in.GetPath()))
	switch {
	case errors.Is(err, os.ErrNotExist):
		p.Reason, p.Message = problem.MissingFile, fmt.Sprintf("the %s is missing", role(in.GetRole()))
	case err != nil:
		p.Reason, p.Message = problem.MissingFile, fmt.Sprintf("the %s can't be read: %v", role(in.GetRole()), err)
	case digest != in.GetDigest():
		p.Message = fmt.Sprintf("the %s changed since the plan was made: %s (%d bytes) became %s (%d bytes)",
			role(in.GetRole()), in.GetDigest()[:15], in.GetBytes(), digest[:15], size)
	default:
		return nil
	}
	return p
}

func role(role planv1.InputRole) string {
	switch role {
	case planv1.InputRole_INPUT_ROLE_TRAIN_DATA:
		return "training data"
	case planv1.InputRole_INPUT_ROLE_EVAL_DATA:
		return "held-out data"
	case planv1.InputRole_INPUT_ROLE_MODEL:
		return "model file"
	case planv1.InputRole_INPUT_ROLE_REWARD:
		return "source of the reward"
	}
	return "input"
}

func packageProblems(plan *planv1.Plan, answer *probe.Answer, file string) []*planv1.Problem {
	var out []*planv1.Problem
	for _, name := range slices.Sorted(maps.Keys(plan.GetPackages())) {
		want, got := plan.GetPackages()[name], answer.Packages[name]
		if name == "python" {
			got = &answer.Python
		}
		switch {
		case got == nil:
			out = append(out, &planv1.Problem{
				Reason: problem.PackageChanged, File: file, Field: "packages." + name,
				Message: fmt.Sprintf("the plan was made with %s %s, which is not installed", name, want),
				Fix:     fmt.Sprintf("install %s==%s, or create the plan again with `rollout plan`", name, want),
			})
		case *got != want:
			out = append(out, &planv1.Problem{
				Reason: problem.PackageChanged, File: file, Field: "packages." + name,
				Message: fmt.Sprintf("the plan was made with %s %s, but %s is installed", name, want, *got),
				Fix:     fmt.Sprintf("install %s==%s, or create the plan again with `rollout plan`", name, want),
			})
		}
	}
	return out
}
