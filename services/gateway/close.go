package gateway

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// Reasons of samples that are not trained on.
const (
	reasonAgentLost   = "AGENT_LOST"   // no one closed the session by its deadline
	reasonAgentFailed = "AGENT_FAILED" // the agent gave no reason
	reasonRunEnded    = "RUN_ENDED"    // the buffer ingests nothing for the run any more
)

// settleRetry is when another gateway, or this one, sends the trajectories of a closed session
// again if no answer of the buffer was recorded.
const settleRetry = 5 * time.Second

// Close ends a session, and returns when the buffer has its trajectories.
func (a *agents) Close(ctx context.Context, req *gatewayv1.CloseSessionRequest) (*End, error) {
	session, err := a.store.Session(ctx, req.GetSessionId(), 0)
	if err != nil {
		return nil, err
	}
	if want := req.GetRunId(); want != "" && want != session.GetRunId() {
		return nil, ErrSessionRun.WithMessage("session %s belongs to %s, not %s", req.GetSessionId(), session.GetRunId(), want)
	}
	end, err := a.endOf(session, req)
	if err != nil {
		return nil, err
	}
	if session.GetEnd() == nil {
		if session.Task, err = a.claim(ctx, session, req.GetSessionId(), end.GetOutcome()); err != nil {
			return nil, err
		}
		end.Key = session.GetTask().GetKey()
		if session, err = a.store.Finish(ctx, req.GetSessionId(), end, a.now().Add(settleRetry)); err != nil {
			return nil, err
		}
		crashpoint.Here("gateway/closed") // the end is durable, the buffer does not know
	}
	if first := session.GetEnd(); first.GetOutcome() != end.GetOutcome() || first.GetReason() != end.GetReason() || first.GetReward() != end.GetReward() ||
		!maps.Equal(first.GetMetrics(), end.GetMetrics()) {
		return nil, ErrSessionClosed.WithMessage("session %s is closed with outcome %s %s and reward %g", req.GetSessionId(), first.GetOutcome(), first.GetReason(), first.GetReward()).
			Fix("close each session once")
	}
	return a.settle(ctx, req.GetSessionId(), session)
}

// endOf is the end that a request asks for.
func (a *agents) endOf(session *Session, req *gatewayv1.CloseSessionRequest) (*End, error) {
	end := &End{Outcome: req.GetOutcome(), Reward: req.GetReward(), Metrics: req.GetMetrics(), Time: timestamp(a.now())}
	paths := leaves(session)
	end.Trajectories = uint32(max(1, len(paths)))
	switch {
	case end.GetOutcome() == trajectoryv1.Outcome_OUTCOME_INFRA_FAILED:
		end.Reason, end.Reward, end.Trajectories = cmp.Or(req.GetReason(), reasonAgentFailed), 0, 1
		return end, nil
	case end.GetOutcome() == trajectoryv1.Outcome_OUTCOME_ABORTED:
		end.Reason, end.Reward, end.Trajectories = cmp.Or(req.GetReason(), "ABORTED"), 0, 1
		return end, nil
	case req.GetReason() != "":
		return nil, rpcerr.New(codes.InvalidArgument, rpcerr.ReasonInvalidRequest, "reason: %q, but the outcome is not ABORTED or INFRA_FAILED", req.GetReason()).
			Field("reason", "set outcome = INFRA_FAILED if the agent or a tool failed").Fix("set the outcome INFRA_FAILED if the agent or a tool failed")
	case len(paths) == 0:
		return nil, ErrSessionEmpty.With("session", req.GetSessionId())
	}
	if end.GetOutcome() == trajectoryv1.Outcome_OUTCOME_UNSPECIFIED {
		end.Outcome = trajectoryv1.Outcome_OUTCOME_COMPLETED
		last := paths[len(paths)-1]
		if last[len(last)-1].GetFinishReason() == "length" {
			end.Outcome = trajectoryv1.Outcome_OUTCOME_TRUNCATED
		}
	}
	return end, nil
}

// claim returns the task of a session. A session without one becomes a group of one: it takes the
// place of the next prompt group of its run, if the samples of a group are not compared.
func (a *agents) claim(ctx context.Context, session *Session, name string, outcome trajectoryv1.Outcome) (*Task, error) {
	if task := session.GetTask(); task != nil {
		return task, nil
	}
	run, err := a.run(ctx, session.GetRunId())
	if err != nil {
		return nil, err
	}
	if size := run.config.GetSampling().GetGroupSize(); size != 1 {
		return nil, ErrSessionGroup.WithMessage("session %s belongs to no prompt group, and the %d samples of a group are compared", name, size)
	}
	if outcome == trajectoryv1.Outcome_OUTCOME_COMPLETED || outcome == trajectoryv1.Outcome_OUTCOME_TRUNCATED {
		if err := checkSampled(run.config, session, name); err != nil {
			return nil, err
		}
	}
	groups, err := run.fetch(ctx, 1, claimWait)
	if err != nil {
		return nil, err
	}
	if len(groups) == 0 {
		return nil, rpcerr.New(codes.Unavailable, "NO_PROMPTS", "the run has no place for a further sample now").RetryAfter(time.Second)
	}
	task := run.tasks(groups[0], a.now(), a.url)[0]
	task.SessionId = name
	task, err = a.store.Bind(ctx, task)
	if err != nil {
		return nil, err
	}
	run.hold(groups[0], a.now())
	return task, nil
}

// claimWait is how long a session without a group waits for a place.
const claimWait = 5 * time.Second

// settle sends the trajectories of a closed session to the buffer and records the answer. A
// repetition has the same effect: the buffer drops duplicates.
func (a *agents) settle(ctx context.Context, name string, session *Session) (*End, error) {
	end := session.GetEnd()
	if end.GetAccepted() || len(end.GetRefused()) > 0 {
		return end, nil
	}
	envelopes, err := trajectories(session)
	if err != nil {
		return nil, fmt.Errorf("encode session %s: %w", name, err)
	}
	put := &bufferv1.PutTrajectoriesRequest{RunId: session.GetRunId(), Puts: []*trajectoryv1.TrajectoryBatch{{Trajectories: envelopes}}}
	answer, err := a.buffer.PutTrajectories(ctx, put)
	if rpcerr.Code(err) == codes.FailedPrecondition || rpcerr.Code(err) == codes.NotFound {
		return a.unsettled(ctx, name, session, err)
	}
	if err != nil {
		return nil, err
	}
	crashpoint.Here("gateway/put") // the buffer has the sample, the session is not settled
	end = proto.CloneOf(end)
	for _, result := range answer.GetResults() {
		end.Accepted = int(result.GetAccepted()+result.GetDuplicates()) == len(envelopes)
		for _, refusal := range result.GetRefused() {
			end.Refused = append(end.Refused, refusal.GetReason())
		}
	}
	if err := a.store.Settle(ctx, name, end); err != nil {
		return nil, err
	}
	crashpoint.Here("gateway/settled") // the session is settled, its prompt group is not acknowledged
	a.settled(ctx, GroupID(end.GetKey()))
	return end, nil
}

// unsettled is the end of a session whose run has no open ledger. If the run is over, the session
// ends without a sample. Otherwise its end waits: the ledger is closed a moment before the end of
// the run is recorded, and an interrupted run opens it again.
func (a *agents) unsettled(ctx context.Context, name string, session *Session, refusal error) (*End, error) {
	run, err := a.status(ctx, session.GetRunId())
	switch {
	case rpcerr.Code(err) == codes.NotFound, err == nil && over(run.GetState()):
		end := proto.CloneOf(session.GetEnd())
		end.Refused = []string{reasonRunEnded}
		return end, a.store.Settle(ctx, name, end)
	case err != nil:
		return nil, err
	}
	return nil, ErrRunAway.WithMessage("the end of session %s is recorded, and its run takes no sample now: %v", name, refusal)
}
