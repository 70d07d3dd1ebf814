// Package doctor has the command `rollout doctor`.
package doctor

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/command/process"
	"github.com/rollout-rl/rollout/cmd/internal/doctor"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/program"
	daemonconfig "github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/exit"
)

// Command returns `rollout doctor`.
func Command(env *cli.Env) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check the servers that rolloutd is configured to use",
		Long: `Check the servers in the configuration of rolloutd: PostgreSQL, NATS, Consul, the bucket, certificates and the state folder. Each
check shows how to fix what it found. Connectivity, versions, permissions, clocks, stream settings and free space are checked; for
this a service is registered, a stream created and an object written, and removed again. The check of the sandbox shows what enforces
the limits of tools on this host; that of processes saves and restores one, as snapshots of kind process do.

The exit code is 0 if no check failed, 69 if a check failed, and 65 if the configuration is invalid.`,
		Example: "  rollout doctor --config rolloutd.toml\n  rollout doctor --format json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			args := []string{}
			if file != "" {
				args = append(args, "--config", file)
			}
			if env.Plane.StateFlag != "" {
				args = append(args, "--state-dir", env.Plane.StateFlag)
			}
			c, err := daemonconfig.Load(args, env.Environ, io.Discard)
			if err != nil {
				return exit.New(exit.Data, "see deploy/rolloutd.toml for all keys", "%w", err)
			}
			sandbox, _ := program.Find("rollout-sandbox") // the check reports that it is missing
			return show(cmd.Context(), env, doctor.Input{Config: c, Environ: env.Environ, Sandbox: sandbox, Processes: process.Checkpointer(), Now: time.Now})
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "configuration `file` of rolloutd (default: $XDG_CONFIG_HOME/rollout/rolloutd.toml)")
	return cmd
}

func show(ctx context.Context, env *cli.Env, p doctor.Input) error {
	findings := doctor.Check(ctx, p)
	if err := writeFindings(env.Stdout, env.JSON(), findings); err != nil {
		return err
	}
	if doctor.Worst(findings) == doctor.Failed {
		return exit.Silent(exit.Unavailable)
	}
	return nil
}

// writeFindings writes them as a table, each fix below its finding, or as one JSON document.
func writeFindings(w io.Writer, asJSON bool, findings []doctor.Finding) error {
	if asJSON {
		return output.Value(w, map[string]any{"status": doctor.Worst(findings), "findings": findings})
	}
	var table output.Table
	for _, f := range findings {
		table.Row(string(f.Status), f.Server, f.Check, f.Detail)
	}
	lines := strings.SplitAfter(table.String(), "\n")
	counts := map[doctor.Status]int{}
	for i, f := range findings {
		counts[f.Status]++
		text := lines[i]
		if f.Fix != "" {
			text += "         fix: " + f.Fix + "\n"
		}
		if _, err := io.WriteString(w, text); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "%d ok, %d warnings, %d failed\n", counts[doctor.OK], counts[doctor.Warning], counts[doctor.Failed])
	return err
}
