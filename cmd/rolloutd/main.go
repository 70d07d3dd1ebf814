// Command rolloutd is the control plane: it hosts any subset of the seven services, and the NATS server and registry between them
// where no others are named.
//
//	rolloutd                                            everything in one process
//	rolloutd --target nats,registry                     the servers alone
//	rolloutd --state-dir D/buffer --target buffer --join D   one service, on the servers of the rolloutd in D
//
// SIGTERM or SIGINT drains: calls in hand end, workers stop, runs are interrupted and can be resumed. A second one stops at once.
// SIGHUP is ignored.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"slices"

	local "github.com/rollout-rl/rollout/cmd/internal/daemon"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/lifecycle"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/telemetry"
)

// version is set by the linker.
var version = "unknown"

// Exit codes, by sysexits(3).
const (
	exitUsage       = 64
	exitData        = 65 // a database is damaged
	exitNoInput     = 66 // a secret, a token or a certificate is not where the configuration says
	exitUnavailable = 69
	exitSoftware    = 70
	exitCannotMake  = 73 // the state folder can't be written
	exitInterrupted = 130
)

// slackBytes count as in use and are never touched, so that no page of them exists: as much garbage as these may pile up before it is
// collected, however little else is in use. Without them a collection came every few hundred puts, and each reads all that is in use.
// A GOMEMLIMIT counts them, too: give it 64 MB more than is meant.
const slackBytes = 64 << 20

func main() {
	slack := make([]byte, slackBytes)
	if err := rpc.PoolBuffers(); err != nil {
		fmt.Fprintln(os.Stderr, "rolloutd:", err)
		os.Exit(exitSoftware)
	}
	drain, hard, stop := lifecycle.Signals(context.Background())
	code := run(drain, hard, os.Args[1:], os.Environ(), os.Stderr)
	stop()
	runtime.KeepAlive(slack)
	os.Exit(code)
}

// run is main without the process around it.
func run(drain, hard context.Context, args, environ []string, out io.Writer) int {
	cfg, err := config.Load(args, environ, out)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(out, "\nTargets: all, %s.\n", targetNames())
		return 0
	}
	if err != nil {
		fmt.Fprintln(out, "rolloutd:", err)
		return exitUsage
	}
	targets, err := resolveTargets(cfg)
	if err != nil {
		fmt.Fprintln(out, "rolloutd:", err)
		return exitUsage
	}
	out = local.BoundLog(out, cfg.StateDir)
	handler, err := telemetry.NewHandler(out, cfg.Log.Format, cfg.Log.Level)
	if err != nil {
		fmt.Fprintln(out, "rolloutd:", err)
		return exitUsage
	}
	log := slog.New(handler)
	err = serve(drain, hard, cfg, targets, environ, handler)
	switch {
	case err == nil:
		log.Info("stopped")
		return 0
	case errors.Is(err, lifecycle.ErrHardStop):
		log.Warn("stopped before everything had ended", "error", err)
		return exitInterrupted
	}
	code := codeOf(err)
	text := "rolloutd can't start"
	if code == exitSoftware {
		text = "rolloutd failed"
	}
	if fix := cmp.Or(rpcerr.Fix(err), fixOf(err)); fix != "" {
		log.Error(text, "error", err, "fix", fix)
	} else {
		log.Error(text, "error", err)
	}
	return code
}

// fixOf is what to do where a server does not answer at the start.
func fixOf(err error) string {
	for target, key := range map[error]string{
		sqldb.ErrUnavailable: "database.url", bus.ErrUnavailable: "nats.url", discovery.ErrUnavailable: "consul.address",
	} {
		if errors.Is(err, target) {
			return "check " + key + ", and that this host reaches it; `rollout doctor` says why"
		}
	}
	return ""
}

// unavailable are the errors of what rolloutd needs and has not: servers, addresses, its folder.
var unavailable = []error{
	errUnavailable, errLocked, errListen, errStranger, bus.ErrUnavailable, bus.ErrToken, discovery.ErrUnavailable, discovery.ErrDenied, rpc.ErrTokenFile,
	sqldb.ErrUnavailable, sqldb.ErrDenied, sqldb.ErrRole, sqldb.ErrVersion, sqldb.ErrNewer,
	blob.ErrUnavailable, blob.ErrDenied, blob.ErrNoBucket,
}

// codeOf is the exit code of what ended the process.
func codeOf(err error) int {
	is := func(target error) bool { return errors.Is(err, target) }
	switch {
	case is(config.ErrSecret), is(rpc.ErrTokenMissing), is(cert.ErrFile), is(cert.ErrMissing):
		return exitNoInput
	case is(sqldb.ErrDamaged):
		return exitData
	case is(errFolder):
		return exitCannotMake
	case slices.ContainsFunc(unavailable, is):
		return exitUnavailable
	}
	return exitSoftware
}
