package scheduler

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/id"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler/dataset"
)

// around is what an issuer calls; it writes down what was asked, in order.
type around struct {
	Store
	Bus
	Buffer
	asked []string
	known []*bufferv1.GroupRecord
	lost  int // answers of ReissueGroups that do not arrive
	full  int // publishes that fail
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

func (a *around) ListGroups(_ context.Context, in *bufferv1.ListGroupsRequest, _ ...grpc.CallOption) (*bufferv1.ListGroupsResponse, error) {
	out := &bufferv1.ListGroupsResponse{}
	for _, g := range a.known {
		if g.GetPosition() >= in.GetFromPosition() {
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

func (a *around) Emit(*eventv1.Event) {}

func (a *around) Flush(context.Context) error { return nil }

// bench gives an issuer of two-group steps over ten rows whose cursor stands at a position.
func bench(t *testing.T, position uint64, state State, ledger *bufferv1.LedgerState, known ...*bufferv1.GroupRecord) (*issuer, *around) {
	t.Helper()
	text := []byte("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n")
	path := filepath.Join(t.TempDir(), "rows.jsonl")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := dataset.Open(path, id.Content(text), 10)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	a := &around{known: known}
	svc := newService(Config{}, Deps{Store: a, Bus: a, Buffer: a, Events: a, Log: slog.New(slog.DiscardHandler), Now: time.Now})
	attempts := uint32(2)
	run := &Run{RunId: "run-1", State: state, Incarnation: 1, Plan: &planv1.Plan{Config: &configv1.RunConfig{
		Limits: &configv1.LimitsConfig{GroupAttempts: &attempts},
	}}}
	c := newConductor(svc, run)
	c.window = Window{Sync: true, GroupsPerStep: 2, Steps: 5}
	c.seeLedger(ledger)
	i := newIssuer(c, run, input{rows: 10}, position)
	i.file = file
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
)

func TestTheCursorMovesBeforeThePublish(t *testing.T) {
	t.Parallel()
	i, a := bench(t, 0, Running, &bufferv1.LedgerState{})
	for range 2 { // the second time there is nothing to do
		if err := i.act(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	a.want(t, "cursor 0 to 2", "publish 0 attempt 0", "publish 1 attempt 0")
}

func TestNothingIsIssuedWhileTheRunDoesNotRun(t *testing.T) {
	t.Parallel()
	for _, state := range []State{Paused, Draining, Cancelled} {
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
	i, a := bench(t, 2, Running, state)
	for range 2 { // the ledger's next word may be older than what was done
		if err := i.act(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	a.want(t, "reissue 0 attempt 5", "publish 0 attempt 5", "exclude 1")
}

// A run of months has no end of groups that dissolve.
func TestWhatWasSettledIsForgottenOnceTheLedgerTellsOfItNoMore(t *testing.T) {
	t.Parallel()
	i, _ := bench(t, 4, Running, nil)
	for attempt := range uint32(3) {
		for index := range uint64(4) {
			i.c.seeLedger(&bufferv1.LedgerState{Dissolved: []*bufferv1.GroupRecord{group(index, attempt, dissolved, 0)}})
			if err := i.act(t.Context()); err != nil {
				t.Fatal(err)
			}
			if len(i.settled) != 1 {
				t.Fatalf("one group is dissolved, of %d it is known that they were", len(i.settled))
			}
		}
	}
}

// The ledger opened the next attempt, and buffer or stream died before the scheduler knew or could publish: no state of the ledger
// tells of the group again, and its work must go out all the same.
func TestAnAttemptThatIsOpenIsPublished(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*around){"answer lost": func(a *around) { a.lost = 1 }, "publish failed": func(a *around) { a.full = 1 }} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i, a := bench(t, 2, Running, &bufferv1.LedgerState{Dissolved: []*bufferv1.GroupRecord{group(0, 0, dissolved, 1)}})
			spoil(a)
			if err := i.act(t.Context()); err == nil {
				t.Fatal("no error")
			}
			i.c.seeLedger(&bufferv1.LedgerState{}) // it is open now
			for range 2 {
				if err := i.act(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			a.want(t, "reissue 0 attempt 1", "reissue 0 attempt 1", "publish 0 attempt 1")
		})
	}
}

// What was published after all and failed again is not opened a second time.
func TestAnOwedAttemptThatFailedIsOver(t *testing.T) {
	t.Parallel()
	i, a := bench(t, 2, Running, &bufferv1.LedgerState{Dissolved: []*bufferv1.GroupRecord{group(0, 0, dissolved, 1)}})
	a.full = 1
	if err := i.act(t.Context()); err == nil {
		t.Fatal("no error")
	}
	i.c.seeLedger(&bufferv1.LedgerState{Dissolved: []*bufferv1.GroupRecord{group(0, 1, dissolved, 2)}})
	for range 2 {
		if err := i.act(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	a.want(t, "reissue 0 attempt 1", "exclude 0")
}

func TestReconcilePublishesWhatTheLedgerDoesNotHaveWhole(t *testing.T) {
	t.Parallel()
	i, a := bench(t, 6, Running, &bufferv1.LedgerState{Step: 1},
		group(2, 1, open, 0), group(3, 0, ready, 0), group(4, 0, excluded, 0), group(5, 0, dissolved, 1))
	if err := i.reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.want(t, "publish 2 attempt 1")
	i, a = bench(t, 6, Running, &bufferv1.LedgerState{Step: 1}, group(3, 0, ready, 0))
	if err := i.reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.want(t, "publish 2 attempt 0", "publish 4 attempt 0", "publish 5 attempt 0")
}

// A disk that lost the cursor's last move does not have the same positions issued as new ones.
func TestReconcileNeverLetsTheCursorBehindTheLedger(t *testing.T) {
	t.Parallel()
	i, a := bench(t, 2, Running, &bufferv1.LedgerState{Step: 1}, group(3, 0, ready, 0), group(4, 0, open, 0))
	if err := i.reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.want(t, "cursor 2 to 5", "publish 2 attempt 0", "publish 4 attempt 0")
}

// What is on its way is bounded by bytes; the groups of one step are let through however large they are.
func TestBytesHoldGroupsBack(t *testing.T) {
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
			i, a := bench(t, 0, Running, c.ledger)
			i.c.window = Window{GroupsPerStep: 2, Staleness: 3, Steps: 5, Completion: true}
			config := i.record.GetPlan().GetConfig()
			size := uint32(4)
			config.Limits.QueueBytes, config.Sampling = &c.most, &configv1.SamplingConfig{GroupSize: &size}
			if err := i.act(t.Context()); err != nil {
				t.Fatal(err)
			}
			if i.position != c.want {
				t.Errorf("issued up to %d, want %d: %q", i.position, c.want, a.asked)
			}
			if waits := len(i.c.view.waits) > 0; waits != (c.want < 8) {
				t.Errorf("waits %v", i.c.view.waits)
			}
		})
	}
}
