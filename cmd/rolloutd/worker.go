package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/config"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

const workerProgram = "rollout-worker"

// workerCommand returns the configured command, else rollout-worker in the folder of this
// executable, else on PATH.
func workerCommand(w config.Worker) []string {
	if len(w.Command) > 0 {
		return w.Command
	}
	if self, err := os.Executable(); err == nil {
		if sibling := filepath.Join(filepath.Dir(self), workerProgram); isFile(sibling) {
			return []string{sibling}
		}
	}
	if found, err := exec.LookPath(workerProgram); err == nil {
		return []string{found}
	}
	return []string{workerProgram} // the launch reports that it does not exist
}

// pythonOf returns the configured interpreter, else that of the worker command or the one in the
// folder of its program (both are in one environment), else python3.
func pythonOf(w config.Worker) string {
	if w.Python != "" {
		return w.Python
	}
	command := workerCommand(w)[0]
	if strings.HasPrefix(filepath.Base(command), "python") { // python -m ...
		return command
	}
	if program, err := filepath.EvalSymlinks(command); err == nil {
		// The python of an environment is a symlink itself and must not be resolved.
		if sibling := filepath.Join(filepath.Dir(program), "python"); isFile(sibling) {
			return sibling
		}
	}
	return "python3"
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// freeAddress replaces port 0 in address by a free port: the last one if it is free.
func freeAddress(ctx context.Context, address string, last int) (string, error) {
	lis, err := listen(ctx, "gateway.listen", address, last, listenTCP)
	if err != nil {
		return "", err
	}
	defer lis.Close()
	return lis.Addr().(*net.TCPAddr).String(), nil
}

// workerAccess returns the NATS access of workers. Secrets are passed by reference.
func workerAccess(cfg config.Config, e endpoints) *runv1.NatsAccess {
	c := cfg.NATS
	access := &runv1.NatsAccess{
		User: c.User, Password: c.Password.String(), NkeySeed: c.NKey.String(), CaFile: c.CAFile, CertFile: c.CertFile, KeyFile: c.KeyFile,
	}
	if t := workerTLS(cfg.TLS); t != nil && c.URL == "" && encrypted(e.nats) { // the embedded server
		access.CaFile, access.CertFile, access.KeyFile = t.GetCaFile(), t.GetCertFile(), t.GetKeyFile()
	}
	return access
}

// agentFiles returns the certificates of workers for the Consul agent or the embedded registry.
func agentFiles(cfg config.Config, e endpoints) cert.Files {
	if t := workerTLS(cfg.TLS); t != nil && cfg.Consul.Address == "" && encrypted(e.consul) {
		return cert.Files{CA: t.GetCaFile(), Cert: t.GetCertFile(), Key: t.GetKeyFile()}
	}
	return cert.Files{CA: cfg.Consul.CAFile, Cert: cfg.Consul.CertFile, Key: cfg.Consul.KeyFile}
}
