package scheduler

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// left are the runs that a dead process left active. Where nobody goes on with them by itself they are INTERRUPTED from now on; one
// that a refused gradient has paused stays so, as nobody went on with it before either.
func (s *service) left(ctx context.Context) ([]string, error) {
	runs, err := s.Store.List(ctx, Filter{States: activeStates})
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, run := range runs {
		ids = append(ids, run.GetRunId())
		if s.cfg.ResumeOnStart || refusal.Paused(run) { // what is recorded of them stays: if this process dies too, the next one finds them
			continue
		}
		if err := s.interrupt(ctx, run.GetRunId(), "the control plane died"); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// adopt goes on with a run that a dead process left active, however long what that takes is away.
func (s *service) adopt(ctx context.Context, runID string) {
	for delay := 100 * time.Millisecond; ; delay = min(2*delay, 2*time.Second) {
		_, err := s.goOn(ctx, runID, true)
		if err == nil || ctx.Err() != nil {
			return
		}
		if !transient(err) {
			s.Log.ErrorContext(ctx, "run could not be resumed", "run", runID, "error", err)
			if err := s.interrupt(ctx, runID, "it could not be resumed: "+rpcerr.Text(err)); err != nil {
				s.Log.ErrorContext(ctx, "the run's record still says that it is active", "run", runID, "error", err)
			}
			return
		}
		s.Log.WarnContext(ctx, "run can't be resumed yet", "run", runID, "error", err)
		if pause(ctx, delay) != nil {
			return
		}
	}
}

// catchUpPatience is how long the ledger of a run that a dead process left behind is waited for.
const catchUpPatience = 2 * time.Second

// catchUp writes the steps that the ledgers have committed into the records of runs: a process that was killed wrote its last
// ones there and nowhere else.
func (s *service) catchUp(ctx context.Context, ids []string) {
	ctx, cancel := context.WithTimeout(ctx, catchUpPatience)
	defer cancel()
	for _, id := range ids {
		if err := s.catchUpOne(ctx, id); err != nil {
			s.Log.WarnContext(ctx, "the record of a run may lack its last steps", "run", id, "error", err)
		}
	}
}

func (s *service) catchUpOne(ctx context.Context, id string) error {
	run, err := s.Store.Get(ctx, id)
	if err != nil {
		return err
	}
	var resp *bufferv1.ListStepsResponse
	for {
		resp, err = s.Buffer.ListSteps(ctx, &bufferv1.ListStepsRequest{RunId: id, FromStep: run.GetStep() + 1})
		if err == nil || !transient(err) || ctx.Err() != nil {
			break
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	if rpcerr.Code(err) == codes.NotFound || err == nil && len(resp.GetSteps()) == 0 {
		return nil // it was killed before its ledger was opened, or between two steps
	}
	if err != nil {
		return err
	}
	last := resp.GetSteps()[len(resp.GetSteps())-1]
	_, err = s.update(ctx, id, func(r *Run) error {
		r.Step = max(r.GetStep(), last.GetStep())
		folder := WeightsFolder(r, last.GetStep())
		if _, err := os.Stat(folder); err == nil {
			r.WeightsDirectory, r.WeightsDigest = folder, last.GetWeightsDigest()
		}
		return nil
	})
	return err
}

// WeightsFolder is where a run's learner writes the weights of a version.
func WeightsFolder(run *Run, version uint64) string {
	return filepath.Join(run.GetDirectory(), "weights", fmt.Sprintf("v%06d", version))
}

const (
	retold     = 10 * time.Second // before the newest end: others since are told of again; events travel in parts of a second
	retoldRuns = 1000             // the newest; the one that ended last is hardly older than all of them
)

// retell tells of the last ends again: a process that was killed right after it had recorded one may not have told of it. Storage
// knows those that it has.
func (s *service) retell(ctx context.Context) error {
	runs, err := s.Store.List(ctx, Filter{States: endStates, Limit: retoldRuns})
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
		if end := run.GetEndTime(); end != nil && newest.Sub(end.AsTime()) <= retold {
			s.emit(run, stateEvent(run))
		}
	}
	return nil
}

const (
	sweepEvery  = time.Hour
	streamsKept = time.Hour // of a run that failed or was cancelled: whoever resumes it then makes them anew
)

// sweep removes the streams that nobody uses, now and every hour.
func (s *service) sweep(ctx context.Context) {
	for {
		if err := s.sweepStreams(ctx); err != nil && ctx.Err() == nil {
			s.Log.WarnContext(ctx, "the streams of runs that have ended may be left", "error", err)
		}
		if pause(ctx, sweepEvery) != nil {
			return
		}
	}
}

// sweepStreams removes the streams of runs that have succeeded, whose scheduler may have died before it did, and of those that ended
// otherwise some time ago. A resumed run finds in its ledger all that it needs.
func (s *service) sweepStreams(ctx context.Context) error {
	runs, err := s.Bus.Runs(ctx)
	for _, id := range runs {
		run, unknown := s.Store.Get(ctx, id)
		if unknown != nil { // another mesh's
			continue
		}
		given := run.GetState() == Failed || run.GetState() == Cancelled
		if run.GetState() == Succeeded || given && s.Now().Sub(run.GetEndTime().AsTime()) > streamsKept {
			err = errors.Join(err, s.Bus.DeleteRun(ctx, id))
		}
	}
	return err
}
