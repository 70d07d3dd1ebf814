package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/daemon"
	"github.com/rollout-rl/rollout/cmd/internal/exit"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/cert"
	daemonconfig "github.com/rollout-rl/rollout/libs/config"
)

// consulToken is the variable of the CLI's ACL token.
const consulToken = "CONSUL_HTTP_TOKEN"

// connect goes to the control plane that was named, else to the local daemon, which it starts where there is none and the
// command does more than look.
func (a *app) connect(ctx context.Context) (*client.Client, error) {
	stateDir, err := daemon.StateDir(a.stateDir, a.environ)
	if err != nil {
		return nil, exit.New(exit.Usage, "name one with --state-dir", "%w", err)
	}
	if a.server == "" && a.consul == "" {
		info, err := a.ensure(ctx, stateDir)
		if err != nil {
			return nil, err
		}
		if a.certs == (cert.Files{}) { // we may read what it shows
			a.certs = cert.Files{CA: info.CAFile, Cert: info.CertFile, Key: info.KeyFile}
		}
		tls, err := client.TLSFor(info.GRPC, a.certs, true) // our own: it checked that itself
		if err != nil {
			return nil, err
		}
		key, err := a.key()
		if err != nil {
			return nil, err
		}
		return client.Dial(ctx, client.Options{Key: key, Address: info.GRPC, Hosted: info.Targets, Consul: info.Consul, ACL: a.env(consulToken), TokenFile: info.TokenFile, TLS: tls})
	}
	o := client.Options{Address: a.server, Consul: a.consul, ACL: a.env(consulToken), TokenFile: a.tokenFile}
	if o.Key, err = a.key(); err != nil {
		return nil, err
	}
	if o.TokenFile == "" {
		o.TokenFile = filepath.Join(stateDir, "token")
	}
	place := a.server
	if place == "" {
		place = a.consul
	}
	if o.TLS, err = client.TLSFor(place, a.certs, a.private); err != nil {
		return nil, err
	}
	return client.Dial(ctx, o)
}

// key is the API key to call with; "" where there is none.
func (a *app) key() (string, error) {
	if a.apiKey == "" {
		return a.env("ROLLOUT_API_KEY"), nil
	}
	var ref daemonconfig.Ref
	err := ref.UnmarshalText([]byte(a.apiKey))
	if err != nil {
		return "", usage("invalid argument for --api-key: %w", err)
	}
	key, err := ref.Read("--api-key", a.environ)
	if err != nil {
		return "", exit.New(exit.NoInput, "name a file (chmod 600) or a variable that holds the key", "%w", err)
	}
	return key, nil
}

// ensure returns the local daemon.
func (a *app) ensure(ctx context.Context, stateDir string, args ...string) (*daemon.Info, error) {
	if info, err := daemon.Find(stateDir); info != nil || err != nil {
		return info, err
	}
	if a.looks {
		return a.noDaemon(ctx, stateDir)
	}
	binary, err := daemon.FindBinary()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	info, started, err := daemon.Starter{StateDir: stateDir, Binary: binary, Args: args}.Ensure(ctx)
	if started {
		a.note("started rolloutd (pid %d) in %.1f s; log %s", info.PID, time.Since(began).Seconds(), daemon.LogFile(stateDir))
	}
	return info, err
}

// noDaemon says that there is nothing to look at, unless somebody is just starting the daemon.
func (a *app) noDaemon(ctx context.Context, stateDir string) (*daemon.Info, error) {
	if info, err := daemon.Coming(ctx, stateDir); info != nil || err != nil {
		return info, err
	}
	e := exit.New(exit.Unavailable, "`rollout daemon start` starts one, and so does `rollout run`; where it runs elsewhere, name it with --state-dir or --server",
		"no daemon runs in %s, so there is nothing to look at", stateDir)
	e.Reason = "NO_DAEMON"
	return nil, e
}

// with dials, calls and hangs up. Ctrl-C ends the call.
func (a *app) with(cmd *cobra.Command, call func(ctx context.Context, c *client.Client) error) error {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	c, err := a.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	return call(ctx, c)
}

// look does the same for a command that changes and makes nothing: where no daemon runs, none is started for it.
func (a *app) look(cmd *cobra.Command, call func(ctx context.Context, c *client.Client) error) error {
	a.looks = true
	return a.with(cmd, call)
}

// askOrRead is for commands that can do without a control plane: it asks the one that was named or that runs here, else reads the
// state folder. Nothing is started.
func (a *app) askOrRead(cmd *cobra.Command, ask func(context.Context, *client.Client) error, read func(ctx context.Context, state string) error) error {
	if a.server == "" && a.consul == "" {
		state, err := daemon.StateDir(a.stateDir, a.environ)
		if err != nil {
			return exit.New(exit.Usage, "name one with --state-dir", "%w", err)
		}
		info, err := daemon.Find(state)
		if err != nil {
			return err
		}
		if info == nil {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			a.note("no control plane runs here; reading %s", state)
			return read(ctx, state)
		}
	}
	return a.look(cmd, ask)
}

// records does the same for what record.Reader gives.
func (a *app) records(cmd *cobra.Command, use func(context.Context, record.Reader) error) error {
	return a.askOrRead(cmd,
		func(ctx context.Context, c *client.Client) error { return use(ctx, record.Services{Client: c}) },
		func(ctx context.Context, state string) (err error) {
			folder, err := record.Open(ctx, state)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, folder.Close()) }()
			return use(ctx, folder)
		})
}

// browse is records for commands that people type to look around: where there is neither a control plane nor a state folder, they
// are told how to come by one.
func (a *app) browse(cmd *cobra.Command, use func(context.Context, record.Reader) error) error {
	if state, err := daemon.StateDir(a.stateDir, a.environ); err != nil || record.Held(state) != nil {
		return a.look(cmd, func(ctx context.Context, c *client.Client) error { return use(ctx, record.Services{Client: c}) })
	}
	return a.records(cmd, use)
}
