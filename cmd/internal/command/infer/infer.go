// Package infer has the command `rollout infer batch`.
package infer

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/inference"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/cmd/internal/tempdir"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/infer"
)

// Command returns `rollout infer`.
func Command(env *cli.Env) *cobra.Command {
	return cli.Group("infer", "Run batch inference", batchCommand(env))
}

func batchCommand(env *cli.Env) *cobra.Command {
	flags := &inferFlags{}
	cmd := &cobra.Command{
		Use:   "batch --output FILE (--model FOLDER | --run RUN | --snapshot ID | --config FILE)",
		Short: "Generate completions and scores for a dataset",
		Long: `Generate completions for each row of a dataset, score them, and write them to FILE (.parquet or .jsonl).

The model is a folder (--model), the newest snapshot of a run (--run) or a snapshot (--snapshot). Prompt field, chat template,
sampling and reward come from --config, else from the run; flags override them. A run is sampled as in its evaluations, with
eval.temperature, and scored with its reward, which is refused if its files have changed since the plan. The settings are printed. The dataset is --data, else data.eval of the configuration.

Finished rows are kept in FILE.journal: after an interruption the same command continues from there, if its inputs have not changed.
The same command gives the same bytes, interrupted or not. A sample whose reward fails is INFRA_FAILED and has no score; FILE is not
written while there are such samples, unless --allow-failures is set. For the columns of FILE see docs/inference.md.

With --run and --snapshot the command asks a running control plane, else it reads the state folder. It starts only a worker.`,
		Example: `  rollout infer batch --run addition-grpo --output answers.parquet
  rollout infer batch --model models/tiny --data test.jsonl --output answers.jsonl --samples 4 --temperature 0.7 --seed 1
  rollout infer batch --config grpo.toml --model models/tiny --output answers.parquet --limit 1000 --format json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			flags.cmd = cmd
			return execute(env, cmd, flags)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&flags.output, "output", "o", "", "`file` to write, .parquet or .jsonl")
	f.StringVarP(&flags.model, "model", "m", "", "`folder` of a model in the Hugging Face layout, or its name on the hub")
	f.StringVar(&flags.run, "run", "", "`run` whose newest snapshot is used: its name, id, or a unique prefix of the id")
	f.StringVar(&flags.snapshot, "snapshot", "", "`id` of the snapshot to use, or a unique prefix of it")
	flags.config.AddTo(cmd)
	f.StringVar(&flags.data, "data", "", "`dataset`: a file, glob, folder, or name on the hub, as in data.eval (default: data.eval of the configuration)")
	f.StringVar(&flags.subset, "subset", "", "`subset` of a data set of the hub (default: the configuration's)")
	f.StringVar(&flags.split, "split", "", "`split` of a data set that has splits (default: the configuration's, else test)")
	f.Uint64Var(&flags.limit, "limit", 0, "`number` of rows, from the start of the dataset (default: all)")
	f.Uint32VarP(&flags.samples, "samples", "n", 1, "completions per row")
	f.Uint32Var(&flags.maxTokens, "max-tokens", 0, "maximum number of new tokens per completion (default: the configuration's)")
	f.Float64Var(&flags.temperature, "temperature", 0, "softmax temperature; 0 is greedy (default: eval.temperature of a run, else sampling.temperature of the configuration)")
	f.Float64Var(&flags.topP, "top-p", 0, "nucleus probability (default: the configuration's)")
	f.Uint32Var(&flags.topK, "top-k", 0, "sample from the k most likely tokens; 0: off (default: the configuration's)")
	f.Float64Var(&flags.minP, "min-p", 0, "minimum probability relative to the most likely token; 0: off (default: the configuration's)")
	f.StringArrayVar(&flags.stop, "stop", nil, "`text` that ends a completion; can be repeated (default: the configuration's)")
	f.Uint64Var(&flags.seed, "seed", 0, "sampling seed (default: the configuration's)")
	f.StringVar(&flags.promptField, "prompt-field", "", "`field` of a row with the prompt (default: the configuration's)")
	f.BoolVar(&flags.chatTemplate, "chat-template", false, "render prompts through the chat template (default: the configuration's)")
	f.StringVar(&flags.reward, "reward", "", "`file.py:function` of the reward (default: the reward of the configuration)")
	f.BoolVar(&flags.noReward, "no-reward", false, "do not score completions")
	f.Uint32Var(&flags.slots, "slots", 0, "sequences decoded concurrently (default: the configuration's)")
	f.Uint32Var(&flags.maxModelLen, "max-model-len", 0, "maximum length of prompt and completion together (default: the configuration's)")
	f.Uint32Var(&flags.threads, "threads", 0, "CPU threads; 0: all cores; results depend on it (default: the configuration's)")
	f.BoolVar(&flags.restart, "restart", false, "discard the journal of an interrupted command")
	f.BoolVar(&flags.overwrites, "overwrite", false, "replace an existing output")
	f.BoolVar(&flags.allowFailures, "allow-failures", false, "write the output even if samples are INFRA_FAILED")
	f.BoolVar(&flags.acceptChanges, "accept-changes", false, "with --run or --snapshot: if the run's reward has changed since its plan, score with the changed one")
	flags.worker.AddTo(cmd)
	_ = cmd.MarkFlagRequired("output")
	_ = cmd.MarkFlagDirname("model")
	_ = cmd.MarkFlagFilename("data", "jsonl", "parquet", "csv", "tsv", "arrow")
	_ = cmd.MarkFlagFilename("output", "jsonl", "parquet")
	cmd.MarkFlagsMutuallyExclusive("model", "run", "snapshot")
	cmd.MarkFlagsMutuallyExclusive("reward", "no-reward")
	return cmd
}

func execute(env *cli.Env, cmd *cobra.Command, flags *inferFlags) error {
	job := &infer.Job{
		Limit: flags.limit, Restart: flags.restart, AllowFailures: flags.allowFailures,
	}
	if err := flags.destination(job); err != nil {
		return err
	}
	folder, err := tempdir.Make(filepath.Dir(job.Output), ".infer-")
	if err != nil {
		return exit.New(exit.CannotMake, "choose another folder with --output", "make a temporary folder: %w", err)
	}
	defer func() { _ = folder.Remove() }()
	job.Scratch, job.Lock = folder.Path, folder.Lock()
	if flags.run+flags.snapshot != "" {
		err = env.Plane.Records(cmd, func(ctx context.Context, r record.Reader) error { return flags.recorded(ctx, r, job) })
	}
	if err == nil {
		err = configure(env, flags, job)
	}
	if err != nil {
		return err
	}
	changed, err := flags.sameReward(job.BaseDir)
	if err != nil {
		return err
	}
	if changed != "" {
		env.Note("note      %s; the scores are not those of the run's evaluations", changed)
	}
	note := "sampling  " + inference.SamplingOf(job.Config).String()
	if flags.source != "" {
		note += "; " + flags.source
	}
	env.Note("%s", note)
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return answer(ctx, env, job)
}

// answer runs the job and prints its result.
func answer(ctx context.Context, env *cli.Env, job *infer.Job) error {
	p := &inference.Progress{Env: env}
	done, err := job.Run(ctx, infer.Observer{Event: p.Event, Warning: p.Warning})
	p.Clear()
	if err != nil {
		return err
	}
	if env.JSON() {
		return output.Value(env.Stdout, map[string]any{
			"output": done.Output, "rows": done.Rows, "dropped": done.Dropped, "samples": done.Samples, "tokens": done.Tokens, "statuses": done.Statuses,
			"failures": done.Failures, "mean_score": done.MeanScore, "model_digest": done.ModelDigest, "kept_rows": p.Kept,
			"sampling": inference.SamplingOf(job.Config),
		})
	}
	var table output.Table
	table.Row("output", done.Output)
	table.Row("rows", fmt.Sprintf("%s, %s samples, %s tokens", output.Count(done.Rows), output.Count(done.Samples), output.Count(done.Tokens)))
	if done.Dropped > 0 {
		table.Row("dropped", output.Plural(done.Dropped, "row")+" that are too long (data.overlong)")
	}
	if done.MeanScore != nil {
		table.Row("mean score", output.Number(*done.MeanScore))
	}
	table.Row("samples", inference.Counts(done.Statuses))
	if failed := inference.Counts(done.Failures); failed != "" {
		table.Row("failed", env.Style().Red(failed))
	}
	table.Row("model", done.ModelDigest)
	_, err = fmt.Fprint(env.Stdout, table.String())
	return err
}
