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
	return cli.Group("daemon", "Manage the local control plane (rolloutd)",
		startCommand(env), stopCommand(env), statusCommand(env))
}

func startCommand(env *cli.Env) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "start",
		Short: "Start the local daemon",
		Long: `Start the local daemon if none is running. It logs to logs/rolloutd.log in the state folder; the log is rotated at 16 MiB, and three old
ones are kept as rolloutd.log.1 (the newest) to rolloutd.log.3.

Commands that start the daemon of the state folder later, such as rollout run, start it with the same --config. Without --config it is
the default again.`,
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
			if err := daemon.Remember(stateDir, args); err != nil {
				return err
			}
			info, err := env.Plane.Daemon(ctx, stateDir, true)
			if err != nil {
				return err
			}
			return showInfo(env, stateDir, info)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "configuration `file` of rolloutd (default: $XDG_CONFIG_HOME/rollout/rolloutd.toml)")
	_ = cmd.MarkFlagFilename("config", "toml")
	return cmd
}

// configured returns the arguments that make rolloutd read a configuration file, which is checked
// first. The path is absolute because rolloutd runs in its state folder.
func configured(file, stateDir string, environ []string) ([]string, error) {
	file, err := filepath.Abs(file)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(file); err != nil {
		return nil, exit.New(exit.NoInput, "set the configuration file of rolloutd with --config", "%w", err)
	}
	args := []string{"--config", file}
	if _, err := daemonconfig.Load(append(args, "--state-dir", stateDir), environ, io.Discard); err != nil {
		return nil, exit.New(exit.Data, "see deploy/rolloutd.toml for all keys", "%w", err)
	}
	return args, nil
}

func stopCommand(env *cli.Env) *cobra.Command {
	var now bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "stop",
		Short: "Stop the local daemon; active runs are interrupted and can be resumed",
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
			info, err := daemon.Stop(ctx, stateDir, timeout, now)
			if err != nil {
				return err
			}
			if env.JSON() {
				return output.Value(env.Stdout, map[string]any{"stopped": info != nil})
			}
			if info == nil {
				fmt.Fprintln(env.Stdout, "no daemon is running")
				return nil
			}
			fmt.Fprintf(env.Stdout, "stopped rolloutd (pid %d)\n", info.PID)
			return nil
		},
	}
	cmd.Flags().BoolVar(&now, "now", false, "do not wait for active calls and steps")
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "maximum time to wait for the daemon to stop")
	return cmd
}

func statusCommand(env *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "Show the local daemon",
		Long:    "Show the process, addresses and folders of the local daemon. The exit code is 69 if none is running.",
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
				fmt.Fprintf(env.Stdout, "no daemon is running in %s\n", stateDir)
				return exit.Silent(exit.Unavailable)
			}
			return showInfo(env, stateDir, info)
		},
	}
}

func showInfo(env *cli.Env, stateDir string, info *daemon.Info) error {
	shown := *info
	if shown.Gateway != "" {
		shown.Gateway += "/v1" // the base URL of OpenAI clients
	}
	if env.JSON() {
		return output.Value(env.Stdout, map[string]any{"state_dir": stateDir, "daemon": shown})
	}
	var table output.Table
	table.Row("rolloutd", fmt.Sprintf("pid %d, version %s", info.PID, info.Version))
	table.Row("services", strings.Join(info.Targets, ", "))
	table.Row("grpc", info.GRPC)
	if shown.Gateway != "" {
		table.Row("gateway", shown.Gateway)
	}
	table.Row("state", stateDir)
	table.Row("log", daemon.LogFile(stateDir))
	fmt.Fprint(env.Stdout, table.String())
	return nil
}
