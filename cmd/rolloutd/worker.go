package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/config"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

const workerProgram = "rollout-worker"

// workerCommand is the configured command, else rollout-worker beside this binary, else whatever PATH has.
func workerCommand(w config.Worker) []string {
	if len(w.Command) > 0 {
		return w.Command
	}
	if self, err := os.Executable(); err == nil {
		if beside := filepath.Join(filepath.Dir(self), workerProgram); isFile(beside) {
			return []string{beside}
		}
	}
	if found, err := exec.LookPath(workerProgram); err == nil {
		return []string{found}
	}
	return []string{workerProgram} // the launch says that it is not there
}

// pythonOf is the configured interpreter, else the one beside the worker's program (both are in one environment), else python3.
func pythonOf(w config.Worker) string {
	if w.Python != "" {
		return w.Python
	}
	if program, err := filepath.EvalSymlinks(workerCommand(w)[0]); err == nil {
		// The link is not followed further: an environment's python is a link itself.
		if beside := filepath.Join(filepath.Dir(program), "python"); isFile(beside) {
			return beside
		}
	}
	return "python3"
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// childEnv is the environment of child processes: ours, without rolloutd's own settings.
func childEnv(environ []string) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(e string) bool { return strings.HasPrefix(e, "ROLLOUTD_") })
}

func variable(environ []string, name string) string {
	for _, e := range environ {
		if value, ok := strings.CutPrefix(e, name+"="); ok {
			return value
		}
	}
	return ""
}

// preferRemembered gives address with a free port in place of 0, the remembered one where nobody has it.
func preferRemembered(ctx context.Context, address string, remembered int) (string, error) {
	lis, err := listen(ctx, address, remembered, listenTCP)
	if err != nil {
		return "", err
	}
	defer lis.Close()
	return lis.Addr().(*net.TCPAddr).String(), nil
}

// workerAccess is what workers need to reach NATS as this process does.
func workerAccess(c config.NATS, o bus.Options) *runv1.NatsAccess {
	return &runv1.NatsAccess{
		User: o.User, Password: o.Password, NkeySeed: o.NKeySeed, CaFile: c.CAFile, CertFile: c.CertFile, KeyFile: c.KeyFile,
	}
}
