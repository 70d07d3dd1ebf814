package worker_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/worker"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// verifier accepts registrations with a valid proof for its nonce. Its first calls fail, as many as
// away.
type verifier struct {
	away, calls int
}

const testNonce = "nonce"

func (v *verifier) VerifyWorkers(_ context.Context, in *runv1.VerifyWorkersRequest, _ ...grpc.CallOption) (*runv1.VerifyWorkersResponse, error) {
	if v.calls++; v.calls <= v.away {
		return nil, errors.New("away")
	}
	resp := &runv1.VerifyWorkersResponse{}
	for _, w := range in.GetWorkers() {
		resp.Accepted = append(resp.Accepted, w.GetProof() == worker.Proof(testNonce, w.GetWorkerId(), int(w.GetRank()), w.GetAddress()))
	}
	return resp, nil
}

type lists chan []discovery.Instance

func (l lists) Watch(context.Context, string) <-chan []discovery.Instance { return l }

func claim(id, incarnation, nonce string) discovery.Instance {
	address := id + ":1"
	return discovery.Instance{ID: id, Address: address, Meta: map[string]string{
		worker.MetaRun: "run-1", worker.MetaIncarnation: incarnation, worker.MetaWorker: id, worker.MetaRank: "0",
		worker.MetaProof: worker.Proof(nonce, id, 0, address),
	}}
}

func TestLaunchedOmitsOtherRegistrations(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		v, l := &verifier{away: 2}, make(lists)
		out := worker.Launched{Registry: l, Scheduler: v, Run: "run-1", Incarnation: 2, Retry: time.Second}.Watch(ctx, "inference-worker")
		next := func() (ids []string) {
			for _, in := range <-out {
				ids = append(ids, in.ID)
			}
			return ids
		}
		unreadable := claim("e", "2", testNonce)
		unreadable.Meta[worker.MetaRank] = "first"
		l <- []discovery.Instance{claim("a", "2", testNonce), claim("b", "1", testNonce), claim("c", "2", "another"), unreadable}
		if got := next(); got != nil {
			t.Errorf("%q without an answer of the scheduler", got)
		}
		if got := next(); got != nil {
			t.Errorf("%q without an answer of the scheduler", got)
		}
		if got := next(); !slices.Equal(got, []string{"a"}) {
			t.Errorf("%q", got)
		}
		calls := v.calls
		l <- []discovery.Instance{claim("a", "2", testNonce)}
		if got := next(); !slices.Equal(got, []string{"a"}) || v.calls != calls {
			t.Errorf("%q after %d more calls: an accepted registration is not verified twice", got, v.calls-calls)
		}
		l <- []discovery.Instance{claim("a", "2", testNonce), claim("d", "2", testNonce)}
		l <- []discovery.Instance{claim("d", "2", testNonce)} // replaces the list that no one received
		if got := strings.Join(next(), " "); got != "d" {
			t.Errorf("%q", got)
		}
	})
}

// Without a run the workers of every run are listed, each verified against its own launch.
func TestLaunchedListsTheWorkersOfAllRuns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		v, l := &verifier{}, make(lists)
		out := worker.Launched{Registry: l, Scheduler: v, Retry: time.Second}.Watch(ctx, "inference-worker")
		other, bare := claim("b", "7", testNonce), claim("d", "1", testNonce)
		other.Meta[worker.MetaRun] = "run-2"
		delete(bare.Meta, worker.MetaProof)
		l <- []discovery.Instance{claim("a", "2", testNonce), other, claim("c", "2", "another"), bare, {ID: "e", Address: "e:1"}}
		var ids []string
		for _, in := range <-out {
			ids = append(ids, in.ID)
		}
		if !slices.Equal(ids, []string{"a", "b"}) || v.calls != 3 {
			t.Errorf("%q after %d calls", ids, v.calls)
		}
	})
}
