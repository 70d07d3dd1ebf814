package scheduler

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/scheduler/dataset"
)

var errMoved = rpcerr.New(codes.Unavailable, "LEDGER_MOVED", "the ledger has gone on")

// chunk is how many groups are published at a time.
const chunk = 512

// page is how many groups are asked of the ledger at a time.
const page = 10_000

// issuer publishes a run's prompt groups. It acts on each state that the ledger sends and never polls.
//
//	reconcile once: issued by the cursor, not complete in the ledger -> published again with the same attempt
//	then, per ledger state: dissolved groups -> next attempt, or excluded; room in the window -> cursor forward, then publish
type issuer struct {
	c        *conductor
	record   *Run
	data     input
	file     *dataset.File
	order    dataset.Order
	position uint64
	settled  map[uint64]uint32 // by position: attempts that were acted on, of those that the ledger tells as dissolved
	// By position: dissolved attempts whose next one may be open already while its work is not on the stream. Once the ledger has
	// opened it, no state tells of it again.
	owed map[uint64]*bufferv1.GroupRecord
}

// item is a group to publish.
type item struct {
	position uint64
	attempt  uint32
}

type input struct {
	path   string
	digest string
	rows   uint64
}

// trainData finds the training rows among a plan's inputs.
func trainData(run *Run) (input, error) {
	for _, in := range run.GetPlan().GetInputs() {
		if in.GetRole() != planv1.InputRole_INPUT_ROLE_TRAIN_DATA || in.GetRows() == 0 {
			continue
		}
		path := filepath.FromSlash(in.GetPath())
		if !filepath.IsAbs(path) {
			path = filepath.Join(run.GetBaseDir(), path)
		}
		return input{path, in.GetDigest(), in.GetRows()}, nil
	}
	return input{}, ErrPlanUnreadable.Wrap(errors.New("the plan names no training rows"))
}

func newIssuer(c *conductor, run *Run, data input, position uint64) *issuer {
	config := run.GetPlan().GetConfig()
	c.seePosition(position)
	return &issuer{
		c: c, record: run, data: data, position: position, settled: map[uint64]uint32{}, owed: map[uint64]*bufferv1.GroupRecord{},
		order: dataset.Order{Seed: config.GetSeed(), Rows: data.rows, Shuffle: config.GetData().GetShuffle()},
	}
}

func (i *issuer) issue(ctx context.Context) error {
	if err := i.c.insist(ctx, "the ledger's groups (buffer)", i.reconcile); err != nil {
		return err
	}
	for {
		woken := i.c.changes()
		if err := i.c.insist(ctx, "publishing prompt groups (NATS, buffer)", i.act); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-woken:
		}
	}
}

// run opens the dataset, follows the ledger and issues until ctx ends.
func (i *issuer) run(ctx context.Context) (err error) {
	if i.file, err = dataset.Open(i.data.path, i.data.digest, i.data.rows); err != nil {
		return err
	}
	defer i.file.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	watched := make(chan error, 1)
	go func() {
		defer cancel()
		watched <- i.watch(ctx)
	}()
	err = i.issue(ctx)
	cancel()
	return errors.Join(err, <-watched)
}

// watch takes the ledger's states into the view, where act finds them. A broken stream is opened again.
func (i *issuer) watch(ctx context.Context) error {
	const what = "the ledger's changes (buffer)"
	return i.c.follow(ctx, what, func(ctx context.Context) error {
		stream, err := i.c.svc.Buffer.WatchLedger(ctx, &bufferv1.WatchLedgerRequest{RunId: i.c.id})
		if err != nil {
			return err
		}
		for {
			resp, err := stream.Recv()
			if err != nil {
				return err
			}
			i.c.waitFor(what, "")
			i.c.seeLedger(resp.GetState())
		}
	})
}

// reconcile publishes again what an earlier incarnation had issued and the ledger does not have whole. The cursor never lies
// behind the ledger: it is durable before the publish; if a disk lost it, the ledger's last position moves it.
func (i *issuer) reconcile(ctx context.Context) error {
	from := i.c.window.First
	switch {
	case i.c.window.Completion:
	case i.c.window.Draw > 0:
		from = i.c.window.begin(i.c.ledger())
	default:
		from = i.c.window.start(i.c.ledger().GetStep()) // the windows of committed steps are whole
	}
	known := map[uint64]*bufferv1.GroupRecord{}
	last := i.position
	for next := from; ; {
		resp, err := i.c.svc.Buffer.ListGroups(ctx, &bufferv1.ListGroupsRequest{RunId: i.c.id, FromPosition: next, Limit: page})
		if err != nil {
			return err
		}
		for _, g := range resp.GetGroups() {
			known[g.GetPosition()] = g
			last = max(last, g.GetPosition()+1)
			next = g.GetPosition() + 1
		}
		if len(resp.GetGroups()) < page {
			break
		}
	}
	if last > i.position {
		if err := i.advance(ctx, last); err != nil {
			return err
		}
	}
	var lost []item
	for p := from; p < i.position; p++ {
		g, there := known[p]
		if !there {
			lost = append(lost, item{position: p})
		} else if g.GetState() == bufferv1.GroupState_GROUP_STATE_OPEN {
			lost = append(lost, item{position: p, attempt: g.GetKey().GetAttempt()})
		}
	}
	if len(lost) > 0 {
		i.c.svc.Log.InfoContext(ctx, "groups of an earlier incarnation are issued again", "run", i.c.id, "groups", len(lost))
	}
	return i.publish(ctx, lost)
}

// act does what the newest ledger state asks for. It may be repeated after an error at any point.
func (i *issuer) act(ctx context.Context) error {
	ledger, state := i.c.ledger(), i.c.state()
	if ledger == nil || (state != Starting && state != Running) {
		return nil
	}
	if err := i.settle(ctx, ledger.GetDissolved()); err != nil {
		return err
	}
	upto := i.admit(ledger, i.upto(ledger))
	for i.position < upto {
		to := min(upto, i.position+chunk)
		var items []item
		for p := i.position; p < to; p++ {
			items = append(items, item{position: p})
		}
		if err := i.advance(ctx, to); err != nil {
			return err
		}
		if err := i.c.insist(ctx, "publishing prompt groups (NATS)", func(ctx context.Context) error { return i.publish(ctx, items) }); err != nil {
			return err
		}
	}
	return nil
}

func (i *issuer) upto(ledger *bufferv1.LedgerState) uint64 {
	if i.c.window.Draw > 0 {
		return i.c.window.Refill(i.position, ledger)
	}
	return i.c.window.Upto(i.position, ledger.GetStep(), ledger.GetLeased() > 0)
}

// admit bounds what the window allows by the bytes of the samples that are on their way or wait for the learner.
func (i *issuer) admit(ledger *bufferv1.LedgerState, upto uint64) uint64 {
	config := i.record.GetPlan().GetConfig()
	bytes := ledger.GetSampleBytes() * uint64(algorithm.GroupSize(config)) // of a group
	most := config.GetLimits().GetQueueBytes()
	if bytes == 0 || most == 0 { // nothing came yet; a plan of before this limit
		return upto
	}
	within := i.c.window.Within(upto, i.position, ledger.GetConsumed()+ledger.GetExcluded(), most/bytes)
	why := ""
	if within < upto {
		why = fmt.Sprintf("groups of %d KiB are held back above %d MiB (limits.queue_bytes)", bytes>>10, most>>20)
	}
	i.c.waitFor("the learner to take samples (learner)", why)
	return within
}

// moved makes a refusal of the ledger transient: a group went on since the state that was acted on, and the next try reads a newer
// one. Refusals for other reasons stay.
func moved(err error) error {
	if code := rpcerr.Code(err); code == codes.FailedPrecondition || code == codes.Aborted {
		return errMoved.Wrap(err)
	}
	return err
}

// advance makes the cursor durable at a position.
func (i *issuer) advance(ctx context.Context, to uint64) error {
	if err := i.c.svc.Store.Advance(ctx, i.c.id, i.position, to); err != nil {
		return err
	}
	i.position = to
	i.c.seePosition(to)
	crashpoint.Here("scheduler/advanced") // the cursor is durable, nothing is published
	return nil
}

// publish puts groups on the work stream and returns when it has stored them. Repeating it is harmless.
func (i *issuer) publish(ctx context.Context, items []item) error {
	for len(items) > 0 {
		n := min(len(items), chunk)
		messages := make([]bus.Message, 0, n)
		for _, it := range items[:n] {
			m, err := i.message(it)
			if err != nil {
				return err
			}
			messages = append(messages, m)
		}
		bounded, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := i.c.svc.Bus.Publish(bounded, messages...)
		cancel()
		if err != nil {
			return err
		}
		crashpoint.Here("scheduler/published") // work is on the stream, nobody remembers that
		items = items[n:]
	}
	return nil
}

// endOfStream is nil where a stream ended in good order.
func endOfStream(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
