package planner

import (
	"context"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"

	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/reward"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/config"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/lock"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// ErrInputUnreadable says that a file vanished or failed while it was read.
var ErrInputUnreadable = rpcerr.New(codes.FailedPrecondition, "INPUT_UNREADABLE", "an input can't be read")

// draft is a plan in the making.
type draft struct {
	*config.Reading
	server  *Server
	baseDir string
	inputs  []*planv1.Input

	warnings problem.List // what may be meant

	train, eval *input.Dataset // nil where something is wrong with them
	first       *input.Dataset // the rows that the reward scores, for its dry call, whatever is wrong with some of them
	model       *input.Model

	policy, teacher []*planv1.Input // files of the model that is trained, and of the one that teaches it
}

func (s *Server) create(ctx context.Context, source *planv1.ConfigSource) (*planv1.CreatePlanResponse, error) {
	d := &draft{Reading: s.reader.Read(source), server: s, baseDir: source.GetBaseDir()}
	plan, data, err := d.plan(ctx)
	if err != nil || plan == nil {
		return &planv1.CreatePlanResponse{Problems: d.Sorted()}, err
	}
	return &planv1.CreatePlanResponse{Plan: plan, Lock: data, Warnings: d.warnings.Sorted()}, nil
}

// renew plans a configuration again that was planned before. Its text is not at hand, so its problems have no place.
func (s *Server) renew(ctx context.Context, old *planv1.Plan, baseDir string) (*planv1.RenewPlanResponse, error) {
	d := &draft{Reading: s.reader.Again(old.GetConfig()), server: s, baseDir: baseDir}
	plan, data, err := d.plan(ctx)
	if err != nil || plan == nil {
		return &planv1.RenewPlanResponse{Problems: d.Sorted()}, err
	}
	return &planv1.RenewPlanResponse{Plan: plan, Lock: data}, nil
}

// plan checks everything and pins it. The plan is nil where there are problems.
func (d *draft) plan(ctx context.Context) (*planv1.Plan, []byte, error) {
	if err := d.read(); err != nil {
		return nil, nil, ErrInputUnreadable.Wrap(err)
	}
	packages, err := d.probe(ctx)
	if err != nil || !d.Problems.Empty() {
		return nil, nil, err
	}
	if err := input.Digest(ctx, d.baseDir, d.inputs); err != nil {
		return nil, nil, ErrInputUnreadable.Wrap(err)
	}
	d.teachesItself()
	slices.SortFunc(d.inputs, func(a, b *planv1.Input) int {
		if a.GetRole() != b.GetRole() {
			return int(a.GetRole()) - int(b.GetRole())
		}
		return strings.Compare(a.GetPath(), b.GetPath())
	})
	plan := &planv1.Plan{Format: planformat.Format, Config: d.Config, Inputs: d.inputs, Packages: packages}
	data, err := lock.Write(plan)
	return plan, data, err
}

// read reads every file that the configuration names, as far as it could be read itself.
func (d *draft) read() error {
	cfg := d.Config
	var err error
	if d.train, err = d.dataset("data.train", cfg.GetData().GetTrain(), planv1.InputRole_INPUT_ROLE_TRAIN_DATA); err != nil {
		return err
	}
	if d.eval, err = d.dataset("data.eval", cfg.GetData().GetEval(), planv1.InputRole_INPUT_ROLE_EVAL_DATA); err != nil {
		return err
	}
	d.heldOut()
	d.readModel(cfg.GetModel().GetPath())
	d.readTeacher(cfg.GetAlgorithm().GetDistillation().GetTeacher())
	d.readRewards()
	d.readSinks()
	return nil
}

// probe makes the dry calls, all at a time, and returns the versions of packages.
func (d *draft) probe(ctx context.Context) (map[string]string, error) {
	var packages map[string]string
	var about *probe.Answer
	var aboutErr error
	caller := ctx
	group, ctx := errgroup.WithContext(caller)
	group.Go(func() error {
		about, aboutErr = d.server.prober.Ask(ctx, probe.Request{
			Packages: append(d.sinkPackages(), d.wanted()...), Tokenizer: d.tokenizerRequest(),
			WandbKey: d.Config.GetSinks().GetWandb().GetMode() == "online",
		})
		return nil
	})
	calls := d.dryCalls()
	for _, call := range calls {
		group.Go(func() error {
			call.answer, call.err = d.server.prober.Ask(ctx, probe.Request{Reward: call.request})
			return nil
		})
	}
	var taught *probe.Answer
	var taughtErr error
	if request := d.teacherRequest(); request != nil {
		group.Go(func() error {
			taught, taughtErr = d.server.prober.Ask(ctx, probe.Request{Teacher: request})
			return nil
		})
	}
	_ = group.Wait()
	if err := caller.Err(); err != nil {
		return nil, err
	}
	if aboutErr != nil {
		d.Problems.Add(probeProblem(aboutErr))
	} else {
		packages = d.packages(about)
		d.sinkAnswer(about)
		d.tokenizerAnswer(about)
	}
	for _, call := range calls {
		d.heard(call, aboutErr == nil)
	}
	d.teacherAnswer(taught, taughtErr)
	return packages, nil
}

// wanted are the packages that decide what the run computes.
func (d *draft) wanted() []string {
	names := slices.Clone(probe.Packages)
	if slices.ContainsFunc(reward.Parts(d.Config), func(part reward.Part) bool { return part.Expression != "" }) {
		names = append(names, "cel-python")
	}
	if d.Config.GetTrain().GetOptimizer() == "adamw_8bit" {
		names = append(names, "bitsandbytes")
	}
	return names
}
