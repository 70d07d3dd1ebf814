package planner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	planformat "github.com/rollout-rl/rollout/libs/plan"
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
	made := planformat.Inputs(request.GetInputsDirectory())
	if made == "" || lacks(made, plan) {
		made = s.inputs
		if err := s.restore(ctx, plan, request.GetBaseDir()); err != nil {
			return nil, err
		}
	}
	changed := make([]*planv1.Problem, len(inputs))
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, in := range inputs {
		group.Go(func() error {
			if err := groupCtx.Err(); err != nil {
				return err
			}
			changed[i] = compare(made, request.GetBaseDir(), in)
			return nil
		})
	}
	var answer *probe.Answer
	var probeErr error
	if len(plan.GetPackages())+len(plan.GetPlugins()) > 0 {
		request := probe.Request{Packages: slices.Sorted(maps.Keys(plan.GetPackages()))}
		for _, pinned := range plan.GetPlugins() {
			request.Plugins = append(request.Plugins, pinned.GetName())
		}
		answer, probeErr = s.prober.Ask(ctx, request)
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
		problems = append(problems, pluginProblems(plan, answer, request.GetFile())...)
	}
	response := &planv1.VerifyPlanResponse{Problems: problems, Plan: plan}
	if slices.ContainsFunc(inputs, planformat.Made) {
		response.InputsDirectory = string(made)
	}
	return response, nil
}

// restore makes rows and downloads models again that a plan has and the planner's folder lacks, at
// the pinned commits. What it can't make is missing in the comparison that follows.
func (s *Server) restore(ctx context.Context, plan *planv1.Plan, baseDir string) error {
	if !lacks(s.inputs, plan) {
		return nil
	}
	_, _, err := s.checks(s.reader.Again(plan.GetConfig()), baseDir, plan.GetInputs()).plan(ctx, nil)
	if errors.Is(err, ErrInputUnreadable) {
		return nil
	}
	return err
}

// lacks reports whether a folder of inputs lacks what the planner made or downloaded for a plan.
func lacks(made planformat.Inputs, plan *planv1.Plan) bool {
	return slices.ContainsFunc(plan.GetInputs(), func(in *planv1.Input) bool {
		_, err := os.Stat(made.Locate("", in))
		return planformat.Made(in) && err != nil
	})
}

// compare reads one input again, and the files of the user that it was made from; nil if they are
// unchanged.
func compare(made planformat.Inputs, baseDir string, in *planv1.Input) *planv1.Problem {
	for _, source := range in.GetSources() {
		for _, file := range source.GetFiles() {
			was := &planv1.Input{Role: in.GetRole(), Path: file.GetPath(), Digest: file.GetDigest(), Bytes: file.GetBytes()}
			if p := compare(made, baseDir, was); p != nil {
				return p
			}
		}
	}
	p := &planv1.Problem{Reason: problem.InputChanged, File: in.GetPath(), Fix: "restore the file, or create the plan again with `rollout plan`"}
	if planformat.Made(in) {
		p.Fix = "create the plan again with `rollout plan`, which reports why it can't be made"
	}
	digest, size, err := input.DigestFile(made.Locate(baseDir, in))
	switch {
	case errors.Is(err, os.ErrNotExist):
		p.Reason, p.Message = problem.MissingFile, fmt.Sprintf("the %s is missing", role(in.GetRole()))
		if !planformat.Made(in) && !filepath.IsAbs(in.GetPath()) {
			p.Fix = fmt.Sprintf("restore the file, name the folder to which the path is relative with --base-dir instead of %s, or create the plan again with `rollout plan`", baseDir)
		}
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
	case planv1.InputRole_INPUT_ROLE_SUITE_DATA:
		return "data of a suite"
	case planv1.InputRole_INPUT_ROLE_MODEL:
		return "model file"
	case planv1.InputRole_INPUT_ROLE_REWARD:
		return "source of the reward"
	case planv1.InputRole_INPUT_ROLE_ENVIRONMENT:
		return "source of the environment"
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

// pluginProblems compares the installed packages of plugins with those of a plan. A package of data
// sources alone is not compared: the rows have their digest.
func pluginProblems(plan *planv1.Plan, answer *probe.Answer, file string) []*planv1.Problem {
	var out []*planv1.Problem
	for _, want := range plan.GetPlugins() {
		if slices.Equal(want.GetKinds(), []string{"data_source"}) {
			continue
		}
		got := answer.Plugins[want.GetName()]
		p := &planv1.Problem{
			Reason: problem.PluginChanged, File: file, Field: "plugins." + want.GetName(),
			Fix: fmt.Sprintf("install %s==%s, or create the plan again with `rollout plan`", want.GetName(), want.GetVersion()),
		}
		switch {
		case got == nil:
			p.Message = fmt.Sprintf("the plan has plugins of %s %s, which is not installed", want.GetName(), want.GetVersion())
		case got.Version != want.GetVersion():
			p.Message = fmt.Sprintf("the plan has plugins of %s %s, but %s is installed", want.GetName(), want.GetVersion(), got.Version)
		case got.Digest != want.GetDigest():
			p.Message = fmt.Sprintf("the files of %s %s changed since the plan was made: %s became %s", want.GetName(), want.GetVersion(), want.GetDigest()[:15], got.Digest[:15])
		default:
			continue
		}
		out = append(out, p)
	}
	return out
}
