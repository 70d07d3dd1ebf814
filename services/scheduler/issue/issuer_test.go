package issue

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// around implements what an issuer calls, and records the calls in order.
type around struct {
	Buffer
	ledger *bufferv1.LedgerState
	state  runv1.RunState
	waits  map[retry.Awaited]string
	asked  []string
	known  []*bufferv1.GroupRecord
	lost   int // answers of ReissueGroups that do not arrive
	full   int // publishes that fail

	servers *bus.RunState
}

func (a *around) note(format string, args ...any) {
	a.asked = append(a.asked, fmt.Sprintf(format, args...))
}

func (a *around) Advance(_ context.Context, _ string, from, to uint64) error {
	a.note("cursor %d to %d", from, to)
	return nil
}

func (a *around) Publish(_ context.Context, messages ...bus.Message) error {
	if a.full > 0 {
		a.full--
		return status.Error(codes.Unavailable, "the stream is away")
	}
	for _, m := range messages {
		g := m.Body.(*runv1.PromptGroup)
		a.note("publish %d attempt %d", g.GetPosition(), g.GetAttempt())
	}
	return nil
}

func (a *around) EnsureRun(context.Context, string) error {
	a.note("ensure")
	return nil
}

func (a *around) InspectRun(context.Context, string) (*bus.RunState, error) { return a.servers, nil }

func (a *around) ListIncompleteGroups(_ context.Context, in *bufferv1.ListIncompleteGroupsRequest, _ ...grpc.CallOption) (*bufferv1.ListIncompleteGroupsResponse, error) {
	out := &bufferv1.ListIncompleteGroupsResponse{}
	known := map[uint64]*bufferv1.GroupRecord{}
	for _, g := range a.known {
		known[g.GetPosition()] = g
		out.EndPosition = max(out.EndPosition, g.GetPosition()+1)
	}
	first := in.GetFromPosition()
	if token := in.GetPageToken(); token != "" {
		first, _ = strconv.ParseUint(token, 10, 64)
	}
	for p := first; p < max(out.GetEndPosition(), in.GetEndPosition()); p++ {
		if len(out.GetGroups()) == int(in.GetPageSize()) {
			out.NextPageToken = strconv.FormatUint(p, 10)
			break
		}
		if g := known[p]; g == nil {
			out.Groups = append(out.Groups, group(p, 0, 0, 0))
		} else if g.GetState() == open {
			out.Groups = append(out.Groups, g)
		}
	}
	return out, nil
}

func (a *around) ReissueGroups(_ context.Context, in *bufferv1.ReissueGroupsRequest, _ ...grpc.CallOption) (*bufferv1.ReissueGroupsResponse, error) {
	a.note("reissue %d attempt %d", in.GetGroups()[0].GetIndex(), in.GetGroups()[0].GetAttempt())
	if a.lost > 0 {
		a.lost--
		return nil, status.Error(codes.Unavailable, "the buffer died after its commit")
	}
	return &bufferv1.ReissueGroupsResponse{}, nil
}

func (a *around) ExcludeGroups(_ context.Context, in *bufferv1.ExcludeGroupsRequest, _ ...grpc.CallOption) (*bufferv1.ExcludeGroupsResponse, error) {
	a.note("exclude %d", in.GetGroups()[0].GetIndex())
	return &bufferv1.ExcludeGroupsResponse{}, nil
}

func (a *around) State() runv1.RunState              { return a.state }
func (a *around) Ledger() *bufferv1.LedgerState      { return a.ledger }
func (a *around) SetLedger(l *bufferv1.LedgerState)  { a.ledger = l }
func (a *around) SetPosition(uint64, uint64, uint64) {}
func (a *around) Changes() <-chan struct{}           { return nil }

func (a *around) WaitFor(what retry.Awaited, why string) {
	if a.waits[what] = why; why == "" {
		delete(a.waits, what)
	}
}

func (a *around) blocked(what retry.Awaited, why error) {
	text := ""
	if why != nil {
		text = rpcerr.Text(why)
	}
	a.WaitFor(what, text)
}

// bench makes an issuer of steps of two groups over ten rows, with the cursor at a position.
func bench(t *testing.T, position uint64, state runv1.RunState, ledger *bufferv1.LedgerState, known ...*bufferv1.GroupRecord) (*Issuer, *around) {
	t.Helper()
	text := []byte("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n")
	path := filepath.Join(t.TempDir(), "rows.jsonl")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	a := &around{known: known, ledger: ledger, state: state, waits: map[retry.Awaited]string{}}
	attempts := uint32(2)
	run := &runv1.Run{RunId: "run-1", Incarnation: 1, Plan: &planv1.Plan{Config: &configv1.RunConfig{
		Limits: &configv1.LimitsConfig{GroupAttempts: &attempts},
	}}}
	log := slog.New(slog.DiscardHandler)
	i, err := Open(Deps{
		Buffer: a, Stream: a, Cursor: a, Board: a, Retry: retry.New("run-1", a.blocked, log), Emit: func(*eventv1.Event) {}, Log: log,
	}, run, Window{Sync: true, GroupsPerStep: 2, Steps: 5}, Data{Path: path, Digest: id.Content(text), Rows: 10}, position)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = i.Close() })
	return i, a
}

func (a *around) want(t *testing.T, asked ...string) {
	t.Helper()
	if !slices.Equal(a.asked, asked) {
		t.Fatalf("asked %q, want %q", a.asked, asked)
	}
}

func group(index uint64, attempt uint32, state bufferv1.GroupState, failures uint32) *bufferv1.GroupRecord {
	return &bufferv1.GroupRecord{Key: &bufferv1.GroupKey{Index: index, Attempt: attempt}, Position: index, State: state, Failures: failures}
}

const (
	open      = bufferv1.GroupState_GROUP_STATE_OPEN
	ready     = bufferv1.GroupState_GROUP_STATE_READY
	excluded  = bufferv1.GroupState_GROUP_STATE_EXCLUDED
	dissolved = bufferv1.GroupState_GROUP_STATE_DISSOLVED

	running = runv1.RunState_RUN_STATE_RUNNING
)

func TestCursorIsDurableBeforeThePublish(t *testing.T) {
	t.Parallel()
	i, a := bench(t, 0, running, &bufferv1.LedgerState{})
	for range 2 { // the second call has nothing to do
		if err := i.act(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	a.want(t, "cursor 0 to 2", "publish 0 attempt 0", "publish 1 attempt 0")
}

func TestNothingIsIssuedUnlessTheRunIsRunning(t *testing.T) {
	t.Parallel()
	for _, state := range []runv1.RunState{runv1.RunState_RUN_STATE_PAUSED, runv1.RunState_RUN_STATE_DRAINING, runv1.RunState_RUN_STATE_CANCELLED} {
		i, a := bench(t, 0, state, &bufferv1.LedgerState{Dissolved: []*bufferv1.GroupRecord{group(0, 0, dissolved, 1)}})
		if err := i.act(t.Context()); err != nil {
			t.Fatal(err)
		}
		a.want(t)
	}
}

func TestDissolvedGroupsAreSettledOnce(t *testing.T) {
	t.Parallel()
	state := &bufferv1.LedgerState{Dissolved: []*bufferv1.GroupRecord{group(0, 4, dissolved, 1), group(1, 1, dissolved, 2)}}
	i, a := bench(t, 2, running, state)
	for range 2 { // the next state of the ledger may be older than what was done
		if err := i.act(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	a.want(t, "reissue 0 attempt 5", "publish 0 attempt 5", "exclude 1")
}

// In a long run the number of dissolved groups is not bounded.
func TestSettledGroupsAreForgottenWhenTheLedgerNoLongerReportsThem(t *testing.T) {
	t.Parallel()
	i, _ := bench(t, 4, running, nil)
	for attempt := range uint32(3) {
		for index := range uint64(4) {
			i.Board.SetLedger(&bufferv1.LedgerState{Dissolved: []*bufferv1.GroupRecord{group(index, attempt, dissolved, 0)}})
			if err := i.act(t.Context()); err != nil {
				t.Fatal(err)
			}
			if len(i.settled) != 1 {
				t.Fatalf("one group is dissolved, %d are remembered", len(i.settled))
			}
		}
	}
}

// The ledger opened the next attempt, and the buffer or the stream failed before the scheduler
// could publish. No state of the ledger contains the group again, and its work must still be
// published.
func TestOpenAttemptIsPublished(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*around){"answer lost": func(a *around) { a.lost = 1 }, "publish failed": func(a *around) { a.full = 1 }} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i, a := bench(t, 2, running, &bufferv1.LedgerState{Dissolved: []*bufferv1.GroupRecord{group(0, 0, dissolved, 1)}})
			spoil(a)
			if err := i.act(t.Context()); err == nil {
				t.Fatal("no error")
			}
			i.Board.SetLedger(&bufferv1.LedgerState{}) // it is open now
			for range 2 {
				if err := i.act(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			a.want(t, "reissue 0 attempt 1", "reissue 0 attempt 1", "publish 0 attempt 1")
		})
	}
}

// An attempt whose publish seemed to fail may have run and failed: then it is not opened a second
// time.
func TestUnpublishedAttemptThatFailedIsNotReopened(t *testing.T) {
	t.Parallel()
	i, a := bench(t, 2, running, &bufferv1.LedgerState{Dissolved: []*bufferv1.GroupRecord{group(0, 0, dissolved, 1)}})
	a.full = 1
	if err := i.act(t.Context()); err == nil {
		t.Fatal("no error")
	}
	i.Board.SetLedger(&bufferv1.LedgerState{Dissolved: []*bufferv1.GroupRecord{group(0, 1, dissolved, 2)}})
	for range 2 {
		if err := i.act(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	a.want(t, "reissue 0 attempt 1", "exclude 0")
}

func TestReconcilePublishesIncompleteGroups(t *testing.T) {
	t.Parallel()
	i, a := bench(t, 6, running, &bufferv1.LedgerState{Step: 1},
		group(2, 1, open, 0), group(3, 0, ready, 0), group(4, 0, excluded, 0), group(5, 0, dissolved, 1))
	if err := i.reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.want(t, "publish 2 attempt 1")
	i, a = bench(t, 6, running, &bufferv1.LedgerState{Step: 1}, group(3, 0, ready, 0))
	if err := i.reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.want(t, "publish 2 attempt 0", "publish 4 attempt 0", "publish 5 attempt 0")
}

// If a disk lost the last advance of the cursor, its positions are not issued as new ones.
func TestReconcileMovesTheCursorToTheLedger(t *testing.T) {
	t.Parallel()
	i, a := bench(t, 2, running, &bufferv1.LedgerState{Step: 1}, group(3, 0, ready, 0), group(4, 0, open, 0))
	if err := i.reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.want(t, "cursor 2 to 5", "publish 2 attempt 0", "publish 4 attempt 0")
}

// The bytes in flight are limited; the groups of one step are always allowed.
func TestQueueBytesLimitIssuing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		most   uint64
		ledger *bufferv1.LedgerState
		want   uint64
	}{
		"no size known":           {200, &bufferv1.LedgerState{}, 8},
		"five groups":             {200, &bufferv1.LedgerState{SampleBytes: 10}, 5},
		"five beyond what is out": {200, &bufferv1.LedgerState{SampleBytes: 10, Step: 1, Consumed: 1, Excluded: 1}, 7},
		"one step at least":       {1, &bufferv1.LedgerState{SampleBytes: 10}, 2},
		"more than the window":    {1 << 40, &bufferv1.LedgerState{SampleBytes: 10}, 8},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i, a := bench(t, 0, running, c.ledger)
			i.window = Window{GroupsPerStep: 2, Staleness: 3, Steps: 5, Completion: true}
			config := i.run.GetPlan().GetConfig()
			size := uint32(4)
			config.Limits.QueueBytes, config.Sampling = &c.most, &configv1.SamplingConfig{GroupSize: &size}
			if err := i.act(t.Context()); err != nil {
				t.Fatal(err)
			}
			if i.position != c.want {
				t.Errorf("issued up to %d, want %d: %q", i.position, c.want, a.asked)
			}
			if waits := len(a.waits) > 0; waits != (c.want < 8) {
				t.Errorf("waits %v", a.waits)
			}
		})
	}
}
