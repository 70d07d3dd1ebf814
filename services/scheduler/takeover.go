package scheduler

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/telemetry"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// takeover handles what a scheduler that died has left behind: active runs, records without their
// last steps, unsent events, streams.
type takeover struct {
	Deps
	resumeOnStart bool
	records       *records
	runs          *runs
}

// left lists the runs that a dead process left active, and records them as INTERRUPTED unless they
// are resumed at the start. A run that a refused gradient has paused stays paused.
func (t *takeover) left(ctx context.Context) ([]string, error) {
	runs, err := t.Store.List(ctx, Filter{States: activeStates})
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, run := range runs {
		ids = append(ids, run.GetRunId())
		if t.resumeOnStart || refusal.Paused(run) { // if this process dies too, the next one finds them in the same state
			continue
		}
		if err := t.records.interrupt(ctx, run.GetRunId(), "the control plane died"); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// adopt continues a run that a dead process left active, with its workers if they still run, and
// retries while a service is unavailable.
func (t *takeover) adopt(ctx context.Context, runID string) {
	defer t.runs.adoptions.settle(runID)
	var workers map[string]adopted // nil: not read yet
	for delay := 100 * time.Millisecond; ; delay = min(2*delay, 2*time.Second) {
		run, err := t.Store.Get(ctx, runID)
		if err == nil {
			if workers == nil {
				workers = t.Deps.adopt(ctx, run)
			}
			err = t.runs.inherit(ctx, run, workers)
		}
		if err == nil {
			return
		}
		if ctx.Err() != nil || lost(err) {
			giveUp(workers, launch.ErrRelease)
			return
		}
		if !retry.Transient(err) {
			giveUp(workers, nil)
			t.Log.ErrorContext(ctx, "the run could not be resumed", telemetry.AttrRun, runID, "error", err)
			if err := t.records.interrupt(ctx, runID, "it could not be resumed: "+rpcerr.Text(err)); err != nil {
				t.Log.ErrorContext(ctx, "the record of the run still has an active state", telemetry.AttrRun, runID, "error", err)
			}
			return
		}
		t.Log.WarnContext(ctx, "the run cannot be resumed yet", telemetry.AttrRun, runID, "error", err)
		if retry.Sleep(ctx, delay) != nil {
			giveUp(workers, launch.ErrRelease)
			return
		}
	}
}

// catchUpTimeout bounds the wait for the ledgers of the runs that a dead process left behind.
const catchUpTimeout = 2 * time.Second

// catchUp copies the committed steps of the ledgers into the records of runs. A process that was
// killed has written its last steps to the ledger alone.
func (t *takeover) catchUp(ctx context.Context, ids []string) {
	ctx, cancel := context.WithTimeout(ctx, catchUpTimeout)
	defer cancel()
	for _, id := range ids {
		if err := t.catchUpOne(ctx, id); err != nil {
			t.Log.WarnContext(ctx, "the record of a run may lack its last steps", telemetry.AttrRun, id, "error", err)
		}
	}
}

func (t *takeover) catchUpOne(ctx context.Context, id string) error {
	var err error
	var ledger *bufferv1.LedgerState
	for {
		ledger, err = t.ledger(ctx, id)
		if err == nil || !retry.Transient(err) || ctx.Err() != nil {
			break
		}
		if err := retry.Sleep(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	if rpcerr.Code(err) == codes.NotFound {
		return nil // killed before the ledger was opened
	}
	if err != nil {
		return err
	}
	_, err = t.records.update(ctx, id, func(r *Run) error {
		r.Step = max(r.GetStep(), ledger.GetStep())
		folder := WeightsFolder(r, ledger.GetWeightsVersion())
		if _, err := os.Stat(folder); err == nil && ledger.GetWeightsDigest() != "" {
			r.WeightsDirectory, r.WeightsDigest = folder, ledger.GetWeightsDigest()
		}
		return nil
	})
	return err
}

// ledger reads the state of a ledger. Its newest weights are those that a process has: the digests
// in the records of steps may belong to a lineage that was lost.
func (t *takeover) ledger(ctx context.Context, id string) (*bufferv1.LedgerState, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := t.Buffer.WatchLedger(ctx, &bufferv1.WatchLedgerRequest{RunId: id})
	if err != nil {
		return nil, err
	}
	resp, err := stream.Recv()
	return resp.GetState(), err
}

// WeightsFolder is the folder to which the learner of a run writes a version of the weights.
func WeightsFolder(run *Run, version uint64) string {
	return filepath.Join(run.GetDirectory(), "weights", fmt.Sprintf("v%06d", version))
}

const (
	resendWithin = 10 * time.Second // ends this close to the newest one are reported again; an event needs less than a second
	resendRuns   = 1000             // the newest runs that are considered
)

// resend reports the last ends again: a process that was killed right after the record of an end
// may not have sent its event. Storage drops duplicates.
func (t *takeover) resend(ctx context.Context) error {
	runs, err := t.Store.List(ctx, Filter{States: endStates, Limit: resendRuns})
	if err != nil {
		return err
	}
	var newest time.Time
	for _, run := range runs {
		if end := run.GetEndTime(); end != nil && end.AsTime().After(newest) {
			newest = end.AsTime()
		}
	}
	for _, run := range runs {
		if end := run.GetEndTime(); end != nil && newest.Sub(end.AsTime()) <= resendWithin {
			t.records.emit(run, stateEvent(run))
		}
	}
	return nil
}

const (
	sweepEvery  = time.Hour
	streamsKept = time.Hour // of a run that failed or was cancelled; resuming it later creates them again
)

// sweep removes unused streams, now and every hour.
func (t *takeover) sweep(ctx context.Context) {
	for {
		if err := t.sweepStreams(ctx); err != nil && ctx.Err() == nil {
			t.Log.WarnContext(ctx, "the streams of ended runs could not be removed", "error", err)
		}
		if retry.Sleep(ctx, sweepEvery) != nil {
			return
		}
	}
}

// sweepStreams removes the streams of runs that have succeeded, in case their scheduler died before
// it did, and of runs that failed or were cancelled some time ago. A resumed run needs its ledger
// alone.
func (t *takeover) sweepStreams(ctx context.Context) error {
	runs, err := t.Bus.Runs(ctx)
	for _, id := range runs {
		run, unknown := t.Store.Get(ctx, id)
		if unknown != nil { // of another mesh
			continue
		}
		stopped := run.GetState() == Failed || run.GetState() == Cancelled
		if run.GetState() == Succeeded || stopped && t.Now().Sub(run.GetEndTime().AsTime()) > streamsKept {
			err = errors.Join(err, t.Bus.DeleteRun(ctx, id))
		}
	}
	return err
}

// formatPage is the number of runs that checkFormats reads at a time.
const formatPage = 1000

// checkFormats returns ErrStateFormat if the store has runs with plans of another format. Such a
// plan would decode without an error and lose its settings, so nothing may read it.
func checkFormats(ctx context.Context, store Store) error {
	var refused []string
	for after := ""; ; {
		runs, err := store.List(ctx, Filter{After: after, Limit: formatPage})
		if err != nil {
			return err
		}
		for _, run := range runs {
			if format := run.GetPlan().GetFormat(); format != planformat.Format {
				refused = append(refused, fmt.Sprintf("%s (format %d)", run.GetRunId(), format))
			}
			after = run.GetRunId()
		}
		if len(runs) < formatPage {
			break
		}
	}
	if len(refused) == 0 {
		return nil
	}
	shown := strings.Join(refused[:min(len(refused), 3)], ", ")
	if more := len(refused) - 3; more > 0 {
		shown += fmt.Sprintf(" and %d more", more)
	}
	return ErrStateFormat.WithMessage("this version reads plans of format %d, and the state holds runs of other formats: %s", planformat.Format, shown)
}
