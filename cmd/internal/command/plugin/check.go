package plugin

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
)

const newLong = `Make a plugin in a new folder: code, golden samples, and a test that passes.

KIND is reward, environment, tool, or data_source, or one that no configuration uses yet: evaluation, advantage, or loss. A plugin
in Python is a file, and a package that "rollout plugin install" installs; one in Go is a program with a manifest. Losses and
advantage estimators are in Python.`

func newCommand(env *cli.Env) *cobra.Command {
	var worker cli.WorkerFlag
	var language, folder string
	cmd := &cobra.Command{
		Use: "new KIND NAME", Short: "Make a plugin with golden samples and a test", Args: cobra.ExactArgs(2), Long: newLong,
		Example: "  rollout plugin new reward word_count\n  rollout plugin new environment maze --language go --folder plugins",
	}
	cmd.Flags().StringVar(&language, "language", "python", "`LANGUAGE` of the code: python or go")
	cmd.Flags().StringVar(&folder, "folder", ".", "`folder` in which the folder NAME is made")
	worker.AddTo(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		request := map[string]any{"new": args[0], "name": args[1], "language": language, "folder": folder}
		got, err := ask(cmd.Context(), env.Stderr, worker.Command(), request)
		if err != nil {
			return err
		}
		if env.JSON() {
			return output.Value(env.Stdout, got.made)
		}
		var text strings.Builder
		fmt.Fprintf(&text, "made %s: %s\n\n", relative(got.Folder), strings.Join(got.Files, ", "))
		for _, command := range got.Commands {
			fmt.Fprintf(&text, "  %s\n", command)
		}
		if got.Config != "" {
			fmt.Fprintf(&text, "\n%s\n", got.Config)
		}
		_, err = env.Stdout.Write([]byte(text.String()))
		return err
	}
	return cmd
}

const testLong = `Test a plugin alone: without a GPU, network, or services, in less than a minute.

The plugin is loaded as the workers load it, and its answers are compared with golden samples, one JSON object a line: the input, and
what is expected of the answer. Further checks: equal answers in other calls, orders, and batches, unusual inputs, time, and memory. The
exit code is 65 if a check fails.`

func testCommand(env *cli.Env) *cobra.Command {
	var worker cli.WorkerFlag
	var kind, samples string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use: "test PLUGIN", Short: "Test a plugin alone, with golden samples", Args: cobra.ExactArgs(1), Long: testLong,
		Example: "  rollout plugin test word_count.py:word_count\n  rollout plugin test plugin.toml:word_count --format json\n  rollout plugin test acme-rewards:word_count --samples samples.jsonl",
	}
	cmd.Flags().StringVar(&kind, "kind", "", "`KIND` of the plugin (default: that of its manifest or package, or the one that its samples fit)")
	cmd.Flags().StringVar(&samples, "samples", "", "`FILE` of golden samples (default: NAME.samples.jsonl or samples.jsonl next to the plugin)")
	cmd.Flags().DurationVar(&timeout, "timeout", 10*time.Second, "`TIME` that a call may take")
	worker.AddTo(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		here, err := os.Getwd()
		if err != nil {
			return err
		}
		request := map[string]any{"test": args[0], "base_dir": here, "kind": kind, "samples": samples, "timeout": timeout.Seconds()}
		got, err := ask(cmd.Context(), env.Stderr, worker.Command(), request)
		switch {
		case err != nil:
			return err
		case got.Report == nil:
			return exit.New(exit.Software, "update rollout and the workers together", "%s printed no report", strings.Join(worker.Command(), " "))
		}
		if err := printReport(env, got.Report); err != nil {
			return err
		}
		if !got.Report.Passed {
			return exit.Silent(exit.Data)
		}
		return nil
	}
	return cmd
}

func printReport(env *cli.Env, found *report) error {
	if env.JSON() {
		return output.Value(env.Stdout, found)
	}
	s := env.Style()
	var text strings.Builder
	failed := 0
	for _, v := range found.Verdicts {
		mark := map[string]string{"pass": "ok  ", "skip": "skip", "fail": s.Bold("FAIL")}[v.Verdict]
		fmt.Fprintf(&text, "%s  %-12s %5.1f s  %s\n", mark, v.Check, v.Seconds, v.Detail)
		if v.Fix != "" {
			fmt.Fprintf(&text, "      fix: %s\n", v.Fix)
		}
		if v.Verdict == "fail" {
			failed++
		}
	}
	if failed > 0 {
		fmt.Fprintf(&text, "%s %s: %d of %d checks failed, in %.1f s\n", found.Kind, found.Plugin, failed, len(found.Verdicts), found.Seconds)
	} else {
		fmt.Fprintf(&text, "%s %s passes, in %.1f s\n", found.Kind, found.Plugin, found.Seconds)
	}
	_, err := env.Stdout.Write([]byte(text.String()))
	return err
}
