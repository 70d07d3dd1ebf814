package infer

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/inference"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/infer"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
)

// inferFlags are the flags of `rollout infer batch`.
type inferFlags struct {
	cmd                                *cobra.Command
	config                             cli.ConfigFlags
	model, run, snapshot               string
	data, output, subset, split        string
	worker                             cli.WorkerFlag
	reward, promptField                string
	stop                               []string
	samples, maxTokens, topK           uint32
	slots, maxModelLen, threads        uint32
	temperature, topP, minP            float64
	seed, limit                        uint64
	chatTemplate, noReward             bool
	restart, allowFailures, overwrites bool
	acceptChanges                      bool

	found   *inference.Recorded // nil: no run
	rewards []*planv1.Input     // files of the run's reward
	source  string              // of the sampling settings that are not set by flags; "": the configuration
}

// destination checks the output before any work is done.
func (flags *inferFlags) destination(job *infer.Job) (err error) {
	if flags.snapshot != "" && !strings.HasPrefix(flags.snapshot, "snap-") {
		return cli.Usage("invalid argument %q for --snapshot: must begin with snap-", flags.snapshot)
	}
	if ending := filepath.Ext(flags.output); ending != ".parquet" && ending != ".jsonl" {
		return cli.Usage("invalid argument %q for --output: must end in .parquet or .jsonl", flags.output)
	}
	if job.Output, err = filepath.Abs(flags.output); err != nil {
		return err
	}
	if _, err := os.Lstat(job.Output); err == nil && !flags.overwrites {
		return exit.New(exit.CannotMake, "choose another file, or replace it with --overwrite", "%s already exists", flags.output)
	}
	if info, err := os.Stat(filepath.Dir(job.Output)); err != nil || !info.IsDir() {
		return exit.New(exit.CannotMake, "create it, or choose another output", "the folder %s does not exist", filepath.Dir(job.Output))
	}
	return nil
}

// recorded uses the weights of a snapshot, and the configuration of its run with the sampling
// settings of its evaluations.
func (flags *inferFlags) recorded(ctx context.Context, r record.Reader, job *infer.Job) error {
	found, err := inference.Record(ctx, r, flags.run+flags.snapshot, job.Worker, job.Scratch) // one of them
	if err != nil {
		return err
	}
	flags.found, job.Model, job.WeightsDigest = found, found.Folder, found.Digest
	job.Config, job.BaseDir = inference.Evaluating(found.Run.GetPlan().GetConfig()), found.Run.GetBaseDir()
	for _, in := range found.Run.GetPlan().GetInputs() {
		if in.GetRole() == planv1.InputRole_INPUT_ROLE_REWARD {
			flags.rewards = append(flags.rewards, in)
		}
	}
	flags.source = "as in the evaluations of " + found.Run.GetRunId()
	return nil
}

// sameReward compares the files of the run's reward with its plan and returns what changed, which
// is an error unless changes are accepted.
func (flags *inferFlags) sameReward(baseDir string) (changed string, err error) {
	if flags.config.File != "" || flags.reward != "" || flags.noReward {
		return "", nil
	}
	for _, in := range flags.rewards {
		path := in.GetPath()
		if !filepath.IsAbs(path) {
			path = filepath.Join(baseDir, path)
		}
		digest, _, err := input.DigestFile(path)
		if err != nil {
			return "", exit.New(exit.NoInput, "restore the file, or pass --reward or --no-reward", "cannot read the run's reward %s: %w", path, cli.PathCause(err))
		}
		if digest == in.GetDigest() {
			continue
		}
		changed = fmt.Sprintf("the reward %s has changed since the run was planned: its digest is %s, the plan has %s", path, digest, in.GetDigest())
		if !flags.acceptChanges {
			return "", exit.New(exit.Data, "restore the file, or add --accept-changes, which scores with the changed reward", "%s", changed)
		}
	}
	return changed, nil
}

// configure sets the configuration of the job: of a run, of a file, or defaults, changed by flags.
func configure(env *cli.Env, flags *inferFlags, job *infer.Job) (err error) {
	source := &planv1.ConfigSource{Set: flags.config.Set}
	switch {
	case flags.config.File != "":
		if source, err = flags.config.Source(); err != nil {
			return err
		}
	case job.Config != nil && len(source.GetSet()) > 0:
		return cli.Usage("--set requires --config; change the configuration of a run with the other flags")
	case job.Config == nil && flags.model == "":
		return cli.Usage("one of --model, --run, --snapshot or --config is required")
	default:
		if source.BaseDir, err = os.Getwd(); err != nil {
			return err
		}
	}
	if flags.config.File != "" || job.Config == nil {
		config, problems, err := inference.ReadConfig(source)
		if err != nil {
			return err
		}
		if len(problems) > 0 {
			return inference.Refuse(env, problems)
		}
		job.WeightsDigest = "" // the digest is for the precision of the run
		flags.source = ""
		job.Config, job.BaseDir = config, source.GetBaseDir()
	}
	if job.Model == "" {
		if job.Model, err = inference.Folder(flags.model, job.Config, job.BaseDir); err != nil {
			return err
		}
	}
	if err := inference.Generates(job.Model); err != nil {
		return err
	}
	if err := flags.dataset(job); err != nil {
		return err
	}
	changes, err := flags.changes()
	if err != nil {
		return err
	}
	job.Config, err = changes.Apply(job.Config)
	job.Threads = int(job.Config.GetEngine().GetThreads())
	job.Worker = flags.worker.For(job.Config.GetEngine(), job.BaseDir)
	return err
}

// dataset sets the dataset of the job.
func (flags *inferFlags) dataset(job *infer.Job) error {
	if flags.data == "" {
		if job.Config.GetData().GetEval() == "" {
			return cli.Usage("--data is required: the configuration has no data.eval")
		}
		rows, err := flags.found.Rows(job.Config, job.BaseDir)
		job.Data, job.Subset, job.Split = rows.Path, cmp.Or(flags.subset, rows.Subset), cmp.Or(flags.split, rows.Split)
		return err
	}
	folder, err := os.Getwd()
	if err != nil {
		return err
	}
	job.Subset, job.Split = flags.subset, flags.split
	job.Data, err = inference.Data(flags.data, folder)
	return err
}

// changes returns the flags that were set. The group size of a run is not used: the default of
// --samples is 1.
func (flags *inferFlags) changes() (inference.Changes, error) {
	c := inference.Changes{
		Samples: &flags.samples, MaxTokens: given(flags, "max-tokens", &flags.maxTokens), TopK: given(flags, "top-k", &flags.topK),
		Temperature: given(flags, "temperature", &flags.temperature), TopP: given(flags, "top-p", &flags.topP), MinP: given(flags, "min-p", &flags.minP),
		Stop: flags.stop, Seed: given(flags, "seed", &flags.seed), PromptField: given(flags, "prompt-field", &flags.promptField),
		ChatTemplate: given(flags, "chat-template", &flags.chatTemplate), Slots: given(flags, "slots", &flags.slots),
		MaxModelLen: given(flags, "max-model-len", &flags.maxModelLen), Threads: given(flags, "threads", &flags.threads),
	}
	if flags.samples < 1 || flags.samples > 1024 {
		return c, cli.Usage("invalid argument %d for --samples: must be from 1 to 1,024", flags.samples)
	}
	if flags.noReward {
		c.Reward = new(string)
	}
	if flags.reward != "" {
		path, err := filepath.Abs(flags.reward)
		if err != nil {
			return c, err
		}
		c.Reward = &path
	}
	return c, nil
}

func given[T any](flags *inferFlags, name string, value *T) *T {
	if flags.cmd.Flags().Changed(name) {
		return value
	}
	return nil
}
