// Package daemon has the commands `rollout daemon ...`.
package daemon

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

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/daemon"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	daemonconfig "github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/exit"
)

// Command returns `rollout daemon`.
func Command(env *cli.Env) *cobra.Command {
	return cli.Group("daemon", "Start, stop and look at the local control plane (rolloutd)",
		startCommand(env), stopCommand(env), statusCommand(env))
}

func startCommand(env *cli.Env) *cobra.Command {
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
			stateDir, err := env.Plane.StateDir()
			if err != nil {
				return err
			}
			var args []string
			if file != "" {
				if args, err = configured(file, stateDir, env.Environ); err != nil {
					return err
				}
			}
			info, err := env.Plane.Daemon(ctx, stateDir, true, args...)
			if err != nil {
				return err
			}
			return showInfo(env, stateDir, info)
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

func stopCommand(env *cli.Env) *cobra.Command {
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
			stateDir, err := env.Plane.StateDir()
			if err != nil {
				return err
			}
			info, err := daemon.Stop(ctx, stateDir, patience, now)
			if err != nil {
				return err
			}
			if env.JSON() {
				return output.Value(env.Stdout, map[string]any{"stopped": info != nil})
			}
			if info == nil {
				fmt.Fprintln(env.Stdout, "no daemon runs")
				return nil
			}
			fmt.Fprintf(env.Stdout, "stopped rolloutd (pid %d)\n", info.PID)
			return nil
		},
	}
	cmd.Flags().BoolVar(&now, "now", false, "do not wait for work in hand")
	cmd.Flags().DurationVar(&patience, "timeout", time.Minute, "how long it may take")
	return cmd
}

func statusCommand(env *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "Say whether the local daemon runs, and where",
		Long:    "Say whether the local daemon runs, and where. The exit code is 69 where none runs.",
		Example: "  rollout daemon status",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			stateDir, err := env.Plane.StateDir()
			if err != nil {
				return err
			}
			info, err := daemon.Find(stateDir)
			if err != nil {
				return err
			}
			if info == nil {
				if env.JSON() {
					return errors.Join(output.Value(env.Stdout, map[string]any{"state_dir": stateDir, "daemon": nil}), exit.Silent(exit.Unavailable))
				}
				fmt.Fprintf(env.Stdout, "no daemon runs in %s\n", stateDir)
				return exit.Silent(exit.Unavailable)
			}
			return showInfo(env, stateDir, info)
		},
	}
}

func showInfo(env *cli.Env, stateDir string, info *daemon.Info) error {
	told := *info
	if told.Gateway != "" {
		told.Gateway += "/v1" // what clients want as their base URL
	}
	if env.JSON() {
		return output.Value(env.Stdout, map[string]any{"state_dir": stateDir, "daemon": told})
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
	fmt.Fprint(env.Stdout, table.String())
	return nil
}
