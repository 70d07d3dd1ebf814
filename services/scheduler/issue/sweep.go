package issue

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/telemetry"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// sweep compares what was issued with what exists, and repairs the difference: streams and
// consumers that are missing are created again, and groups that were lost are published again with
// the same attempt. The ledger drops what arrives twice.
//
// An issued group is in the work stream until its worker acks it, which it does when the group is
// in the trajectory stream; from there the buffer removes it when it is in the ledger. A group is
// lost if it is in none of them: the work stream does not list it in two sweeps in a row, the
// trajectories that were there in the first one are all ingested, and then the ledger does not have
// it completely.
func (i *Issuer) sweep(ctx context.Context) error {
	if s := i.Board.State(); s != runv1.RunState_RUN_STATE_STARTING && s != runv1.RunState_RUN_STATE_RUNNING && s != runv1.RunState_RUN_STATE_PAUSED {
		return nil
	}
	state, err := i.Stream.InspectRun(ctx, i.run.GetRunId())
	if err != nil {
		return repeated(err)
	}
	if len(state.Missing) > 0 {
		if err := i.restore(ctx, strings.Join(state.Missing, ", ")); err != nil {
			return err
		}
	}
	if !i.issues() {
		clear(i.unseen)
		return nil
	}
	items, err := i.lacking(ctx)
	if err != nil {
		return err
	}
	unseen := map[bus.WorkItem]uint64{}
	var lost []bus.WorkItem
	for _, it := range items {
		_, queued := state.Work[it]
		_, opened := i.unpublished[it.Position] // act publishes it
		if queued || opened {
			continue
		}
		mark, before := i.unseen[it]
		switch {
		case !before:
			unseen[it] = state.Trajectories.Last
		case state.Trajectories.Past(mark):
			lost = append(lost, it)
		default:
			unseen[it] = mark
		}
	}
	i.unseen = unseen
	if len(lost) == 0 {
		return nil
	}
	i.rounds++ // the stream would drop the ids of the messages that were lost
	if err := i.publish(ctx, lost); err != nil {
		return err
	}
	i.Log.WarnContext(ctx, "lost groups are issued again", telemetry.AttrRun, i.run.GetRunId(), "groups", len(lost))
	i.Emit(&eventv1.Event{
		Kind: "group.lost", Level: eventv1.Level_LEVEL_WARN, Step: i.Board.Ledger().GetStep(),
		Message:    fmt.Sprintf("%d groups were in no message and with no worker, and are issued again; the first one has position %d", len(lost), lost[0].Position),
		Attributes: map[string]string{"groups": fmt.Sprint(len(lost)), "position": fmt.Sprint(lost[0].Position)},
	})
	return nil
}

// issues reports whether the state of the run allows new work.
func (i *Issuer) issues() bool {
	s := i.Board.State()
	return i.Board.Ledger() != nil && (s == runv1.RunState_RUN_STATE_STARTING || s == runv1.RunState_RUN_STATE_RUNNING)
}

// restore creates the missing streams and consumers of the run.
func (i *Issuer) restore(ctx context.Context, missing string) error {
	if err := i.Stream.EnsureRun(ctx, i.run.GetRunId()); err != nil {
		return repeated(err)
	}
	i.Log.WarnContext(ctx, "streams of the run were missing and are created again", telemetry.AttrRun, i.run.GetRunId(), "missing", missing)
	i.Emit(&eventv1.Event{
		Kind: "stream.lost", Level: eventv1.Level_LEVEL_WARN, Step: i.Board.Ledger().GetStep(),
		Message:    "NATS has lost the " + missing + ", which was created again; groups that were in it are issued again",
		Attributes: map[string]string{"missing": missing},
	})
	return nil
}

// ensure creates the missing streams after a publish found none, and returns an error after which
// the publish is repeated.
func (i *Issuer) ensure(ctx context.Context, err error) error {
	if err := i.restore(ctx, "work stream"); err != nil {
		return err
	}
	return bus.ErrUnavailable.Wrap(err)
}

// repeated makes an error of the servers that ends when their nodes are back a transient one.
func repeated(err error) error {
	if errors.Is(err, bus.ErrReplicas) || errors.Is(err, bus.ErrNoStream) {
		return bus.ErrUnavailable.Wrap(err)
	}
	return err
}
