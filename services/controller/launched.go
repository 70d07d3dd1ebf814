package controller

import (
	"context"
	"slices"
	"time"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/worker"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// launchedRegistry is a Registry of the worker processes that the scheduler launched for one
// incarnation of a run. It omits other registrations, including those that claim to be workers of
// the run.
type launchedRegistry struct {
	Registry
	settings
	scheduler Scheduler
	retry     time.Duration // pause after a call that the scheduler did not answer
}

// Watch sends the newest list. It skips a list that was not received before the next.
func (r launchedRegistry) Watch(ctx context.Context, name string) <-chan []discovery.Instance {
	out := make(chan []discovery.Instance)
	go func() {
		defer close(out)
		lists := r.Registry.Watch(ctx, name)
		verified := map[worker.Registration]bool{}
		var claimed, launched []discovery.Instance
		var send chan<- []discovery.Instance
		retry := time.NewTimer(0) // set after a failed attempt only
		retry.Stop()
		defer retry.Stop()
		for {
			select {
			case list, open := <-lists:
				if !open {
					return
				}
				claimed = slices.DeleteFunc(slices.Clone(list), func(in discovery.Instance) bool { return !r.registers(in) })
			case <-retry.C:
			case send <- launched:
				send = nil
				continue
			case <-ctx.Done():
				return
			}
			if err := r.verify(ctx, claimed, verified); err != nil {
				retry.Reset(r.retry)
			}
			launched = slices.DeleteFunc(slices.Clone(claimed), func(in discovery.Instance) bool { return !verified[worker.RegistrationOf(in)] })
			send = out
		}
	}()
	return out
}

// verify asks the scheduler about the registrations that it has not accepted yet.
func (r launchedRegistry) verify(ctx context.Context, claimed []discovery.Instance, verified map[worker.Registration]bool) error {
	var unknown []worker.Registration
	req := &runv1.VerifyWorkersRequest{RunId: r.runID, Incarnation: r.incarnation}
	for _, in := range claimed {
		if claim := worker.RegistrationOf(in); !verified[claim] && claim.Rank >= 0 {
			unknown = append(unknown, claim)
			req.Workers = append(req.Workers, &runv1.WorkerRegistration{
				WorkerId: claim.Worker, Rank: uint32(claim.Rank), Address: claim.Address, Proof: claim.Proof,
			})
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	resp, err := r.scheduler.VerifyWorkers(ctx, req)
	for n, accepted := range resp.GetAccepted() {
		if accepted && n < len(unknown) {
			verified[unknown[n]] = true
		}
	}
	return err
}
