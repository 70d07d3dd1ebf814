package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/wait"
	"github.com/rollout-rl/rollout/proto/gen/names"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// mostPositions is the number of prompts that a wait lists.
const mostPositions = 32

// ListWaits implements the contract.
func (s *Server) ListWaits(ctx context.Context, req *gatewayv1.ListWaitsRequest) (*gatewayv1.ListWaitsResponse, error) {
	waits := s.svc.workers.waits(req.GetRunId())
	if s.agents.runs == nil { // no run here has agents
		return &gatewayv1.ListWaitsResponse{Waits: waits}, nil
	}
	run, err := s.agents.run(ctx, req.GetRunId())
	switch {
	case errors.Is(err, ErrNotExternal), errors.Is(err, ErrUnknownModel):
	case err != nil:
		return nil, err
	default:
		waits = append(waits, s.agents.waits(ctx, run)...)
	}
	return &gatewayv1.ListWaitsResponse{Waits: waits}, nil
}

// waits lists what the requests of a run that have no worker wait for, by obstacle.
func (d *directory) waits(run string) []*waitv1.Wait {
	d.mu.Lock()
	defer d.mu.Unlock()
	counts, since := map[obstacle]int{}, map[obstacle]time.Time{}
	for _, t := range d.queue.tickets {
		if t.run != run {
			continue
		}
		if counts[t.why]++; counts[t.why] == 1 || t.since.Before(since[t.why]) {
			since[t.why] = t.since
		}
	}
	var waits []*waitv1.Wait
	for why := noWorker; why <= allFull; why++ {
		if counts[why] > 0 {
			w := d.wait(run, why, requests(counts[why]))
			w.Since = timestamppb.New(since[why])
			waits = append(waits, w)
		}
	}
	return waits
}

func requests(n int) string {
	if n == 1 {
		return "1 request waits"
	}
	return fmt.Sprintf("%d requests wait", n)
}

// wait is the wait of requests with an obstacle. The caller has the lock.
func (d *directory) wait(run string, why obstacle, who string) *waitv1.Wait {
	logs := "see the workers with `rollout logs worker " + run + " WORKER`"
	switch why {
	case noVersion, oldVersion:
		versions := make([]string, 0, 1)
		for _, v := range held(d.serving()[run]) {
			versions = append(versions, strconv.FormatUint(v, 10))
		}
		return &waitv1.Wait{
			Owner: names.ControllerService, Reason: wait.Weights, Evidence: who + " for other weights than the inference workers serve (version " + strings.Join(versions, ", ") + ")",
			Fix: "see why newer ones are not delivered: `rollout logs tail " + run + " --kind weights.left_out,weights.delivered`; a request for an old version can't be answered",
		}
	case allFailed:
		return &waitv1.Wait{Owner: wait.Worker, Reason: wait.WorkersFailed, Evidence: who + " because all inference workers failed", Fix: logs}
	case allFull:
		return &waitv1.Wait{
			Owner: wait.Worker, Reason: wait.Slot, Evidence: fmt.Sprintf("%s for a free slot of the %d inference workers", who, len(d.serving()[run])),
			Fix: "more slots (engine.slots) or more inference workers (engine.workers) make it shorter",
		}
	}
	return &waitv1.Wait{Owner: wait.Worker, Reason: wait.WorkersMissing, Evidence: who + " for an inference worker: none is up", Fix: logs}
}

// waits is what a run waits for that agents sample for.
func (a *agents) waits(ctx context.Context, r *agentRun) []*waitv1.Wait {
	serves := a.serves(r.id)
	if open, oldest := r.sessionsOpen(); open != nil {
		names, refused := a.unclosed(ctx, oldest)
		open.Evidence += names
		if refused {
			open.Fix = "correct what the agent requests, or let it close a session whose request is refused, with an error; " + open.GetFix()
		}
		return []*waitv1.Wait{open}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case len(r.spare) > 0 || r.asking == 0:
		w := &waitv1.Wait{
			Owner: wait.Agents, Reason: wait.NoAgent, Evidence: "no agent asks for prompts, and none has since the gateway started",
			Fix: "start an agent that takes prompts from " + a.url,
		}
		if !r.asked.IsZero() {
			w.Since, w.Evidence = timestamppb.New(r.asked), "no agent asks for prompts: the last one did at "+r.asked.UTC().Format(time.TimeOnly)+" UTC"
		}
		return []*waitv1.Wait{w}
	case !serves:
		return []*waitv1.Wait{{
			Owner: wait.Worker, Reason: wait.WorkersMissing, Since: timestamppb.New(r.asked), Evidence: "agents ask for prompts, and get none before an inference worker is up",
			Fix: "see the workers with `rollout logs worker " + r.id + " WORKER`",
		}}
	}
	return []*waitv1.Wait{{
		Owner: wait.NATS, Reason: wait.NotWithWorkers, Since: timestamppb.New(r.asked), Evidence: "agents ask for prompts, and the work stream of NATS has none for them",
		Fix: "the scheduler issues lost groups again; if this lasts, check NATS with `rollout doctor`",
	}}
}

// sessionsOpen is the wait for the sessions that agents have not closed, with the delivery that has
// waited the longest; nil if no group is held.
func (r *agentRun) sessionsOpen() (*waitv1.Wait, *workItem) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.held) == 0 {
		return nil, nil
	}
	var oldest *workItem
	positions := make([]uint64, 0, len(r.held))
	for _, deliveries := range r.held {
		d := deliveries[0]
		if oldest == nil || cmp.Or(d.since.Compare(oldest.since), cmp.Compare(d.group.GetPosition(), oldest.group.GetPosition())) < 0 {
			oldest = d
		}
		positions = append(positions, d.group.GetPosition())
	}
	slices.Sort(positions)
	limit := r.config.GetLimits().GetAgentSeconds()
	groups := "1 prompt group"
	if len(positions) > 1 {
		groups = fmt.Sprintf("%d prompt groups", len(positions))
	}
	return &waitv1.Wait{
		Owner: wait.Agents, Reason: wait.SessionsOpen, Since: timestamppb.New(oldest.since), LimitSeconds: limit,
		Positions: positions[:min(len(positions), mostPositions)], Groups: uint32(len(positions)),
		Evidence: "agents have the sessions of " + groups + " and have not closed all of them",
		Fix:      fmt.Sprintf("see why the agents close no sessions; after %.0f s (limits.agent_seconds) a group is issued again", limit),
	}, oldest
}

// Of the sessions of a group, the number that is looked up, and the number that is named.
const (
	mostSessions = 16
	mostOpen     = 3
)

// unclosed names the open sessions of a delivery, with the time of the last request in each; first
// those whose last request was refused. What can't be read is left out.
func (a *agents) unclosed(ctx context.Context, d *workItem) (text string, refused bool) {
	var names, refusals []string
	open := 0
	for _, name := range d.sessions[:min(len(d.sessions), mostSessions)] {
		session, err := a.store.Session(ctx, name, 0)
		if err != nil || session.GetEnd() != nil {
			continue
		}
		open++
		if last, has := a.refused.of(name); has {
			refusals = append(refusals, name+" had its last request refused at "+last.at.UTC().Format(time.TimeOnly)+" UTC ("+last.text+")")
			continue
		}
		last := "has made no request"
		if segments := session.GetSegments(); len(segments) > 0 {
			last = "had its last answer at " + segments[len(segments)-1].GetTime().AsTime().UTC().Format(time.TimeOnly) + " UTC"
		}
		names = append(names, name+" "+last)
	}
	if open == 0 {
		return "", false
	}
	names = slices.Concat(refusals, names)
	if open > mostOpen {
		names = append(names[:mostOpen], fmt.Sprintf("%d more are open", open-mostOpen))
	}
	return fmt.Sprintf("; of prompt %d, %s", d.group.GetPosition(), strings.Join(names, ", ")), len(refusals) > 0
}
