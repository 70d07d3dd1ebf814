package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// replicas is two processes that host the same services on one PostgreSQL, and one process with
// NATS and the registry.
type replicas struct {
	*testing.T
	root   string
	args   []string
	member map[string]*daemon // by its gRPC address
	dialer *rpc.Dialer
	lookup *discovery.Client
}

func newReplicas(t *testing.T) *replicas {
	t.Helper()
	place := sqldbtest.Place(t)
	r := &replicas{T: t, root: t.TempDir(), member: map[string]*daemon{}}
	servers := start(t, r.root, "--target", natsTarget+","+registryTarget).runtime()
	r.args = []string{"--target", "planner,storage,buffer,snapshot,learner-controller,scheduler", "--join", r.root,
		"--shared-dir", filepath.Join(r.root, "shared"), "--database-url", place.URL, "--database-schema-prefix", place.Prefix}
	r.add("one")
	r.add("two")
	token, err := rpc.ReadToken(servers.TokenFile)
	if err != nil {
		t.Fatal(err)
	}
	if r.lookup, err = discovery.NewClient(discovery.Options{Address: servers.Consul, Token: token}); err != nil {
		t.Fatal(err)
	}
	r.dialer = rpc.NewDialer(rpc.DialerOptions{Lookup: r.lookup.Resolver(), Token: token})
	t.Cleanup(func() { r.dialer.Close() })
	return r
}

func (r *replicas) add(name string) {
	r.Helper()
	d := start(r.T, filepath.Join(r.root, name), r.args...)
	r.member[d.runtime().GRPC] = d
}

// call makes one call of each elected service, through discovery.
func (r *replicas) call(ctx context.Context) error {
	ledger, err := r.dialer.Conn("buffer")
	if err != nil {
		return err
	}
	if _, err := bufferv1.NewBufferServiceClient(ledger).OpenLedger(ctx, &bufferv1.OpenLedgerRequest{
		RunId: "run-01jz0000000000000000000000", Config: &bufferv1.LedgerConfig{GroupsPerStep: 1, GroupSize: 1, Rows: 1, Order: bufferv1.LeaseOrder_LEASE_ORDER_POSITION},
	}); err != nil {
		return err
	}
	runs, err := r.dialer.Conn("scheduler")
	if err != nil {
		return err
	}
	if _, err := runv1.NewSchedulerServiceClient(runs).ListRuns(ctx, &runv1.ListRunsRequest{}); err != nil {
		return err
	}
	learner, err := r.dialer.Conn("learner-controller")
	if err != nil {
		return err
	}
	_, err = learnerv1.NewLearnerControllerServiceClient(learner).GetProgress(ctx, &learnerv1.GetProgressRequest{RunId: "run-01jz0000000000000000000000"})
	if rpcerr.Reason(err) == "RUN_NOT_DRIVEN" || rpcerr.Code(err).String() == "NotFound" { // answered by the leader
		return nil
	}
	return err
}

// served waits until all three answer, and logs how long that took.
func (r *replicas) served() time.Duration {
	r.Helper()
	began := time.Now()
	for {
		ctx, cancel := context.WithTimeout(r.Context(), time.Second)
		err := r.call(ctx)
		cancel()
		if err == nil {
			return time.Since(began)
		}
		if time.Since(began) > 2*time.Minute {
			r.Fatalf("no leader after %v: %v\n%s", time.Since(began), err, r.logs())
		}
	}
}

func (r *replicas) logs() string {
	var b strings.Builder
	for _, d := range r.member {
		b.WriteString(d.log.String() + "\n---\n")
	}
	return b.String()
}

// leader is the process that leads the buffer: the registered one with the highest epoch, because
// the registration of a dead process stays for a while.
func (r *replicas) leader() (found *daemon) {
	r.Helper()
	list, err := r.lookup.Lookup(r.Context(), "buffer")
	if err != nil {
		r.Fatal(err)
	}
	newest := uint64(0)
	for _, i := range list {
		if epoch, err := strconv.ParseUint(i.Meta[discovery.MetaEpoch], 10, 64); err == nil && epoch > newest {
			newest, found = epoch, r.member[i.Address]
		}
	}
	if found == nil {
		r.Fatalf("the buffer has no leader: %v\n%s", list, r.logs())
	}
	return found
}

func (r *replicas) forget(d *daemon) {
	for address, other := range r.member {
		if d == other {
			delete(r.member, address)
		}
	}
}

// Only one of two replicas is active. If it is killed or stopped, the other takes over. A stopped
// one that continues stops leading and forwards calls.
func TestReplicas(t *testing.T) {
	t.Parallel()
	r := newReplicas(t)
	rounds := 1
	if os.Getenv("ROLLOUT_TEST_TAKEOVERS") != "" { // to measure
		rounds = 5
	}
	t.Logf("first leaders after %v", r.served())
	var killed, stopped []time.Duration
	for range rounds {
		old := r.leader()
		old.kill()
		r.forget(old)
		killed = append(killed, r.served())
		r.add(filepath.Base(old.state))

		old = r.leader()
		old.signal(syscall.SIGSTOP)
		stopped = append(stopped, r.served())
		old.signal(syscall.SIGCONT)
		old.until("step down", func() bool { return strings.Contains(old.log.String(), "stepping down") })
		conn := dial(t, old.runtime())
		resp, err := runv1.NewSchedulerServiceClient(conn).ListRuns(deadline(t), &runv1.ListRunsRequest{})
		if err != nil {
			t.Errorf("a call to the replica that woke up: %v %v", resp, err)
		}
		r.served()
	}
	slices.Sort(killed)
	slices.Sort(stopped)
	t.Logf("takeover after kill -9: median %v of %v; after SIGSTOP: median %v of %v", killed[len(killed)/2], killed, stopped[len(stopped)/2], stopped)
}
