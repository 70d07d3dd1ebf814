// Command rolloutd is the control plane. It hosts any subset of the seven services, and embedded
// NATS and registry servers unless others are configured.
//
//	rolloutd                                            all targets in one process
//	rolloutd --target nats,registry                     only the embedded servers
//	rolloutd --state-dir D/buffer --target buffer --join D   one service, with the servers of the rolloutd in D
//
// SIGTERM or SIGINT drains: active calls finish, workers stop, runs are interrupted and can be
// resumed. A second signal stops immediately. SIGHUP is ignored.
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
	"os/signal"
	"runtime"
	"slices"
	"syscall"

	"google.golang.org/protobuf/proto"

	local "github.com/rollout-rl/rollout/cmd/internal/daemon"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/lifecycle"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/telemetry"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner"
	"github.com/rollout-rl/rollout/services/scheduler/launch/keeper"
)

// version is set by the linker.
var version = "unknown"

// slackBytes is the size of an allocation that is never touched, so it uses no memory. It raises
// the heap size at which the garbage collector runs: with a small heap it would run every few
// hundred puts. A GOMEMLIMIT must be 64 MB larger because of it.
const slackBytes = 64 << 20

// keeperArgument makes this program the keeper of workers (services/scheduler/launch/keeper), which
// a scheduler starts.
const keeperArgument = "keep-workers"

func main() {
	if slices.Equal(os.Args[1:], []string{keeperArgument}) {
		keep()
	}
	if slices.Equal(os.Args[1:], []string{local.ValidateArgument}) {
		if err := validate(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "rolloutd "+local.ValidateArgument+":", err)
			os.Exit(exit.Software)
		}
		return
	}
	slack := make([]byte, slackBytes)
	if err := rpc.PoolBuffers(); err != nil {
		fmt.Fprintln(os.Stderr, "rolloutd:", err)
		os.Exit(exit.Software)
	}
	drain, hard, stop := lifecycle.Signals(context.Background())
	code := run(drain, hard, os.Args[1:], os.Environ(), os.Stderr)
	stop()
	runtime.KeepAlive(slack)
	os.Exit(code)
}

// validate reads a request to validate a configuration, and writes the response.
func validate(in io.Reader, out io.Writer) error {
	raw, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	request := &planv1.ValidateConfigRequest{}
	if err := proto.Unmarshal(raw, request); err != nil {
		return err
	}
	response, err := planner.Validate(request)
	if err != nil {
		return err
	}
	if raw, err = proto.Marshal(response); err == nil {
		_, err = out.Write(raw)
	}
	return err
}

// keep is the main function of a keeper. It does not return.
func keep() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	if err := keeper.Serve(signals); err != nil {
		fmt.Fprintln(os.Stderr, "rolloutd "+keeperArgument+":", err)
		os.Exit(exit.Software)
	}
	os.Exit(0)
}

// run is main without access to the process.
func run(drain, hard context.Context, args, environ []string, out io.Writer) int {
	cfg, err := config.Load(args, environ, out)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(out, "\nTargets: all, %s.\n", targetNames())
		return 0
	}
	if err != nil {
		fmt.Fprintln(out, "rolloutd:", err)
		return exit.Usage
	}
	targets, err := resolveTargets(cfg)
	if err != nil {
		fmt.Fprintln(out, "rolloutd:", err)
		return exit.Usage
	}
	out = local.BoundLog(out, cfg.StateDir)
	handler, err := telemetry.NewHandler(out, cfg.Log.Format, cfg.Log.Level)
	if err != nil {
		fmt.Fprintln(out, "rolloutd:", err)
		return exit.Usage
	}
	log := slog.New(handler)
	err = serve(drain, hard, cfg, targets, environ, handler)
	switch {
	case err == nil:
		log.Info("stopped")
		return 0
	case errors.Is(err, lifecycle.ErrHardStop):
		log.Warn("stopped before all work had ended", "error", err)
		return exit.Interrupted
	}
	code := codeOf(err)
	text := "rolloutd cannot start"
	if code == exit.Software {
		text = "rolloutd failed"
	}
	if fix := cmp.Or(rpcerr.Fix(err), fixOf(err)); fix != "" {
		log.Error(text, "error", err, "fix", fix)
	} else {
		log.Error(text, "error", err)
	}
	return code
}

// fixOf returns the fix for a server that does not answer at the start.
func fixOf(err error) string {
	for target, key := range map[error]string{
		sqldb.ErrUnavailable: "database.url", bus.ErrUnavailable: "nats.url", discovery.ErrUnavailable: "consul.address",
	} {
		if errors.Is(err, target) {
			return "check " + key + " and the connection of this host to it; `rollout doctor` shows details"
		}
	}
	return ""
}

// unavailable lists errors of resources that rolloutd needs: servers, addresses, the state folder.
var unavailable = []error{
	errUnavailable, errLocked, errListen, errOtherMesh, bus.ErrUnavailable, bus.ErrToken, discovery.ErrUnavailable, discovery.ErrDenied, rpc.ErrTokenFile,
	sqldb.ErrUnavailable, sqldb.ErrDenied, sqldb.ErrRole, sqldb.ErrVersion, sqldb.ErrNewer,
	blob.ErrUnavailable, blob.ErrDenied, blob.ErrNoBucket,
}

// codeOf returns the exit code for an error.
func codeOf(err error) int {
	is := func(target error) bool { return errors.Is(err, target) }
	switch {
	case is(config.ErrSecret), is(rpc.ErrTokenMissing), is(cert.ErrFile), is(cert.ErrMissing):
		return exit.NoInput
	case is(sqldb.ErrDamaged):
		return exit.Data
	case is(errFolder):
		return exit.CannotMake
	case slices.ContainsFunc(unavailable, is), rpcerr.DiskFull(err):
		return exit.Unavailable
	}
	return exit.Software
}
