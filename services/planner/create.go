package planner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/algorithm"
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
	slices.SortFunc(d.inputs, func(a, b *planv1.Input) int {
		if a.GetRole() != b.GetRole() {
			return int(a.GetRole()) - int(b.GetRole())
		}
		return strings.Compare(a.GetPath(), b.GetPath())
	})
	plan := &planv1.Plan{Format: lock.Format, Config: d.Config, Inputs: d.inputs, Packages: packages}
	data, err := lock.Write(plan)
	return plan, data, err
}

// read reads every file that the configuration names, as far as it could be read itself.
func (d *draft) read() error {
	cfg := d.Config
	answer := ""
	if cfg.GetAlgorithm().GetSft() != nil {
		answer = cfg.GetData().GetAnswerField()
	}
	var err error
	if d.train, err = d.dataset("data.train", cfg.GetData().GetTrain(), answer, planv1.InputRole_INPUT_ROLE_TRAIN_DATA); err != nil {
		return err
	}
	if d.eval, err = d.dataset("data.eval", cfg.GetData().GetEval(), "", planv1.InputRole_INPUT_ROLE_EVAL_DATA); err != nil {
		return err
	}
	d.readModel(cfg.GetModel().GetPath())
	d.readTeacher(cfg.GetAlgorithm().GetDistillation().GetTeacher())
	d.readRewards()
	d.readSinks()
	return nil
}

// dataset reads one file of rows; nil where it is not named, not there or not whole.
func (d *draft) dataset(field, path, answer string, role planv1.InputRole) (*input.Dataset, error) {
	if path == "" || !d.exists(field, path, false) {
		return nil, nil
	}
	before := d.Problems.Len()
	data := &input.Dataset{
		Path: path, PromptField: d.Config.GetData().GetPromptField(), AnswerField: answer,
		ReferenceField: d.Config.GetData().GetAnswerField(), ChatTemplate: d.Config.GetModel().GetChatTemplate(),
	}
	if role == planv1.InputRole_INPUT_ROLE_TRAIN_DATA {
		data.Preference = d.preference()
	}
	data.Asked = role == planv1.InputRole_INPUT_ROLE_EVAL_DATA && algorithm.FromData(d.Config)
	if err := data.Read(input.Resolve(d.baseDir, path), &d.Problems); err != nil {
		return nil, err
	}
	if role == d.scored() {
		d.first = data
	}
	if d.Problems.Len() > before {
		return nil, nil
	}
	d.labels(data)
	d.inputs = append(d.inputs, &planv1.Input{
		Role: role, Path: filepath.ToSlash(filepath.Clean(path)), Digest: data.Digest, Bytes: data.Bytes, Rows: data.Rows,
	})
	return data, nil
}

// labels warns of labelled completions that are all of one kind: KTO then knows what to write more of, or less, and not instead of what.
func (d *draft) labels(data *input.Dataset) {
	if data.Preference.Label == "" || data.Desirable > 0 && data.Desirable < data.Rows {
		return
	}
	has, lacks := "desirable (true)", "undesirable (false)"
	if data.Desirable == 0 {
		has, lacks = lacks, has
	}
	d.warnings.Add(&planv1.Problem{
		Reason: problem.BadRow, File: data.Path, Line: 1, Column: 1,
		Message: fmt.Sprintf("every completion is %s, none is %s: KTO tells the two apart", has, lacks),
		Mend:    fmt.Sprintf("add rows whose `%s` is the other, or take [algorithm.sft] where all are desirable", data.Preference.Label),
	})
}

// scored says which rows the reward sees: those that are sampled for, which where rows are trained on are the held-out ones.
func (d *draft) scored() planv1.InputRole {
	if algorithm.FromData(d.Config) && d.Config.GetData().GetEval() != "" {
		return planv1.InputRole_INPUT_ROLE_EVAL_DATA
	}
	return planv1.InputRole_INPUT_ROLE_TRAIN_DATA
}

// preference is what the algorithm needs of the training rows beside their prompts.
func (d *draft) preference() input.Preference {
	data, p := d.Config.GetData(), input.Preference{Algorithm: algorithm.Name(d.Config)}
	if algorithm.Pairs(d.Config) {
		p.Chosen, p.Rejected = data.GetChosenField(), data.GetRejectedField()
	}
	if d.Config.GetAlgorithm().GetRewardModel() != nil {
		p.Margin = data.GetMarginField()
	}
	if kto := d.Config.GetAlgorithm().GetKto(); kto != nil && !kto.GetPaired() {
		p.Completion, p.Label = data.GetCompletionField(), data.GetLabelField()
	}
	return p
}

func (d *draft) readModel(path string) {
	if path == "" || !d.exists("model.path", path, true) {
		return
	}
	before := d.Problems.Len()
	folder := input.Resolve(d.baseDir, path)
	model := input.ReadModel(folder, path, "model.path", &d.Problems)
	if d.Config.GetModel().GetChatTemplate() && !model.ChatTemplate {
		d.Problems.At(d.Place("model.chat_template"), problem.BadModel, "model.chat_template",
			fmt.Sprintf("`model.chat_template` is set, but the tokenizer of %s has no chat template", path),
			"remove `chat_template`, or use an instruction-tuned model")
	}
	if algorithm.Generates(d.Config) && strings.HasSuffix(model.Architecture, "ForSequenceClassification") {
		d.Problems.At(d.Place("model.path"), problem.BadModel, "model.path", fmt.Sprintf("%s is a reward model (%s): it scores completions and writes none", path, model.Architecture),
			"name a language model; a reward model is for `[reward.model]`")
	}
	d.fitContext(model.Context)
	d.fitTensors(model)
	if d.Problems.Len() > before {
		return
	}
	d.model = model
	for _, name := range model.Files {
		d.inputs = append(d.inputs, &planv1.Input{
			Role: planv1.InputRole_INPUT_ROLE_MODEL, Path: input.Relative(d.baseDir, filepath.Join(folder, name), path),
		})
	}
}

// fitContext holds the longest sequence against the model's positions. The default is lowered to what the model has; a number
// that the user wrote is not.
func (d *draft) fitContext(positions int64) {
	engine := d.Config.GetEngine()
	if positions == 0 || int64(engine.GetMaxModelLen()) <= positions {
		return
	}
	if d.Wrote("engine.max_model_len") {
		d.Problems.At(d.Place("engine.max_model_len"), problem.OutOfRange, "engine.max_model_len",
			fmt.Sprintf("`engine.max_model_len` is %d, but the model has %d positions", engine.GetMaxModelLen(), positions),
			fmt.Sprintf("write `max_model_len = %d` or less", positions))
		return
	}
	engine.MaxModelLen = proto.Uint32(uint32(positions))
	if tokens := d.Config.GetSampling().GetMaxTokens(); int64(tokens) >= positions && algorithm.Samples(d.Config) {
		d.Problems.At(d.Place("sampling.max_tokens"), problem.OutOfRange, "sampling.max_tokens",
			fmt.Sprintf("`sampling.max_tokens` is %d, but the model has %d positions for prompt and completion together", tokens, positions),
			fmt.Sprintf("write a number below %d", positions))
	}
}

// fitTensors holds the names of tensors and layers in the configuration against the model's files.
func (d *draft) fitTensors(model *input.Model) {
	if len(model.Tensors) == 0 {
		return
	}
	frozen := map[string]bool{}
	for _, pattern := range d.Config.GetTrain().GetFreeze() {
		fits, err := model.Match(pattern)
		for _, name := range fits {
			frozen[name] = true
		}
		switch {
		case err != nil:
			d.Problems.At(d.Place("train.freeze"), problem.BadValue, "train.freeze", fmt.Sprintf("%q is no pattern: a bracket is not closed", pattern),
				"write names with `*`, `?` and `[0-3]`")
		case len(fits) == 0:
			d.Problems.At(d.Place("train.freeze"), problem.BadValue, "train.freeze", fmt.Sprintf("%q matches no tensor of the model", pattern),
				fmt.Sprintf("tensors are named like %q", slices.Min(model.Tensors)))
		}
	}
	if len(frozen) == len(model.Tensors) {
		d.Problems.At(d.Place("train.freeze"), problem.BadValue, "train.freeze", "`train.freeze` matches every tensor of the model: nothing is left to train",
			"leave out what is to be trained")
	}
	for _, target := range d.Config.GetLora().GetTargets() {
		if !model.HasLayer(target) {
			d.Problems.At(d.Place("lora.targets"), problem.BadValue, "lora.targets", fmt.Sprintf("the model has no layer %q", target),
				"it has "+strings.Join(model.Layers(), ", "))
		}
	}
}

// exists reports whether a file or folder is there, and says at the field that names it where it is not.
func (d *draft) exists(field, path string, folder bool) bool {
	place := d.Place(field)
	info, err := os.Stat(input.Resolve(d.baseDir, path))
	switch {
	case errors.Is(err, os.ErrNotExist):
		mend := "correct the path; it starts at the folder of the configuration, " + d.baseDir
		if similar := input.Similar(d.baseDir, path, config.Nearest); similar != "" {
			mend = fmt.Sprintf("did you mean %q?", similar)
		}
		what := "file"
		if folder {
			what = "folder"
		}
		d.Problems.At(place, problem.MissingFile, field, fmt.Sprintf("there is no %s %s", what, path), mend)
	case err != nil:
		d.Problems.At(place, problem.MissingFile, field, fmt.Sprintf("can't read %s: %v", path, errors.Unwrap(err)), "check its permissions")
	case info.IsDir() && !folder:
		d.Problems.At(place, problem.MissingFile, field, path+" is a folder, not a file", "name a file in it")
	case !info.IsDir() && folder:
		d.Problems.At(place, problem.MissingFile, field, path+" is a file, not a folder", "name the folder that holds config.json")
	default:
		return true
	}
	return false
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
