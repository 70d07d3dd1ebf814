//go:build servers

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/discovery"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// A Python worker reaches the NATS cluster with its NKEY over mutual TLS, and registers in Consul
// with the token, from the spec that the scheduler writes.
func TestPythonReachesTheSameServers(t *testing.T) {
	t.Parallel()
	p := startProduction(t)
	cfg, err := config.Load([]string{"--config", p.file, "--state-dir", p.root}, []string{"HOME=" + p.root}, &bytes.Buffer{})
	if err == nil {
		_, err = os.Stat("../../.venv/bin/python")
	}
	if err != nil {
		t.Fatal(err)
	}
	spec, err := protojson.Marshal(&runv1.WorkerSpec{
		WorkerId: "inference-0", Kind: "inference", RunId: "run-01jz0000000000000000000000", NatsUrl: cfg.NATS.URL, NatsToken: cfg.NATS.Token.String(),
		Nats: workerAccess(cfg, endpoints{nats: cfg.NATS.URL}), ConsulAddress: p.consul.Address, ConsulToken: cfg.Consul.Token.String(), ConsulCaFile: cfg.Consul.CAFile,
	})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(p.root, "spec.json")
	if err := os.WriteFile(file, spec, 0o600); err != nil {
		t.Fatal(err)
	}
	python := exec.CommandContext(deadline(t), "../../.venv/bin/python", "testdata/reach.py")
	python.Env = []string{"PYTHONPATH=../../python", "ROLLOUT_WORKER_SPEC=" + file, "PATH=" + os.Getenv("PATH")}
	var log bytes.Buffer
	python.Stderr = &log
	in, err := python.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := python.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := python.Start(); err != nil {
		t.Fatal(err)
	}
	said := make([]byte, len("reached"))
	if _, err := out.Read(said); err != nil || string(said) != "reached" {
		_ = python.Process.Kill()
		_ = python.Wait()
		t.Fatalf("%q %v\n%s", said, err, log.String())
	}
	client, err := discovery.NewClient(discovery.Options{Address: p.consul.Address, Token: consulToken})
	if err != nil {
		t.Fatal(err)
	}
	seen := false
	for list := range client.Watch(deadline(t), "inference-worker") {
		if seen = len(list) == 1 && list[0].Address == "127.0.0.1:4711"; seen {
			break
		}
	}
	if !seen {
		t.Errorf("the worker is not in Consul\n%s", log.String())
	}
	_ = in.Close()
	if err := python.Wait(); err != nil {
		t.Errorf("%v\n%s", err, log.String())
	}
	if list, err := client.Lookup(deadline(t), "inference-worker"); err != nil || len(list) != 0 {
		t.Errorf("after it exited: %+v %v", list, err)
	}
}
