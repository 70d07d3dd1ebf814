package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/inference"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/problem"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/engine"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	servingv1 "github.com/rollout-rl/rollout/proto/gen/rollout/serving/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	planproblem "github.com/rollout-rl/rollout/services/planner/problem"
)

// wanted is what is to be served.
type wanted struct {
	request *servingv1.ServeModelRequest
	note    string // about it, for the user
	chats   bool   // the tokenizer has a chat template
	open    bool   // no configuration bounds the completions
}

// curl is a command that sends a first request.
func (w *wanted) curl(base string) string {
	name := w.request.GetConfig().GetName()
	path, body := "/completions", map[string]any{"model": name, "prompt": "Hello", "max_tokens": 32}
	if w.chats {
		path, body = "/chat/completions", map[string]any{"model": name, "messages": []map[string]string{{"role": "user", "content": "Hello"}}}
	}
	text, _ := json.Marshal(body) // strings and numbers only
	return fmt.Sprintf("curl %s%s -H 'Content-Type: application/json' -d '%s'", base, path, text)
}

// wanted finds the model and makes its configuration.
func (f *flags) wanted(ctx context.Context, env *cli.Env, c *client.Client) (*wanted, error) {
	w := &wanted{request: &servingv1.ServeModelRequest{Detached: f.detach}}
	folder, name, given, err := f.find(ctx, env, c, w)
	if err != nil {
		return nil, err
	}
	w.open = given == nil && f.config.File == ""
	if given == nil || f.config.File != "" {
		source := &planv1.ConfigSource{Set: f.config.Set}
		if f.config.File != "" {
			if source, err = f.config.Source(); err != nil {
				return nil, err
			}
			w.request.BaseDir = source.GetBaseDir()
		} else if w.request.BaseDir, err = os.Getwd(); err != nil {
			return nil, err
		}
		config, problems, err := inference.ReadConfig(source)
		if err != nil {
			return nil, err
		}
		if len(problems) > 0 {
			fmt.Fprint(env.Stderr, problem.Render(problems, env.ErrStyle()))
			return nil, problem.Exit(problems)
		}
		given = config
	} else if len(f.config.Set) > 0 {
		return nil, cli.Usage("--set requires --config, or a model that is a folder")
	}
	if given, err = f.changes(given); err != nil {
		return nil, err
	}
	if f.name != "" {
		name = f.name
	}
	given.Name, given.Model.Path = proto.String(name), proto.String(folder)
	if !nameForm.MatchString(name) {
		return nil, cli.Usage("invalid argument %q for --name: must be lower-case letters, digits, and dashes", name)
	}
	w.request.Config = given
	return w, w.check(given, folder, f.maxModelLen)
}

var (
	nameForm  = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)
	unnamable = regexp.MustCompile(`[^a-z0-9]+`)
)

// nameOf makes the name of a folder one for requests.
func nameOf(folder string) string {
	name := strings.Trim(unnamable.ReplaceAllString(strings.ToLower(filepath.Base(folder)), "-"), "-")
	return strings.Trim(name[:min(len(name), 63)], "-")
}

// find returns the folder and the name of the model, and the configuration of its run; nil for a
// folder. It is noted in w.
func (f *flags) find(ctx context.Context, env *cli.Env, c *client.Client, w *wanted) (folder, name string, config *configv1.RunConfig, err error) {
	info, missing := os.Stat(f.model)
	switch {
	case missing == nil && info.IsDir():
		folder, err = filepath.Abs(f.model)
		w.note = "serving   " + folder
		return folder, nameOf(folder), nil, err
	case missing == nil:
		return "", "", nil, exit.New(exit.NoInput, "name the folder that has it", "%s is a file, and a model is a folder", f.model)
	case strings.ContainsRune(f.model, filepath.Separator) || strings.HasPrefix(f.model, "."):
		return "", "", nil, exit.New(exit.NoInput, "correct the path, or download the model first: `hf download NAME --local-dir FOLDER`",
			"the folder of the model does not exist: %s", f.model)
	}
	snapshot, err := record.SnapshotOf(ctx, record.Services{Client: c}, f.model)
	if err != nil {
		if rpcerr.Code(err) == codes.NotFound && !strings.HasPrefix(f.model, "snap-") {
			err = &exit.Error{
				Code: exit.NoInput, Reason: rpcerr.Reason(err), Err: fmt.Errorf("--model %s: no folder and no run has this name", f.model),
				Fix: "name the folder of a model, a run of `rollout runs list`, or a snapshot of `rollout snapshot list`",
			}
		}
		return "", "", nil, err
	}
	status, err := record.Services{Client: c}.Run(ctx, snapshot.GetRunId())
	if err != nil {
		return "", "", nil, err
	}
	run := status.GetRun()
	config = inference.Evaluating(run.GetPlan().GetConfig())
	if !algorithm.Generates(config) {
		return "", "", nil, exit.New(exit.Data, "serve a model that generates text", "run %s trains a reward model, which generates nothing", run.GetRunId())
	}
	models, err := env.Plane.ModelsDir(run.GetBaseDir())
	if err != nil {
		return "", "", nil, err
	}
	var worker cli.WorkerFlag // its default: it merges adapters
	folder, err = record.Export{Reader: record.Services{Client: c}, Worker: worker.Command()}.Keep(ctx, snapshot, models)
	if err != nil {
		return "", "", nil, err
	}
	if name = run.GetName(); strings.HasPrefix(f.model, "snap-") {
		name = snapshot.GetSnapshotId()
	}
	w.request.BaseDir, w.request.WeightsVersion = run.GetBaseDir(), snapshot.GetStep()
	w.note = fmt.Sprintf("serving   %s (step %s of %s), in %s", snapshot.GetSnapshotId(), output.Count(snapshot.GetStep()), run.GetRunId(), folder)
	return folder, name, config, nil
}

// changes applies the flags.
func (f *flags) changes(given *configv1.RunConfig) (*configv1.RunConfig, error) {
	changed := func(name string) bool { return f.cmd.Flags().Changed(name) }
	number := func(name string, value *uint32) *uint32 {
		if changed(name) {
			return value
		}
		return nil
	}
	text := func(name string, value *string) *string {
		if changed(name) {
			return value
		}
		return nil
	}
	if f.python != "" {
		var err error
		if f.python, err = filepath.Abs(f.python); err != nil {
			return nil, err
		}
	}
	return inference.Changes{
		Engine: text("engine", &f.engine), Python: text("python", &f.python), Dtype: text("dtype", &f.dtype), Workers: number("workers", &f.workers),
		Slots: number("slots", &f.slots), MaxModelLen: number("max-model-len", &f.maxModelLen), Threads: number("threads", &f.threads),
	}.Apply(given)
}

// mostTokens is the largest value of `sampling.max_tokens`.
const mostTokens = 131072

// check compares the configuration with the files of the model and with what the engine can do. A
// context that no flag sets is lowered to that of the model.
func (w *wanted) check(config *configv1.RunConfig, folder string, chosen uint32) error {
	problems := &planproblem.List{}
	model := input.ReadModel(folder, folder, "--model", problems)
	if all := problems.Sorted(); len(all) > 0 {
		p := all[0]
		code := exit.Data
		if p.GetReason() == planproblem.MissingFile {
			code = exit.NoInput
		}
		return &exit.Error{Code: code, Reason: p.GetReason(), Fix: p.GetFix(), Err: errors.New(p.GetFile() + ": " + p.GetMessage())}
	}
	if model.Scores() {
		return exit.New(exit.Data, "serve a model that generates text", "%s is a reward model, which generates nothing", folder)
	}
	w.chats = model.ChatTemplate
	engines, err := engine.All()
	if err != nil {
		return err
	}
	kind := config.GetEngine().GetKind()
	can := engines[kind]
	if why := model.Undecodable(can); why != "" {
		return exit.New(exit.Data, "choose another engine with --engine", "the engine %s cannot decode %s: %s", kind, folder, why)
	}
	if !slices.Contains(can.Verifies, config.GetWeights().GetVerify()) {
		config.Weights.Verify = proto.String(can.Verifies[0])
	}
	positions, why := model.Context(can)
	if positions > 0 && int64(config.GetEngine().GetMaxModelLen()) > positions {
		if chosen != 0 {
			return exit.New(exit.Usage, fmt.Sprintf("lower --max-model-len to %d", positions), "--max-model-len is %d, but %s", chosen, why)
		}
		config.Engine.MaxModelLen = proto.Uint32(uint32(positions))
	}
	if w.open {
		config.Sampling.MaxTokens = proto.Uint32(min(config.GetEngine().GetMaxModelLen()-1, mostTokens))
	}
	return nil
}
