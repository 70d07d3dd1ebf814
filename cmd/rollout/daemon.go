package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/daemon"
	"github.com/rollout-rl/rollout/cmd/internal/exit"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	daemonconfig "github.com/rollout-rl/rollout/libs/config"
)

func (a *app) daemonCommand() *cobra.Command {
	return parent("daemon", "Start, stop and look at the local control plane (rolloutd)",
		a.daemonStart(), a.daemonStop(), a.daemonStatus())
}

func (a *app) daemonStart() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "start",
		Short: "Start the local daemon where none runs",
		Long: `Start the local daemon where none runs. With --config it reads that rolloutd.toml; its state folder is that of --state-dir, or the
default one, where the other commands look for it. It writes to logs/rolloutd.log there; beyond 16 MiB the log begins anew, and the
three before it are kept as rolloutd.log.1 (the newest) to rolloutd.log.3.`,
		Example: "  rollout daemon start\n  rollout daemon start --state-dir /tmp/rollout --config rolloutd.toml",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			stateDir, err := daemon.StateDir(a.stateDir, a.environ)
			if err != nil {
				return err
			}
			var args []string
			if file != "" {
				if args, err = configured(file, stateDir, a.environ); err != nil {
					return err
				}
			}
			info, err := a.ensure(ctx, stateDir, args...)
			if err != nil {
				return err
			}
			return a.daemonInfo(stateDir, info)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "`file` of rolloutd's configuration (default: $XDG_CONFIG_HOME/rollout/rolloutd.toml)")
	_ = cmd.MarkFlagFilename("config", "toml")
	return cmd
}

// configured is what tells rolloutd, which runs in its state folder, to read a file. One that it could not read is refused now.
func configured(file, stateDir string, environ []string) ([]string, error) {
	file, err := filepath.Abs(file)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(file); err != nil {
		return nil, exit.New(exit.NoInput, "name rolloutd's configuration with --config", "%w", err)
	}
	args := []string{"--config", file}
	if _, err := daemonconfig.Load(append(args, "--state-dir", stateDir), environ, io.Discard); err != nil {
		return nil, exit.New(exit.Data, "deploy/rolloutd.toml lists every key", "%w", err)
	}
	return args, nil
}

func (a *app) daemonStop() *cobra.Command {
	var now bool
	var patience time.Duration
	cmd := &cobra.Command{
		Use:   "stop",
		Short: "Stop the local daemon; runs that go on are interrupted and can be resumed",
		Example: `  rollout daemon stop
  rollout daemon stop --now`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			stateDir, err := daemon.StateDir(a.stateDir, a.environ)
			if err != nil {
				return err
			}
			info, err := daemon.Stop(ctx, stateDir, patience, now)
			if err != nil {
				return err
			}
			if a.format == formatJSON {
				return output.Value(a.stdout, map[string]any{"stopped": info != nil})
			}
			if info == nil {
				fmt.Fprintln(a.stdout, "no daemon runs")
				return nil
			}
			fmt.Fprintf(a.stdout, "stopped rolloutd (pid %d)\n", info.PID)
			return nil
		},
	}
	cmd.Flags().BoolVar(&now, "now", false, "do not wait for work in hand")
	cmd.Flags().DurationVar(&patience, "timeout", time.Minute, "how long it may take")
	return cmd
}

func (a *app) daemonStatus() *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "Say whether the local daemon runs, and where",
		Long:    "Say whether the local daemon runs, and where. The exit code is 69 where none runs.",
		Example: "  rollout daemon status",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			stateDir, err := daemon.StateDir(a.stateDir, a.environ)
			if err != nil {
				return err
			}
			info, err := daemon.Find(stateDir)
			if err != nil {
				return err
			}
			if info == nil {
				if a.format == formatJSON {
					return errors.Join(output.Value(a.stdout, map[string]any{"state_dir": stateDir, "daemon": nil}), exit.Silent(exit.Unavailable))
				}
				fmt.Fprintf(a.stdout, "no daemon runs in %s\n", stateDir)
				return exit.Silent(exit.Unavailable)
			}
			return a.daemonInfo(stateDir, info)
		},
	}
}

func (a *app) daemonInfo(stateDir string, info *daemon.Info) error {
	told := *info
	if told.Gateway != "" {
		told.Gateway += "/v1" // what clients want as their base URL
	}
	if a.format == formatJSON {
		return output.Value(a.stdout, map[string]any{"state_dir": stateDir, "daemon": told})
	}
	var table output.Table
	table.Row("rolloutd", fmt.Sprintf("pid %d, version %s", info.PID, info.Version))
	table.Row("services", strings.Join(info.Targets, ", "))
	table.Row("grpc", info.GRPC)
	if told.Gateway != "" {
		table.Row("gateway", told.Gateway)
	}
	table.Row("state", stateDir)
	table.Row("log", daemon.LogFile(stateDir))
	fmt.Fprint(a.stdout, table.String())
	return nil
}
