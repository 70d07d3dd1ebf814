package worker_test

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/worker"
)

// Python computes the same proofs (python/tests/worker/test_registration.py).
func TestProofMatchesGoldenVectors(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../schemas/golden/worker_proof.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Cases []struct {
			Nonce, Worker string
			Rank          int
			Address       string
			Proof         string
		}
	}
	if err := json.Unmarshal(text, &golden); err != nil || len(golden.Cases) == 0 {
		t.Fatalf("%d cases, %v", len(golden.Cases), err)
	}
	for _, c := range golden.Cases {
		if got := worker.Proof(c.Nonce, c.Worker, c.Rank, c.Address); got != c.Proof {
			t.Errorf("proof of %s rank %d at %s is %s, want %s", c.Worker, c.Rank, c.Address, got, c.Proof)
		}
	}
}

func TestRegistrationIsValidForItsLaunchAlone(t *testing.T) {
	t.Parallel()
	nonce := worker.NewNonce()
	registered := func(change func(*discovery.Instance)) worker.Registration {
		in := discovery.Instance{Address: "host:1", Meta: map[string]string{
			worker.MetaWorker: "learner-0", worker.MetaRank: "0", worker.MetaProof: worker.Proof(nonce, "learner-0", 0, "host:1"),
		}}
		change(&in)
		return worker.RegistrationOf(in)
	}
	if !registered(func(*discovery.Instance) {}).Valid(nonce) {
		t.Error("the launched process was not accepted")
	}
	if registered(func(*discovery.Instance) {}).Valid(worker.NewNonce()) {
		t.Error("a process of another launch was accepted")
	}
	if registered(func(in *discovery.Instance) { in.Meta[worker.MetaProof] = worker.Proof("", "learner-0", 0, "host:1") }).Valid("") {
		t.Error("a process was accepted without a nonce")
	}
	for name, change := range map[string]func(*discovery.Instance){
		"worker":  func(in *discovery.Instance) { in.Meta[worker.MetaWorker] = "learner-1" },
		"rank":    func(in *discovery.Instance) { in.Meta[worker.MetaRank] = "1" },
		"no rank": func(in *discovery.Instance) { delete(in.Meta, worker.MetaRank) },
		"address": func(in *discovery.Instance) { in.Address = "host:2" },
		"proof":   func(in *discovery.Instance) { in.Meta[worker.MetaProof] = "" },
	} {
		if registered(change).Valid(nonce) {
			t.Errorf("a registration with another %s was accepted", name)
		}
	}
}
