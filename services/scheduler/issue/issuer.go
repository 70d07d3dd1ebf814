package issue

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/telemetry"
	"github.com/rollout-rl/rollout/libs/wait"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler/dataset"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// AttemptsExhausted is the reason of groups that failed in all of their attempts.
const AttemptsExhausted = "ATTEMPTS_EXHAUSTED"

const (
	chunk = 512    // groups published at a time
	page  = 10_000 // incomplete groups listed from the ledger at a time

	// sweepEvery is the interval of sweeps. A group is lost if two of them in a row miss it.
	sweepEvery = 2 * time.Second
	// settleEvery is the interval of the first sweeps of an issuer that continues the work of another
	// one, until each group was found.
	settleEvery = 100 * time.Millisecond
)

var errMoved = rpcerr.New(codes.Unavailable, "LEDGER_MOVED", "the ledger has changed since it was read")

// Buffer is the part of the ledger that the issuer uses.
type Buffer interface {
	WatchLedger(ctx context.Context, in *bufferv1.WatchLedgerRequest, opts ...grpc.CallOption) (grpc.ServerStreamingClient[bufferv1.WatchLedgerResponse], error)
	ListIncompleteGroups(ctx context.Context, in *bufferv1.ListIncompleteGroupsRequest, opts ...grpc.CallOption) (*bufferv1.ListIncompleteGroupsResponse, error)
	ExcludeGroups(ctx context.Context, in *bufferv1.ExcludeGroupsRequest, opts ...grpc.CallOption) (*bufferv1.ExcludeGroupsResponse, error)
	ReissueGroups(ctx context.Context, in *bufferv1.ReissueGroupsRequest, opts ...grpc.CallOption) (*bufferv1.ReissueGroupsResponse, error)
}

// Stream is the work stream, and what the servers have of a run.
type Stream interface {
	// EnsureRun creates what is missing of the run's streams and consumers.
	EnsureRun(ctx context.Context, run string) error
	InspectRun(ctx context.Context, run string) (*bus.RunState, error)
	Publish(ctx context.Context, messages ...bus.Message) error
}

// Cursor makes the position of a run durable.
type Cursor interface {
	Advance(ctx context.Context, run string, from, to uint64) error
}

// Board is what the parts of a run know about it now.
type Board interface {
	State() runv1.RunState
	Ledger() *bufferv1.LedgerState
	SetLedger(l *bufferv1.LedgerState)
	SetPosition(position, first, rows uint64)
	WaitFor(what retry.Awaited, why string)
	// Changes is closed at the next change.
	Changes() <-chan struct{}
}

// Deps are the surroundings of an issuer.
type Deps struct {
	Buffer Buffer
	Stream Stream
	Cursor Cursor
	Board  Board
	Retry  retry.Retrier
	Emit   func(e *eventv1.Event)
	Fence  *fencev1.Fence // what the calls to the buffer carry
	Log    *slog.Logger
	// Continues: the work that an earlier issuer has published is still on the stream or with a
	// worker.
	Continues bool
}

// Data is the training data of a plan.
type Data struct {
	Path   string
	Digest string
	Rows   uint64
}

// Issuer publishes the prompt groups of a run. Its methods are called from one goroutine.
//
//	at the start: issued by the cursor, not complete in the ledger -> published again with the same attempt;
//	if it continues the work of another one, only what was lost (see sweep)
//	per ledger state: dissolved groups -> next attempt, or excluded; room in the window -> advance the cursor, then publish
//	every few seconds: missing streams -> created again; groups that were lost -> published again (see sweep)
type Issuer struct {
	Deps
	run      *runv1.Run
	window   Window
	data     Data
	file     *dataset.File
	order    dataset.Order
	position uint64
	settled  map[uint64]uint32 // by position: the attempts that were handled, of those that the ledger still reports as dissolved
	// By position: dissolved attempts whose next attempt may be open although its work is not on the
	// stream. Once the ledger has opened the next attempt, its states do not contain the group any
	// more.
	unpublished map[uint64]*bufferv1.GroupRecord
	unseen      map[bus.WorkItem]uint64 // items that the last sweep found nowhere -> the newest trajectories at that time
	rounds      uint64                  // how often lost groups were published again
	nonce       string                  // tells the ids of this issuer's messages from those of others
}

// Open verifies and indexes the dataset and makes the issuer of a run at a position. The caller
// closes it.
func Open(deps Deps, run *runv1.Run, window Window, data Data, position uint64) (*Issuer, error) {
	file, err := dataset.Open(data.Path, data.Digest, data.Rows)
	if err != nil {
		return nil, err
	}
	config := run.GetPlan().GetConfig()
	deps.Board.SetPosition(position, window.First, data.Rows)
	return &Issuer{
		Deps: deps, run: run, window: window, data: data, file: file, position: position,
		order:   dataset.Order{Seed: config.GetSeed(), Rows: data.Rows, Shuffle: config.GetData().GetShuffle()},
		settled: map[uint64]uint32{}, unpublished: map[uint64]*bufferv1.GroupRecord{}, unseen: map[bus.WorkItem]uint64{}, nonce: rand.Text(),
	}, nil
}

// Close closes the dataset.
func (i *Issuer) Close() error { return i.file.Close() }

// Run follows the ledger and issues until ctx ends.
func (i *Issuer) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	watched := make(chan error, 1)
	go func() {
		defer cancel()
		watched <- i.watch(ctx)
	}()
	err := i.issue(ctx)
	cancel()
	return errors.Join(err, <-watched)
}

func (i *Issuer) issue(ctx context.Context) error {
	first, every := i.reconcile, sweepEvery
	if i.Continues {
		first, every = i.sweep, settleEvery
	}
	if err := i.Retry.Until(ctx, retry.Awaited{Owner: names.BufferService, What: "the ledger's groups (buffer)"}, first); err != nil {
		return err
	}
	sweeps := time.NewTicker(every)
	defer sweeps.Stop()
	for {
		changed := i.Board.Changes()
		if err := i.Retry.Until(ctx, retry.Awaited{Owner: wait.NATS, Also: names.BufferService, What: "publishing prompt groups (NATS, buffer)"}, i.act); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-sweeps.C:
			if err := i.Retry.Until(ctx, retry.Awaited{Owner: wait.NATS, Also: names.BufferService, What: "the streams of the run (NATS, buffer)"}, i.sweep); err != nil {
				return err
			}
			if len(i.unseen) == 0 && every != sweepEvery {
				every = sweepEvery
				sweeps.Reset(every)
			}
		}
	}
}

// watch puts the states of the ledger on the board, where act finds them. It reopens a broken
// stream.
func (i *Issuer) watch(ctx context.Context) error {
	what := retry.Awaited{Owner: names.BufferService, What: "the ledger's changes (buffer)"}
	return i.Retry.Follow(ctx, what, func(ctx context.Context) error {
		stream, err := i.Buffer.WatchLedger(ctx, &bufferv1.WatchLedgerRequest{RunId: i.run.GetRunId()})
		if err != nil {
			return err
		}
		for {
			resp, err := stream.Recv()
			if err != nil {
				return err
			}
			i.Board.WaitFor(what, "")
			i.Board.SetLedger(resp.GetState())
		}
	})
}

// reconcile publishes again what an earlier incarnation had issued and the ledger does not have
// completely. The cursor is never behind the ledger: it is durable before the publish, and if a
// disk lost it, the last position of the ledger moves it.
func (i *Issuer) reconcile(ctx context.Context) error {
	lost, err := i.lacking(ctx)
	if err != nil {
		return err
	}
	if len(lost) > 0 {
		i.Log.InfoContext(ctx, "groups of an earlier incarnation are issued again", telemetry.AttrRun, i.run.GetRunId(), "groups", len(lost))
	}
	return i.publish(ctx, lost)
}

// lacking returns the items that were issued and that the ledger does not have completely. Neither
// their number nor what it costs to find them grows with the run.
func (i *Issuer) lacking(ctx context.Context) (items []bus.WorkItem, err error) {
	from := i.window.First
	switch {
	case i.window.Completion:
	case i.window.Draw > 0:
		from = i.window.begin(i.Board.Ledger())
	default:
		from = i.window.start(i.Board.Ledger().GetStep()) // the windows of committed steps are complete
	}
	size := max(1, algorithm.GroupSize(i.run.GetPlan().GetConfig()))
	return items, paging.All(func(token string) (string, error) {
		listed, err := i.Buffer.ListIncompleteGroups(ctx, &bufferv1.ListIncompleteGroupsRequest{
			RunId: i.run.GetRunId(), FromPosition: from, EndPosition: i.position, PageSize: page, PageToken: token,
		})
		if err != nil {
			return "", err
		}
		if end := listed.GetEndPosition(); end > i.position {
			if err := i.advance(ctx, end); err != nil {
				return "", err
			}
		}
		for _, g := range listed.GetGroups() {
			if g.GetSamples() < size { // otherwise it waits for the digest of its weights
				items = append(items, bus.WorkItem{Position: g.GetPosition(), Attempt: g.GetKey().GetAttempt()})
			}
		}
		return listed.GetNextPageToken(), nil
	})
}

// act does what the newest ledger state requires. It may be repeated after an error at any point.
func (i *Issuer) act(ctx context.Context) error {
	ledger := i.Board.Ledger()
	if !i.issues() {
		return nil
	}
	if err := i.settle(ctx, ledger.GetDissolved()); err != nil {
		return err
	}
	upto := i.limit(ledger, i.upto(ledger))
	for i.position < upto {
		to := min(upto, i.position+chunk)
		var items []bus.WorkItem
		for p := i.position; p < to; p++ {
			items = append(items, bus.WorkItem{Position: p})
		}
		if err := i.advance(ctx, to); err != nil {
			return err
		}
		if err := i.Retry.Until(ctx, retry.Awaited{Owner: wait.NATS, What: "publishing prompt groups (NATS)"}, func(ctx context.Context) error { return i.publish(ctx, items) }); err != nil {
			return err
		}
	}
	return nil
}

func (i *Issuer) upto(ledger *bufferv1.LedgerState) uint64 {
	if i.window.Draw > 0 {
		return i.window.Refill(i.position, ledger)
	}
	return i.window.Upto(i.position, ledger.GetStep(), ledger.GetLeased() > 0)
}

// limit applies limits.queue_bytes, the bytes of samples that are in flight or wait for the
// learner, to what the window allows.
func (i *Issuer) limit(ledger *bufferv1.LedgerState, upto uint64) uint64 {
	config := i.run.GetPlan().GetConfig()
	bytes := ledger.GetSampleBytes() * uint64(algorithm.GroupSize(config)) // of a group
	most := config.GetLimits().GetQueueBytes()
	if bytes == 0 || most == 0 { // no sample yet, or a plan without the limit
		return upto
	}
	within := i.window.Within(upto, i.position, ledger.GetConsumed()+ledger.GetExcluded(), most/bytes)
	why := ""
	if within < upto {
		why = fmt.Sprintf("no more groups of %d KiB are issued above %d MiB (limits.queue_bytes)", bytes>>10, most>>20)
	}
	i.Board.WaitFor(retry.Awaited{Owner: wait.Learner, What: "the learner to take samples (learner)"}, why)
	return within
}

// settle gives dissolved groups their next attempt, or excludes them after the last one.
func (i *Issuer) settle(ctx context.Context, dissolved []*bufferv1.GroupRecord) error {
	attempts := max(1, i.run.GetPlan().GetConfig().GetLimits().GetGroupAttempts())
	var again, out []*bufferv1.GroupRecord
	settled := map[uint64]uint32{} // groups that the ledger no longer reports are dropped
	for _, g := range dissolved {
		delete(i.unpublished, g.GetPosition()) // its next attempt is not open yet, or was published and failed
		switch attempt, handled := i.settled[g.GetPosition()]; {
		case handled && attempt == g.GetKey().GetAttempt():
			settled[g.GetPosition()] = attempt
		case g.GetFailures() < attempts: // a stale group is not a failure
			again = append(again, g)
		default:
			out = append(out, g)
		}
	}
	i.settled = settled
	for _, p := range slices.Sorted(maps.Keys(i.unpublished)) {
		again = append(again, i.unpublished[p])
	}
	if err := i.reissue(ctx, again); err != nil {
		return err
	}
	return i.exclude(ctx, out)
}

func (i *Issuer) reissue(ctx context.Context, groups []*bufferv1.GroupRecord) error {
	if len(groups) == 0 {
		return nil
	}
	req := &bufferv1.ReissueGroupsRequest{RunId: i.run.GetRunId(), Fence: i.Fence}
	var items []bus.WorkItem
	for _, g := range groups {
		k := g.GetKey()
		req.Groups = append(req.Groups, &bufferv1.GroupKey{Epoch: k.GetEpoch(), Index: k.GetIndex(), Attempt: k.GetAttempt() + 1})
		items = append(items, bus.WorkItem{Position: g.GetPosition(), Attempt: k.GetAttempt() + 1})
		i.unpublished[g.GetPosition()] = g
	}
	if _, err := i.Buffer.ReissueGroups(ctx, req); err != nil {
		return fmt.Errorf("open the next attempt of %d groups: %w", len(groups), moved(err))
	}
	crashpoint.Here("scheduler/reissued") // the next attempt is open, its work not published
	if err := i.publish(ctx, items); err != nil {
		return err
	}
	i.handled(groups)
	clear(i.unpublished)
	return nil
}

func (i *Issuer) exclude(ctx context.Context, groups []*bufferv1.GroupRecord) error {
	if len(groups) == 0 {
		return nil
	}
	req := &bufferv1.ExcludeGroupsRequest{RunId: i.run.GetRunId(), Fence: i.Fence, Reason: AttemptsExhausted}
	for _, g := range groups {
		req.Groups = append(req.Groups, g.GetKey())
	}
	if _, err := i.Buffer.ExcludeGroups(ctx, req); err != nil {
		return fmt.Errorf("exclude %d groups: %w", len(groups), moved(err))
	}
	crashpoint.Here("scheduler/excluded") // the ledger has the exclusion, no event was sent
	for _, g := range groups {
		name := fmt.Sprintf("%d/%d", g.GetKey().GetEpoch(), g.GetKey().GetIndex())
		i.Emit(&eventv1.Event{
			Kind: "group.excluded", Level: eventv1.Level_LEVEL_WARN, Step: i.Board.Ledger().GetStep(),
			Message:    fmt.Sprintf("group %s is excluded: %d attempts failed, the last one with %s", name, g.GetFailures(), g.GetReason()),
			Attributes: map[string]string{"group": name, "reason": AttemptsExhausted, "last_reason": g.GetReason()},
		})
	}
	i.handled(groups)
	return nil
}

func (i *Issuer) handled(groups []*bufferv1.GroupRecord) {
	for _, g := range groups {
		i.settled[g.GetPosition()] = g.GetKey().GetAttempt()
	}
}

// moved makes a refusal by the ledger transient if the group has changed since the state that was
// acted on: the next attempt reads a newer state.
func moved(err error) error {
	if code := rpcerr.Code(err); code == codes.FailedPrecondition || code == codes.Aborted {
		return errMoved.Wrap(err)
	}
	return err
}

// advance makes the cursor durable at a position.
func (i *Issuer) advance(ctx context.Context, to uint64) error {
	if err := i.Cursor.Advance(ctx, i.run.GetRunId(), i.position, to); err != nil {
		return err
	}
	i.position = to
	i.Board.SetPosition(to, i.window.First, i.data.Rows)
	crashpoint.Here("scheduler/advanced") // the cursor is durable, nothing is published
	return nil
}

// publish returns when the work stream has stored the groups. It may be repeated.
func (i *Issuer) publish(ctx context.Context, items []bus.WorkItem) error {
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
		err := i.Stream.Publish(bounded, messages...)
		cancel()
		if errors.Is(err, bus.ErrNoStream) {
			return i.ensure(ctx, err)
		}
		if err != nil {
			return err
		}
		crashpoint.Here("scheduler/published") // the work is on the stream, and no record says that
		items = items[n:]
	}
	return nil
}

// message builds the prompt group of an item. The stream drops a message with the id of an earlier
// one, as after a publish that is repeated, so an item that is issued again has another id.
func (i *Issuer) message(it bus.WorkItem) (bus.Message, error) {
	place := dataset.PlaceOf(it.Position, i.data.Rows)
	row := i.order.Row(place)
	text, err := i.file.Row(row)
	if err != nil {
		return bus.Message{}, err
	}
	run, config := i.run.GetRunId(), i.run.GetPlan().GetConfig()
	size := algorithm.GroupSize(config)
	group := &runv1.PromptGroup{
		RunId: run, Epoch: place.Epoch, Index: place.Index, Attempt: it.Attempt, Position: it.Position,
		Row: row, RowJson: text, GroupSize: size,
		Seeds:      dataset.Seeds(config.GetSeed(), place, int(size)),
		MinVersion: i.window.MinVersion(it.Position, i.window.Made(i.Board.Ledger())),
	}
	return bus.Message{
		Subject: it.Subject(run), Body: group,
		ID: fmt.Sprintf("%s/%d/%d/%s/%d", run, it.Position, it.Attempt, i.nonce, i.rounds),
	}, nil
}
