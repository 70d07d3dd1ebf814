// Package eval has the command `rollout eval`.
package eval

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/evaluation"
	"github.com/rollout-rl/rollout/cmd/internal/inference"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/cmd/internal/tempdir"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/infer"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/suite"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

type flags struct {
	model, output          string
	config                 cli.ConfigFlags // File: of the suites
	only                   []string
	limit                  uint64
	worker                 cli.WorkerFlag
	restart, allowFailures bool
}

// Command returns `rollout eval`.
func Command(env *cli.Env) *cobra.Command {
	f := &flags{}
	cmd := &cobra.Command{
		Use:   "eval --model FOLDER|RUN|SNAPSHOT --suite FILE",
		Short: "Evaluate a model on suites of tasks",
		Long: `Evaluate a model on suites: sample each row of their data, score the samples, and compute metrics with intervals of 95 %.

The model is a folder, a name on the hub, a run, whose newest snapshot is used, or a snapshot. FILE is TOML with tables
[eval.suites.NAME] (docs/evaluation.md); a configuration of a run may have them, too, and then FILE can be left out for the run.
Settings that FILE lacks, such as [sampling] and model.chat_template, come from the run.

The folder of the output gets NAME.parquet with every sample, NAME.scores.jsonl, results.json, and the page index.html. Finished rows
are kept: after an interruption the same command continues, with equal results. Suites that have ended are not sampled again, unless
their inputs have changed, which is refused without --restart. "rollout compare A B" compares the folders of two models.`,
		Example: `  rollout eval --model models/tiny --suite suites.toml
  rollout eval --model addition-grpo --suite suites.toml --only sums --output after
  rollout compare before after`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return execute(env, cmd, f) },
	}
	cmd.Flags().StringVarP(&f.model, "model", "m", "", "`model`: a folder, a name on the hub, a run, or a snapshot (default: model.path of the suites' file)")
	cmd.Flags().StringVarP(&f.config.File, "suite", "s", "", "`file` with the suites (default: those of the run)")
	cmd.Flags().StringArrayVar(&f.config.Set, "set", nil, "override a field of the suites' file, `table.key=value`; can be repeated")
	cmd.Flags().StringArrayVar(&f.only, "only", nil, "`name` of a suite to evaluate; can be repeated (default: all)")
	cmd.Flags().StringVarP(&f.output, "output", "o", "", "`folder` to write (default: eval-MODEL)")
	cmd.Flags().Uint64Var(&f.limit, "limit", 0, "`number` of rows of each suite, from the start (default: the suite's)")
	cmd.Flags().BoolVar(&f.restart, "restart", false, "evaluate again from scratch")
	cmd.Flags().BoolVar(&f.allowFailures, "allow-failures", false, "leave out samples that are INFRA_FAILED")
	f.worker.AddTo(cmd)
	_ = cmd.MarkFlagFilename("suite", "toml")
	_ = cmd.MarkFlagDirname("output")
	return cmd
}

func execute(env *cli.Env, cmd *cobra.Command, f *flags) error {
	if f.config.File == "" && (f.model == "" || isFolder(f.model)) {
		return cli.Usage("--suite is required, unless --model is a run or a snapshot")
	}
	name := f.model
	if name == "" {
		name = strings.TrimSuffix(filepath.Base(f.config.File), ".toml")
	}
	folder, err := filepath.Abs(cmp.Or(f.output, "eval-"+filepath.Base(name)))
	if err == nil {
		err = os.MkdirAll(folder, 0o755)
	}
	if err != nil {
		return exit.New(exit.CannotMake, "name another folder with --output", "make the folder of the output: %w", cli.PathCause(err))
	}
	scratch, err := tempdir.Make(folder, ".eval-")
	if err != nil {
		return exit.New(exit.CannotMake, "name another folder with --output", "make a temporary folder: %w", err)
	}
	defer func() { _ = scratch.Remove() }()
	e := &evaluating{env: env, cmd: cmd, flags: f, folder: folder, scratch: scratch}
	if f.model != "" && !isFolder(f.model) {
		err = env.Plane.Records(cmd, func(ctx context.Context, r record.Reader) (err error) {
			e.recorded, err = inference.Record(ctx, r, f.model, f.worker.Command(), scratch.Path)
			return err
		})
	}
	if err == nil {
		err = e.read()
	}
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return e.run(ctx)
}

// isFolder reports whether a model is a folder or a name on the hub, in place of a record.
func isFolder(model string) bool {
	info, err := os.Stat(model)
	return err == nil && info.IsDir() || planformat.OnHub("", model) || strings.ContainsRune(model, filepath.Separator)
}

// evaluating is one evaluation.
type evaluating struct {
	env      *cli.Env
	cmd      *cobra.Command
	flags    *flags
	folder   string // of the output
	scratch  *tempdir.Folder
	recorded *inference.Recorded // nil: a folder

	config  *configv1.RunConfig
	baseDir string
	model   string
	digest  string // "": not known
	suites  []string
}

// read reads the suites and chooses the model.
func (e *evaluating) read() (err error) {
	if e.flags.config.File == "" {
		e.config, e.baseDir, e.digest = e.recorded.Run.GetPlan().GetConfig(), e.recorded.Run.GetBaseDir(), e.recorded.Digest
	} else if err = e.readFile(); err != nil {
		return err
	}
	e.suites = suite.Names(e.config)
	if len(e.suites) == 0 {
		return exit.New(exit.Data, "add a table [eval.suites.NAME], see docs/evaluation.md", "%s has no suites", cmp.Or(e.flags.config.File, "the run"))
	}
	for _, name := range e.flags.only {
		if !slices.Contains(e.suites, name) {
			return cli.Usage("invalid argument %q for --only: the suites are %s", name, strings.Join(e.suites, ", "))
		}
	}
	if len(e.flags.only) > 0 {
		e.suites = slices.Compact(slices.Sorted(slices.Values(e.flags.only)))
	}
	if e.recorded != nil {
		e.model = e.recorded.Folder
	} else if e.model, err = inference.Folder(e.flags.model, e.config, e.baseDir); err != nil {
		return err
	}
	return inference.Generates(e.model)
}

// readFile reads the file of the suites.
func (e *evaluating) readFile() error {
	source, err := e.flags.config.Source()
	if err != nil {
		return err
	}
	reading, err := inference.ReadSuites(source)
	if err != nil {
		return err
	}
	if problems := reading.Problems; len(problems) > 0 {
		return inference.Refuse(e.env, problems)
	}
	e.config, e.baseDir = reading.Config, source.GetBaseDir()
	if e.recorded != nil {
		reading.Complete(e.recorded.Run)
		if e.config.GetModel().GetDtype() == e.recorded.Run.GetPlan().GetConfig().GetModel().GetDtype() {
			e.digest = e.recorded.Digest // of the weights in the precision of the run
		}
	}
	return nil
}

// run evaluates the suites one after the other.
func (e *evaluating) run(ctx context.Context) error {
	result := &evaluation.Result{Model: e.name()}
	older := &evaluation.Result{}
	if len(e.flags.only) > 0 && evaluation.Exists(e.folder) {
		var err error
		if older, err = evaluation.Read(e.folder); err != nil {
			return err
		}
	}
	for _, name := range e.suites {
		s, config := e.config.GetEval().GetSuites()[name], suite.Config(e.config, name)
		end, err := e.suite(ctx, name, s, config, older)
		if err != nil {
			return err
		}
		measured, err := evaluation.Measure(e.folder, name, s, config, end)
		if err != nil {
			return err
		}
		result.Digest = end.ModelDigest
		result.Suites = append(result.Suites, measured)
	}
	if len(older.Suites) > 0 {
		if err := result.Keep(older, e.folder); err != nil {
			return err
		}
	}
	if err := result.Write(e.folder); err != nil {
		return err
	}
	return e.show(result)
}

// suite evaluates a suite.
func (e *evaluating) suite(ctx context.Context, name string, s *configv1.EvalSuiteConfig, config *configv1.RunConfig, older *evaluation.Result) (end infer.Event, err error) {
	if suite.OfLibrary(s) {
		e.env.Note("suite %s  %s of %s", name, strings.Join(s.GetTasks(), ", "), s.GetKind())
		end, err = e.library(ctx, name, s, config, older)
	} else {
		var job *infer.Job
		if job, err = e.job(name, s, config); err != nil {
			return end, err
		}
		e.env.Note("suite %s  %s", name, inference.SamplingOf(config))
		end, err = e.sample(ctx, job, older)
	}
	if err != nil {
		return end, fmt.Errorf("suite %s: %w", name, err)
	}
	return end, nil
}

// sample runs the job of a suite. It ends the worker before it samples if the older result, which
// is kept, is of other weights.
func (e *evaluating) sample(ctx context.Context, job *infer.Job, older *evaluation.Result) (infer.Event, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var differs error
	p := &inference.Progress{Env: e.env}
	end, err := job.Run(ctx, infer.Observer{Warning: p.Warning, Event: func(event infer.Event) {
		p.Event(event)
		if (event.Event == "begin" || event.Event == infer.Ready) && len(older.Suites) > 0 {
			if differs = older.Of(event.ModelDigest, e.folder); differs != nil {
				cancel()
			}
		}
	}})
	p.Clear()
	if differs != nil {
		return end, differs
	}
	return end, err
}

// name is the name of the model in the results.
func (e *evaluating) name() string {
	if e.recorded != nil {
		return fmt.Sprintf("%s, step %d", e.recorded.Run.GetName(), e.recorded.Snapshot.GetStep())
	}
	return cmp.Or(e.flags.model, e.config.GetModel().GetPath())
}

// job is the work for a worker that samples and scores one suite.
func (e *evaluating) job(name string, s *configv1.EvalSuiteConfig, config *configv1.RunConfig) (*infer.Job, error) {
	job, err := e.bareJob(name, s, config)
	if err != nil {
		return nil, err
	}
	rows, err := e.recorded.Rows(config, e.baseDir)
	if err != nil {
		return nil, fmt.Errorf("suite %s: %w", name, err)
	}
	job.Data, job.Subset, job.Split = rows.Path, rows.Subset, rows.Split
	if s.Baseline != nil {
		if job.Baseline, err = inference.Data(s.GetBaseline(), e.baseDir); err != nil {
			return nil, fmt.Errorf("suite %s: %w", name, err)
		}
	}
	return job, nil
}

// bareJob is the work for a worker without the data of a suite.
func (e *evaluating) bareJob(name string, s *configv1.EvalSuiteConfig, config *configv1.RunConfig) (*infer.Job, error) {
	scratch := filepath.Join(e.scratch.Path, name)
	if err := os.MkdirAll(scratch, 0o700); err != nil {
		return nil, exit.New(exit.CannotMake, "name another folder with --output", "make a temporary folder: %w", err)
	}
	return &infer.Job{
		Config: config, BaseDir: e.baseDir, Model: e.model, WeightsDigest: e.digest,
		Output: filepath.Join(e.folder, evaluation.Samples(name)), Scores: filepath.Join(e.folder, evaluation.Scores(name)),
		Limit: cmp.Or(e.flags.limit, s.GetLimit()), Threads: int(config.GetEngine().GetThreads()), Cluster: s.GetCluster(),
		Restart: e.flags.restart, AllowFailures: e.flags.allowFailures,
		Worker: e.flags.worker.For(config.GetEngine(), e.baseDir), Scratch: scratch, Lock: e.scratch.Lock(),
	}, nil
}

// show prints the metrics.
func (e *evaluating) show(r *evaluation.Result) error {
	if e.env.JSON() {
		return output.Value(e.env.Stdout, r)
	}
	style := e.env.Style()
	var table output.Table
	table.Row(style.Bold("suite"), style.Bold("metric"), style.Bold("value"), style.Bold("95 % interval"), style.Bold("rows"))
	for _, s := range r.Suites {
		for _, v := range s.Metrics {
			table.Row(s.Name, evaluation.MetricName(v.Metric, v.Part), output.Number(v.Value), evaluation.Interval(v), output.Count(v.Rows))
		}
	}
	_, err := fmt.Fprintf(e.env.Stdout, "%s\npage %s\n", table.String(), filepath.Join(e.folder, "index.html"))
	return err
}
