package worker

import (
	"context"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/discovery"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Registry lists registered workers.
type Registry interface {
	// Watch sends the passing instances of a name immediately and at each change, until ctx ends.
	Watch(ctx context.Context, name string) <-chan []discovery.Instance
}

// Verifier is the scheduler, which knows the secrets of the processes that it launched.
type Verifier interface {
	VerifyWorkers(ctx context.Context, in *runv1.VerifyWorkersRequest, opts ...grpc.CallOption) (*runv1.VerifyWorkersResponse, error)
}

// Launched is a Registry of the worker processes that the scheduler launched. It omits all other
// registrations, including those that claim to be workers of a run.
type Launched struct {
	Registry  Registry
	Scheduler Verifier
	Retry     time.Duration // pause after a call that the scheduler did not answer
	// Run limits the list to the workers of one incarnation of a run; "": of all runs.
	Run         string
	Incarnation uint32
}

// claim is a registration with the launch that it claims to belong to.
type claim struct {
	run         string
	incarnation uint32
	Registration
}

// Watch sends the newest list. It skips a list that was not received before the next.
func (l Launched) Watch(ctx context.Context, name string) <-chan []discovery.Instance {
	out := make(chan []discovery.Instance)
	go func() {
		defer close(out)
		lists := l.Registry.Watch(ctx, name)
		verified := map[claim]bool{}
		var list, launched []discovery.Instance
		var send chan<- []discovery.Instance
		retry := time.NewTimer(0) // set after a failed attempt only
		retry.Stop()
		defer retry.Stop()
		for {
			select {
			case newest, open := <-lists:
				if !open {
					return
				}
				list = newest
			case <-retry.C:
			case send <- launched:
				send = nil
				continue
			case <-ctx.Done():
				return
			}
			var err error
			if verified, err = l.verify(ctx, list, verified); err != nil {
				retry.Reset(l.Retry)
			}
			launched = slices.DeleteFunc(slices.Clone(list), func(in discovery.Instance) bool {
				c, ok := l.claimOf(in)
				return !ok || !verified[c]
			})
			send = out
		}
	}()
	return out
}

// claimOf reads the claim of a registration; false if it cannot be valid, or belongs to another
// run.
func (l Launched) claimOf(in discovery.Instance) (claim, bool) {
	incarnation, err := strconv.ParseUint(in.Meta[MetaIncarnation], 10, 32)
	c := claim{run: in.Meta[MetaRun], incarnation: uint32(incarnation), Registration: RegistrationOf(in)}
	wanted := l.Run == "" || c.run == l.Run && c.incarnation == l.Incarnation
	return c, wanted && err == nil && c.run != "" && c.Rank >= 0
}

// verify returns the accepted claims of a list. It asks the scheduler about those that are not in
// verified, with one call per incarnation of a run.
func (l Launched) verify(ctx context.Context, list []discovery.Instance, verified map[claim]bool) (accepted map[claim]bool, err error) {
	type launch struct {
		run         string
		incarnation uint32
	}
	accepted = map[claim]bool{}
	unknown := map[launch][]claim{}
	for _, in := range list {
		switch c, ok := l.claimOf(in); {
		case !ok:
		case verified[c]:
			accepted[c] = true
		default:
			of := launch{c.run, c.incarnation}
			unknown[of] = append(unknown[of], c)
		}
	}
	for of, claims := range unknown {
		if failed := l.ask(ctx, of.run, of.incarnation, claims, accepted); failed != nil {
			err = failed
		}
	}
	return accepted, err
}

// ask adds the claims of one incarnation that the scheduler accepts.
func (l Launched) ask(ctx context.Context, run string, incarnation uint32, claims []claim, accepted map[claim]bool) error {
	req := &runv1.VerifyWorkersRequest{RunId: run, Incarnation: incarnation}
	for _, c := range claims {
		req.Workers = append(req.Workers, &runv1.WorkerRegistration{WorkerId: c.Worker, Rank: uint32(c.Rank), Address: c.Address, Proof: c.Proof})
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	resp, err := l.Scheduler.VerifyWorkers(ctx, req)
	for n, yes := range resp.GetAccepted() {
		if yes && n < len(claims) {
			accepted[claims[n]] = true
		}
	}
	return err
}
