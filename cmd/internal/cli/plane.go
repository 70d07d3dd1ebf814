package cli

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
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/exit"
)

// consulToken is the environment variable of the ACL token for Consul.
const consulToken = "CONSUL_HTTP_TOKEN"

// Plane connects to the control plane that the flags name, else to the local daemon.
type Plane struct {
	Server, Consul, TokenFile, APIKey string // flags of the root command
	StateFlag                         string // --state-dir; StateDir applies the default
	Certs                             cert.Files
	Insecure                          bool // connect to a remote server without TLS

	// Dial replaces the connection in tests; nil: Connect dials.
	Dial func(ctx context.Context) (*client.Client, error)

	printer *Printer
	environ []string
}

// AddFlags adds the flags that name a control plane, with defaults from the environment.
func (p *Plane) AddFlags(cmd *cobra.Command) {
	flags := cmd.PersistentFlags()
	flags.StringVar(&p.Server, "server", p.getenv("ROLLOUT_SERVER"), "`address` (host:port) of a control plane (default: a local daemon)")
	flags.StringVar(&p.Consul, "consul", p.getenv("ROLLOUT_CONSUL"), "`address` (host:port or URL) of a Consul agent in which the services are registered; the ACL token is read from $CONSUL_HTTP_TOKEN")
	flags.StringVar(&p.StateFlag, "state-dir", "", "`folder` of the local control plane (default: $ROLLOUT_STATE_DIR, else ~/.local/state/rollout)")
	flags.StringVar(&p.TokenFile, "token-file", "", "`file` with the token for --server (default: the file token in the state folder)")
	flags.StringVar(&p.APIKey, "api-key", "", "`reference` to an API key: env:NAME or file:PATH (default: $ROLLOUT_API_KEY, else the token)")
	flags.StringVar(&p.Certs.CA, "ca-file", p.getenv("ROLLOUT_CA_FILE"), "`file` (PEM) of the certificate authority of the server")
	flags.StringVar(&p.Certs.Cert, "cert-file", p.getenv("ROLLOUT_CERT_FILE"), "`file` (PEM) of the client certificate")
	flags.StringVar(&p.Certs.Key, "key-file", p.getenv("ROLLOUT_KEY_FILE"), "`file` (PEM, mode 0600) of the key of the client certificate")
	flags.BoolVar(&p.Insecure, "insecure", false, "connect to a remote server without TLS; use only on a private network")
}

func (p *Plane) getenv(name string) string { return getenv(p.environ, name) }

// StateDir returns the state folder of the local control plane.
func (p *Plane) StateDir() (string, error) { return daemon.StateDir(p.StateFlag, p.environ) }

// Local reports whether no flag names a control plane.
func (p *Plane) Local() bool { return p.Server == "" && p.Consul == "" }

// ModelsDir returns the folder for models that commands make for runs: in the state folder of the
// local control plane, or next to the configuration for another one.
func (p *Plane) ModelsDir(baseDir string) (string, error) {
	if !p.Local() {
		return filepath.Join(baseDir, ".rollout", "models"), nil
	}
	state, err := p.StateDir()
	return filepath.Join(state, "models"), err
}

// Connect connects to the control plane. Where it is the local daemon and none runs, one is started
// if start is true; else the error has the reason NO_DAEMON.
func (p *Plane) Connect(ctx context.Context, start bool) (*client.Client, error) {
	if p.Dial != nil {
		return p.Dial(ctx)
	}
	stateDir, err := p.StateDir()
	if err != nil {
		return nil, exit.New(exit.Usage, "set the state folder with --state-dir", "%w", err)
	}
	key, err := p.key()
	if err != nil {
		return nil, err
	}
	o := client.Options{Key: key, ACL: p.getenv(consulToken)}
	if p.Local() {
		info, err := p.Daemon(ctx, stateDir, start)
		if err != nil {
			return nil, err
		}
		o.Address, o.Hosted, o.Consul, o.TokenFile = info.GRPC, info.Targets, info.Consul, info.TokenFile
		certs := p.Certs
		if certs == (cert.Files{}) { // this user may read the daemon's certificate
			certs = cert.Files{CA: info.CAFile, Cert: info.CertFile, Key: info.KeyFile}
		}
		if o.TLS, err = client.TLSFor(info.GRPC, certs, true); err != nil { // rolloutd has checked its own address
			return nil, err
		}
		c, err := client.Dial(ctx, o)
		if err != nil {
			return nil, info.Silent(stateDir, err)
		}
		return c, nil
	}
	o.Address, o.Consul, o.TokenFile = p.Server, p.Consul, p.TokenFile
	if o.TokenFile == "" {
		o.TokenFile = filepath.Join(stateDir, "token")
	}
	address := p.Server
	if address == "" {
		address = p.Consul
	}
	if o.TLS, err = client.TLSFor(address, p.Certs, p.Insecure); err != nil {
		return nil, err
	}
	return client.Dial(ctx, o)
}

// key returns the API key to call with; "" where none is set.
func (p *Plane) key() (string, error) {
	if p.APIKey == "" {
		return p.getenv("ROLLOUT_API_KEY"), nil
	}
	var ref config.Ref
	if err := ref.UnmarshalText([]byte(p.APIKey)); err != nil {
		return "", Usage("invalid argument for --api-key: %w", err)
	}
	key, err := ref.Read("--api-key", p.environ)
	if err != nil {
		return "", exit.New(exit.NoInput, "set --api-key to env:NAME of a variable, or to file:PATH of a file with mode 0600", "%w", err)
	}
	return key, nil
}

// Daemon returns the local daemon. Where none runs, it starts one if start is true, with args and
// the configuration file of the last `rollout daemon start`.
func (p *Plane) Daemon(ctx context.Context, stateDir string, start bool, args ...string) (*daemon.Info, error) {
	if info, err := daemon.Find(stateDir); info != nil || err != nil {
		return info, err
	}
	if !start {
		return noDaemon(ctx, stateDir)
	}
	binary, err := daemon.FindBinary()
	if err != nil {
		return nil, err
	}
	configured, err := daemon.Remembered(stateDir)
	if err != nil {
		return nil, err
	}
	args = append(configured, args...)
	began := time.Now()
	info, started, err := daemon.Starter{StateDir: stateDir, Binary: binary, Args: args}.Ensure(ctx)
	if started {
		p.printer.Note("started rolloutd (pid %d) in %.1f s; its log is %s", info.PID, time.Since(began).Seconds(), daemon.LogFile(stateDir))
	}
	return info, err
}

// noDaemon returns a daemon that another process is just starting, else the error NO_DAEMON.
func noDaemon(ctx context.Context, stateDir string) (*daemon.Info, error) {
	if info, err := daemon.Starting(ctx, stateDir); info != nil || err != nil {
		return info, err
	}
	e := exit.New(exit.Unavailable, "start one with `rollout daemon start` or `rollout run`, or name a running one with --state-dir or --server",
		"no daemon is running in %s", stateDir)
	e.Reason = "NO_DAEMON"
	return nil, e
}

// With connects, starting the local daemon where needed, and calls f. Ctrl-C cancels its context.
func (p *Plane) With(cmd *cobra.Command, f func(ctx context.Context, c *client.Client) error) error {
	return p.with(cmd, true, f)
}

// Look is With for a command that changes nothing: it starts no daemon.
func (p *Plane) Look(cmd *cobra.Command, f func(ctx context.Context, c *client.Client) error) error {
	return p.with(cmd, false, f)
}

func (p *Plane) with(cmd *cobra.Command, start bool, f func(ctx context.Context, c *client.Client) error) error {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	c, err := p.Connect(ctx, start)
	if err != nil {
		return err
	}
	defer c.Close()
	return f(ctx, c)
}

// AskOrRead calls ask with the control plane that is named or that runs here. Where neither exists
// it calls read with the state folder. It starts no daemon.
func (p *Plane) AskOrRead(cmd *cobra.Command, ask func(context.Context, *client.Client) error, read func(ctx context.Context, state string) error) error {
	if p.Local() {
		state, err := p.StateDir()
		if err != nil {
			return exit.New(exit.Usage, "set the state folder with --state-dir", "%w", err)
		}
		info, err := daemon.Find(state)
		if err != nil {
			return err
		}
		if info == nil {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			p.printer.Note("no control plane is running here; reading %s", state)
			return read(ctx, state)
		}
	}
	return p.Look(cmd, ask)
}

// Records is AskOrRead for a command that reads through record.Reader.
func (p *Plane) Records(cmd *cobra.Command, use func(context.Context, record.Reader) error) error {
	return p.AskOrRead(cmd,
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

// Browse is Records for commands that list and show. Where there is neither a control plane nor a
// state folder, its error says how to start one.
func (p *Plane) Browse(cmd *cobra.Command, use func(context.Context, record.Reader) error) error {
	if state, err := p.StateDir(); err != nil || record.Check(state) != nil {
		return p.Look(cmd, func(ctx context.Context, c *client.Client) error { return use(ctx, record.Services{Client: c}) })
	}
	return p.Records(cmd, use)
}
