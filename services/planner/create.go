package planner

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"

	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/suite"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/config"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/lock"
	"github.com/rollout-rl/rollout/services/planner/probe"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// ErrInputUnreadable reports a file that was removed or failed while it was read.
var ErrInputUnreadable = rpcerr.New(codes.FailedPrecondition, "INPUT_UNREADABLE", "an input cannot be read")

// checks are the checks of one configuration. Each reads the configuration and reports its
// findings; what one check reads from another is an argument.
type checks struct {
	*config.Reading
	findings findings
	files    *files
	prober   *probe.Prober
	sources  *sourceCheck
	data     *dataCheck
	engine   *engineCheck
	model    *modelCheck
	prompts  *promptCheck
	rewards  *rewardCheck
	suites   map[string]*rewardCheck // those with a reward
	teacher  *teacherCheck
	episodes *environmentCheck
	acting   *multistepCheck
	trackers *trackerCheck
	packages *packageCheck
	train    *trainCheck
	memory   *memoryCheck

	report *planv1.MemoryReport // once plan has returned; nil: the shape of the model is not known
}

// checks are those of a configuration. pinned are the inputs of an older plan, whose commits of the
// hub are used again.
func (s *Server) checks(reading *config.Reading, baseDir string, pinned []*planv1.Input) *checks {
	cfg := reading.Config
	found := findings{keys: reading, problems: &reading.Problems, warnings: &problem.List{}}
	files := &files{findings: found, baseDir: baseDir, made: s.inputs, models: map[string]fetched{}, plugins: map[string]*planv1.PluginPackage{}}
	data := &dataCheck{config: cfg, findings: found, files: files, pinned: map[*input.Dataset]*planv1.Input{}}
	return &checks{
		Reading: reading, findings: found, files: files, prober: s.prober, data: data,
		sources:  &sourceCheck{config: cfg, findings: found, files: files, prober: s.prober, pinned: pinned, prepared: map[string]preparedRows{}},
		engine:   &engineCheck{config: cfg.GetEngine(), findings: found, files: files, prober: s.prober},
		model:    &modelCheck{config: cfg, findings: found, models: files, engines: s.engines},
		prompts:  &promptCheck{config: cfg, findings: found, python: files, rows: data},
		rewards:  &rewardCheck{config: cfg, table: "reward", findings: found, files: files},
		suites:   suiteRewards(cfg, found, files),
		teacher:  &teacherCheck{config: cfg, findings: found, models: files, python: files},
		episodes: &environmentCheck{config: cfg.GetEnvironment(), findings: found, files: files},
		acting:   &multistepCheck{config: cfg, findings: found, files: files},
		trackers: &trackerCheck{sinks: cfg.GetSinks(), findings: found, resolve: files.resolve, python: s.prober.Python},
		packages: &packageCheck{config: cfg, problems: found.problems, python: s.prober.Python},
		train:    &trainCheck{train: cfg.GetTrain(), findings: found},
		memory:   &memoryCheck{config: cfg, findings: found, host: s.host},
	}
}

// suiteRewards are the checks of the suites that the run evaluates that have a reward.
func suiteRewards(cfg *configv1.RunConfig, found findings, files *files) map[string]*rewardCheck {
	out := map[string]*rewardCheck{}
	for _, name := range suite.InRun(cfg) {
		if cfg.GetEval().GetSuites()[name].GetReward() != nil {
			out[name] = &rewardCheck{config: suite.Config(cfg, name), table: "eval.suites." + name + ".reward", findings: found, files: files}
		}
	}
	return out
}

func (s *Server) create(ctx context.Context, in *planv1.CreatePlanRequest) (*planv1.CreatePlanResponse, error) {
	c := s.checks(s.reader.Read(in.GetSource()), in.GetSource().GetBaseDir(), nil)
	plan, data, err := c.plan(ctx, in.GetHost())
	if err != nil || plan == nil {
		return &planv1.CreatePlanResponse{Problems: c.Sorted(), Memory: c.report}, err
	}
	return &planv1.CreatePlanResponse{
		Plan: plan, Lock: data, Warnings: c.findings.warnings.Sorted(), Settings: settings(c.Reading, c.data.rows()), Memory: c.report,
	}, nil
}

// renew plans the configuration of an old plan again. Without its text the problems have no place.
func (s *Server) renew(ctx context.Context, old *planv1.Plan, baseDir string, set []string) (*planv1.RenewPlanResponse, error) {
	c := s.checks(s.reader.Again(old.GetConfig(), set...), baseDir, old.GetInputs())
	plan, data, err := c.plan(ctx, nil)
	if err != nil || plan == nil {
		return &planv1.RenewPlanResponse{Problems: c.Sorted()}, err
	}
	return &planv1.RenewPlanResponse{Plan: plan, Lock: data}, nil
}

// plan checks everything and pins the inputs. The plan is nil if there are problems. assumed: a
// host for which memory is predicted; nil: the real one.
func (c *checks) plan(ctx context.Context, assumed *planv1.AssumedHost) (*planv1.Plan, []byte, error) {
	if err := c.read(ctx); err != nil {
		return nil, nil, ErrInputUnreadable.Wrap(err)
	}
	versions, err := c.probe(ctx)
	c.train.resolve(c.data.rows())
	c.report = c.memory.report(ctx, c.model, c.teacher, c.rewards, assumed)
	if err != nil || !c.Problems.Empty() {
		return nil, nil, err
	}
	c.data.small()
	if err := input.Digest(ctx, c.files.locate, c.files.inputs); err != nil {
		return nil, nil, ErrInputUnreadable.Wrap(err)
	}
	c.teacher.compare(c.model.files)
	slices.SortFunc(c.files.inputs, func(a, b *planv1.Input) int {
		return cmp.Or(cmp.Compare(a.GetRole(), b.GetRole()), strings.Compare(a.GetPath(), b.GetPath()))
	})
	plan := &planv1.Plan{Format: planformat.Format, Config: c.Config, Inputs: c.files.inputs, Packages: versions, Tools: c.episodes.tools, SavesEpisodes: c.episodes.saves, Plugins: c.files.packages()}
	data, err := lock.Write(plan)
	return plan, data, err
}

// read reads every file that the configuration names.
func (c *checks) read(ctx context.Context) error {
	if err := c.sources.fetch(ctx); err != nil {
		return err
	}
	if err := c.data.read(c.sources.prepared); err != nil {
		return err
	}
	if err := c.engine.read(ctx, c.model); err != nil {
		return err
	}
	c.model.read()
	c.train.learningRate()
	c.teacher.read(c.model.model)
	c.rewards.read(c.model.model)
	for _, name := range slices.Sorted(maps.Keys(c.suites)) {
		c.suites[name].read(c.model.model)
	}
	c.episodes.read()
	c.acting.read()
	c.trackers.read()
	return nil
}

// probe makes the dry calls concurrently and returns the versions of the packages.
func (c *checks) probe(ctx context.Context) (map[string]string, error) {
	var environment, teacher, episodes, acting *probe.Answer
	var environmentErr, teacherErr, episodesErr, actingErr error
	group, groupCtx := errgroup.WithContext(ctx)
	ask := func(request probe.Request, answer **probe.Answer, err *error) {
		group.Go(func() error {
			*answer, *err = c.prober.Ask(groupCtx, request)
			return nil
		})
	}
	ask(probe.Request{
		Packages: append(c.trackers.packages(), c.packages.wanted()...), Tokenizer: c.prompts.request(c.data.all(), c.model.model, c.files.resolve(c.Config.GetModel().GetPath())),
		WandbKey: c.Config.GetSinks().GetWandb().GetMode() == "online",
	}, &environment, &environmentErr)
	calls := c.rewards.calls(c.data.scoredRows(), c.model.model)
	own := map[string][]*dryCall{} // by suite
	for _, name := range slices.Sorted(maps.Keys(c.suites)) {
		own[name] = c.suites[name].calls(c.data.suiteRows(name), c.model.model)
	}
	for _, call := range slices.Concat(append(slices.Collect(maps.Values(own)), calls)...) {
		ask(probe.Request{Reward: call.request}, &call.answer, &call.err)
	}
	if request := c.teacher.request(c.model.model, c.data.train); request != nil {
		ask(probe.Request{Teacher: request}, &teacher, &teacherErr)
	}
	if request := c.episodes.request(c.data.train); request != nil {
		ask(probe.Request{Environment: request}, &episodes, &episodesErr)
	}
	if request := c.acting.request(c.data.train, c.model.model); request != nil {
		ask(probe.Request{Environment: request}, &acting, &actingErr)
	}
	_ = group.Wait()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var versions map[string]string
	if environmentErr != nil {
		c.Problems.Add(probeProblem(environmentErr))
	} else {
		versions = c.packages.versions(environment)
		c.trackers.answer(environment)
		if err := c.prompts.answer(environment, c.data.all(), c.model.context()); err != nil {
			return nil, ErrInputUnreadable.Wrap(err)
		}
	}
	for _, call := range calls {
		c.rewards.answer(call, environmentErr == nil)
	}
	for _, name := range slices.Sorted(maps.Keys(own)) {
		for _, call := range own[name] {
			c.suites[name].answer(call, environmentErr == nil)
		}
	}
	c.rewards.constant(calls)
	c.teacher.answer(teacher, teacherErr)
	c.episodes.answer(episodes, episodesErr, environmentErr == nil)
	c.acting.answer(acting, actingErr, environmentErr == nil)
	return versions, nil
}
