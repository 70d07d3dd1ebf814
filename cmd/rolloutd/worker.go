package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/rollout-rl/rollout/libs/cert"
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

// preferRemembered gives address with a free port in place of 0, the remembered one where nobody has it.
func preferRemembered(ctx context.Context, address string, remembered int) (string, error) {
	lis, err := listen(ctx, "gateway.listen", address, remembered, listenTCP)
	if err != nil {
		return "", err
	}
	defer lis.Close()
	return lis.Addr().(*net.TCPAddr).String(), nil
}

// workerAccess is what workers need to reach NATS as this process does. Secrets go by reference.
func workerAccess(cfg config.Config, e endpoints) *runv1.NatsAccess {
	c := cfg.NATS
	access := &runv1.NatsAccess{
		User: c.User, Password: c.Password.String(), NkeySeed: c.NKey.String(), CaFile: c.CAFile, CertFile: c.CertFile, KeyFile: c.KeyFile,
	}
	if t := workerTLS(cfg.TLS); t != nil && c.URL == "" && encrypted(e.nats) { // the mesh's own
		access.CaFile, access.CertFile, access.KeyFile = t.GetCaFile(), t.GetCertFile(), t.GetKeyFile()
	}
	return access
}

// agentFiles is what workers show to the Consul agent or to the registry, and whom they trust there.
func agentFiles(cfg config.Config, e endpoints) cert.Files {
	if t := workerTLS(cfg.TLS); t != nil && cfg.Consul.Address == "" && encrypted(e.consul) {
		return cert.Files{CA: t.GetCaFile(), Cert: t.GetCertFile(), Key: t.GetKeyFile()}
	}
	return cert.Files{CA: cfg.Consul.CAFile, Cert: cfg.Consul.CertFile, Key: cfg.Consul.KeyFile}
}
