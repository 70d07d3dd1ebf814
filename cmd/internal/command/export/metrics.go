// Package export has the commands `rollout export ...`.
package export

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Command returns `rollout export`.
func Command(env *cli.Env) *cobra.Command {
	return cli.Group("export", "Export the metrics or weights of a run", metricsCommand(env), weightsCommand(env), pushCommand(env))
}

// metricsFlags are the flags of `rollout export metrics`.
type metricsFlags struct {
	to                 []string
	directory, project string
	trackingURI        string
	worker             cli.WorkerFlag
}

var sinkNames = []string{"tensorboard", "wandb", "mlflow"}

func metricsCommand(env *cli.Env) *cobra.Command {
	var flags metricsFlags
	cmd := &cobra.Command{
		Use:   "metrics RUN",
		Short: "Export metrics to TensorBoard, Weights & Biases or MLflow",
		Long: `Export the metrics, evaluations and stored completions of a run to trackers: those of --to, else those of [sinks] in its
configuration. Records that a tracker already has are skipped, so the command can be repeated, also while the run is active. Install
the trackers' libraries with the extras tensorboard, wandb and mlflow of the Python package.

` + cli.FolderHelp + " " + cli.RunHelp,
		Example: `  rollout export metrics addition-grpo
  rollout export metrics addition-grpo --to tensorboard --directory tb
  rollout export metrics addition-grpo --to mlflow --tracking-uri http://127.0.0.1:5000`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, name := range flags.to {
				if err := cli.OneOf("to", []string{name}, sinkNames); err != nil {
					return err
				}
			}
			return env.Plane.Records(cmd, func(ctx context.Context, r record.Reader) error {
				status, err := r.Run(ctx, args[0])
				if err != nil {
					return err
				}
				return writeMetrics(ctx, env, r, status.GetRun(), &flags)
			})
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&flags.to, "to", nil, "`trackers`: tensorboard, wandb, mlflow (default: from [sinks])")
	f.StringVar(&flags.directory, "directory", "", "`folder` for tensorboard and wandb (default: from [sinks], else in the folder of the run)")
	f.StringVar(&flags.project, "project", "", "`project` of wandb and experiment of mlflow (default: from [sinks], else rollout)")
	f.StringVar(&flags.trackingURI, "tracking-uri", "", "`server` or store of mlflow (default: from [sinks], else a file in the folder of the run)")
	flags.worker.AddTo(cmd)
	_ = cmd.RegisterFlagCompletionFunc("to", cobra.FixedCompletions(sinkNames, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.MarkFlagDirname("directory")
	return cmd
}

// sinks returns the configuration of the trackers to write to.
func (flags *metricsFlags) sinks(configured *configv1.SinksConfig) (*configv1.SinksConfig, error) {
	directory := flags.directory
	if directory != "" {
		var err error
		if directory, err = filepath.Abs(directory); err != nil {
			return nil, err
		}
	}
	or := func(values ...string) *string {
		for _, value := range values {
			if value != "" {
				return &value
			}
		}
		return proto.String("")
	}
	tensorboard := &configv1.TensorboardConfig{Directory: or(directory, configured.GetTensorboard().GetDirectory())}
	wandb := &configv1.WandbConfig{
		Project: or(flags.project, configured.GetWandb().GetProject(), "rollout"), Entity: or(configured.GetWandb().GetEntity()),
		Mode: or(configured.GetWandb().GetMode(), "offline"), Directory: or(directory, configured.GetWandb().GetDirectory()),
	}
	mlflow := &configv1.MlflowConfig{
		TrackingUri: or(flags.trackingURI, configured.GetMlflow().GetTrackingUri()),
		Experiment:  or(flags.project, configured.GetMlflow().GetExperiment(), "rollout"),
	}
	out, names := &configv1.SinksConfig{}, flags.to
	if len(names) == 0 {
		for name, there := range map[string]bool{
			"tensorboard": configured.GetTensorboard() != nil, "wandb": configured.GetWandb() != nil, "mlflow": configured.GetMlflow() != nil,
		} {
			if there {
				names = append(names, name)
			}
		}
	}
	if len(names) == 0 {
		return nil, exit.New(exit.Usage, "name a tracker, for example with `--to tensorboard`", "the configuration of the run has no [sinks]")
	}
	for _, name := range names {
		switch name {
		case "tensorboard":
			out.Tensorboard = tensorboard
		case "wandb":
			out.Wandb = wandb
		case "mlflow":
			out.Mlflow = mlflow
		}
	}
	return out, nil
}

// exported is the result for one tracker, as the worker reports it.
type exported struct {
	Sink    string `json:"sink"`
	Where   string `json:"where"`
	Written int    `json:"written"`
	Known   int    `json:"known"`
	Error   string `json:"error,omitempty"`
	Done    bool   `json:"done"`
}

// writeMetrics runs a worker that writes to the trackers.
func writeMetrics(ctx context.Context, env *cli.Env, r record.Reader, run *runv1.Run, flags *metricsFlags) error {
	sinks, err := flags.sinks(run.GetPlan().GetConfig().GetSinks())
	if err != nil {
		return err
	}
	scratch, err := os.MkdirTemp("", "rollout-export-")
	if err != nil {
		return exit.New(exit.CannotMake, "", "make a temporary folder: %w", err)
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	spec := filepath.Join(scratch, "spec.jsonl")
	if err := writeExport(ctx, spec, r, run, sinks); err != nil {
		return err
	}
	command := flags.worker.Command()
	cmd := exec.CommandContext(ctx, command[0], append(command[1:], "export", "--spec", spec)...)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	failed := cmd.Run()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	results := []exported{}
	for lines := bufio.NewScanner(&out); lines.Scan(); {
		var one exported
		if json.Unmarshal(lines.Bytes(), &one) == nil && one.Sink != "" { // else output of a library
			results = append(results, one)
		}
	}
	if len(results) == 0 {
		return exit.New(exit.Software, "check the log above, or name another command with --worker", "the worker that exports metrics failed: %w\n%s", failed, tailOf(log.String()))
	}
	if err := exportedText(env, run, results); err != nil {
		return err
	}
	for _, one := range results {
		if !one.Done {
			return exit.Silent(exit.Data)
		}
	}
	return nil
}

func exportedText(env *cli.Env, run *runv1.Run, results []exported) error {
	if env.JSON() {
		return output.Value(env.Stdout, map[string]any{"run_id": run.GetRunId(), "sinks": results})
	}
	var table output.Table
	for _, one := range results {
		text := fmt.Sprintf("%s records written, %s already present", output.Count(one.Written), output.Count(one.Known))
		if !one.Done {
			text = env.Style().Red("failed: ") + one.Error
		}
		table.Row(one.Sink, text, one.Where)
	}
	_, err := fmt.Fprint(env.Stdout, table.String())
	return err
}

// writeExport writes the file that the worker reads: a line about the run, then a line per event.
func writeExport(ctx context.Context, path string, r record.Reader, run *runv1.Run, sinks *configv1.SinksConfig) (err error) {
	config := proto.CloneOf(run.GetPlan().GetConfig())
	config.Sinks = sinks
	marshal := protojson.MarshalOptions{UseProtoNames: true}
	text, err := marshal.Marshal(config)
	if err != nil {
		return fmt.Errorf("write the export spec: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write the export spec: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := bufio.NewWriter(f)
	if err := output.ValueLine(w, map[string]any{
		"run_id": run.GetRunId(), "directory": run.GetDirectory(), "base_dir": run.GetBaseDir(), "config": json.RawMessage(text),
	}); err != nil {
		return err
	}
	wanted := &storagev1.EventFilter{RunId: run.GetRunId(), Kinds: []string{"completions", "step.committed", "eval.finished", "run.state"}}
	if err := record.Each(ctx, r, wanted, func(e *eventv1.Event) error { return output.Line(w, "", e) }); err != nil {
		return err
	}
	return w.Flush()
}

// tailOf returns the end of a log.
func tailOf(log string) string {
	const most = 2000
	return strings.TrimSpace(log[max(0, len(log)-most):])
}
