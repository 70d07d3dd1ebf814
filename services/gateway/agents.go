package gateway

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// Work is where the prompt groups of runs come from; *bus.Bus is one.
type Work interface {
	Work(ctx context.Context, run string) (*bus.Consumer, error)
}

// agents issues prompt groups to agents outside of the runs, and makes trajectories of the sessions
// that they close.
//
// The store has the state: which sessions were issued for a group, how they ended, and whether the
// buffer has them. This process only keeps the deliveries of the groups that it issued: it extends
// them while sessions are open, and acknowledges them when all are settled. If it dies, the stream
// delivers the groups to another gateway, which finds their sessions in the store. Safe for
// concurrent use.
type agents struct {
	store  Store
	work   Work
	buffer bufferv1.BufferServiceClient
	runs   runv1.SchedulerServiceClient
	serves func(run string) bool // whether a worker of the run is up
	url    string                // of the HTTP listener
	log    *slog.Logger
	now    func() time.Time

	refused refusals

	mu    sync.Mutex
	known map[string]*agentRun // by run id
}

// agentRun is a run that agents sample for.
type agentRun struct {
	id     string
	config *configv1.RunConfig
	work   Work

	mu     sync.Mutex
	held   map[string][]*workItem // by prompt group; several if it was published again
	spare  []*Task                // issued to an agent that did not wait for them
	asking int                    // agents that ask for prompts now
	asked  time.Time              // when one began or ended to ask
}

// workItem is a prompt group on the run's work stream.
type workItem struct {
	*bus.Delivery
	group *runv1.PromptGroup
	since time.Time // when its sessions were issued

	sessions []string // by sample; set before it is held
}

func (d *workItem) id() string {
	return GroupID(&trajectoryv1.TrajectoryKey{RunId: d.group.GetRunId(), Epoch: d.group.GetEpoch(), Index: d.group.GetIndex(), Attempt: d.group.GetAttempt()})
}

// run finds a run by id or name. ErrNotExternal for runs that sample by themselves.
func (a *agents) run(ctx context.Context, name string) (*agentRun, error) {
	a.mu.Lock()
	known := a.known[name]
	a.mu.Unlock()
	if known != nil {
		return known, nil
	}
	found, err := a.status(ctx, name)
	if err != nil {
		return nil, err
	}
	return a.open(found, 0)
}

// status is the record of a run. ErrUnknownModel.
func (a *agents) status(ctx context.Context, name string) (*runv1.Run, error) {
	if a.runs == nil {
		return nil, ErrNotExternal.WithMessage("this gateway serves no runs")
	}
	if id.ServedModel(name) {
		return nil, ErrNotExternal.WithMessage("%s is a served model, which no run trains", name)
	}
	answer, err := a.runs.GetRun(ctx, &runv1.GetRunRequest{RunId: name})
	if rpcerr.Code(err) == codes.NotFound {
		return nil, ErrUnknownModel.With("model", name)
	}
	return answer.GetStatus().GetRun(), err
}

// open returns a run, which so many more agents ask for prompts.
func (a *agents) open(run *runv1.Run, asking int) (*agentRun, error) {
	config := run.GetPlan().GetConfig()
	if !algorithm.External(config) {
		return nil, ErrNotExternal.WithMessage("run %s samples by itself: its `environment.kind` is %q", run.GetRunId(), cmp.Or(config.GetEnvironment().GetKind(), "single_turn"))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	opened := a.known[run.GetRunId()]
	if opened == nil {
		opened = &agentRun{id: run.GetRunId(), config: config, work: a.work, held: map[string][]*workItem{}}
		a.known[opened.id] = opened
	}
	if asking > 0 {
		opened.ask(asking, a.now())
	}
	return opened, nil
}

// forget releases the memory of a run that has ended, unless it has groups or agents that ask. One
// of an agent that closes a session later is opened again.
func (a *agents) forget(run *agentRun) {
	a.mu.Lock()
	defer a.mu.Unlock()
	run.mu.Lock()
	defer run.mu.Unlock()
	if run.asking == 0 && len(run.held) == 0 && a.known[run.id] == run {
		delete(a.known, run.id)
	}
}

// deleted releases the memory of a run that was deleted.
func (a *agents) deleted(run string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.known, run)
}

// Next issues up to max groups of a run.
func (a *agents) Next(ctx context.Context, model string, most int, wait time.Duration) (*gatewayv1.NextPromptsResponse, error) {
	found, err := a.status(ctx, model)
	if err != nil {
		return nil, err
	}
	response := &gatewayv1.NextPromptsResponse{RunId: found.GetRunId()}
	run, err := a.open(found, 1)
	if err != nil {
		return nil, err
	}
	defer func() {
		run.ask(-1, a.now())
		if response.GetEnded() {
			a.forget(run)
		}
	}()
	if over(found.GetState()) {
		response.Ended = true
		return response, nil
	}
	if response.Sessions = run.takeSpare(); len(response.GetSessions()) > 0 {
		return response, nil
	}
	for until := a.now().Add(wait); ; {
		left := until.Sub(a.now())
		if !a.serves(run.id) { // the agent's requests would fail
			if left < fetchMin || ctx.Err() != nil {
				break
			}
			sleep(ctx, min(left, noStreamWait))
			continue
		}
		groups, err := run.fetch(ctx, max(1, most), max(fetchMin, min(left, fetchWait)))
		if err != nil && !errors.Is(err, bus.ErrNoStream) {
			return nil, err
		}
		for _, d := range groups {
			tasks, err := a.issue(ctx, run, d)
			if err != nil {
				return nil, err // the stream delivers the groups again
			}
			response.Sessions = append(response.Sessions, tasks...)
		}
		if len(response.GetSessions()) > 0 || left < fetchMin || ctx.Err() != nil {
			break
		}
		if err != nil { // the run has not begun, or has ended
			if found, err = a.status(ctx, run.id); err != nil || over(found.GetState()) {
				response.Ended = err == nil
				return response, err
			}
			sleep(ctx, min(left, noStreamWait))
		}
	}
	if ctx.Err() != nil {
		run.putBack(response.GetSessions())
		return nil, ctx.Err()
	}
	return response, nil
}

const (
	fetchMin     = 20 * time.Millisecond
	fetchWait    = 2 * time.Second        // how long one fetch waits
	noStreamWait = 200 * time.Millisecond // before the next look for workers, or a stream, of a run that starts
)

func over(state runv1.RunState) bool {
	return state == runv1.RunState_RUN_STATE_SUCCEEDED || state == runv1.RunState_RUN_STATE_FAILED || state == runv1.RunState_RUN_STATE_CANCELLED
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// issue creates the sessions of a delivered group and returns their tasks. If an earlier gateway
// has issued it, the sessions belong to an agent already: none are returned, and the trajectories
// of those that are settled are sent again, because the ledger misses some.
func (a *agents) issue(ctx context.Context, run *agentRun, d *workItem) ([]*Task, error) {
	tasks := run.tasks(d, a.now(), a.url)
	issued, err := a.store.Issue(ctx, run.id, tasks)
	if err != nil {
		return nil, err
	}
	for _, task := range issued {
		d.sessions = append(d.sessions, task.GetSessionId())
	}
	run.hold(d, a.now())
	if issued[0].GetSessionId() == tasks[0].GetSessionId() {
		return issued, nil
	}
	for _, task := range issued {
		session, err := a.store.Session(ctx, task.GetSessionId(), 0)
		if err != nil {
			return nil, err
		}
		if session.GetEnd() != nil {
			session.End.Accepted, session.End.Refused = false, nil
			if _, err := a.settle(ctx, task.GetSessionId(), session); err != nil {
				return nil, err
			}
		}
	}
	a.settled(ctx, d.id())
	return nil, nil
}

// fetch takes groups from the work stream.
func (r *agentRun) fetch(ctx context.Context, most int, wait time.Duration) ([]*workItem, error) {
	consumer, err := r.work.Work(ctx, r.id)
	if err != nil {
		return nil, err
	}
	fetched, err := consumer.Fetch(ctx, most, wait)
	if err != nil {
		return nil, err
	}
	var out []*workItem
	for _, f := range fetched {
		d := &workItem{Delivery: f, group: &runv1.PromptGroup{}}
		if err := f.Decode(d.group); err != nil {
			_ = f.Term("not a PromptGroup")
			continue
		}
		out = append(out, d)
	}
	return out, nil
}

// tasks are the samples of a group, each with a new session.
func (r *agentRun) tasks(d *workItem, now time.Time, url string) []*Task {
	g := d.group
	var row map[string]json.RawMessage
	_ = json.Unmarshal(g.GetRowJson(), &row) // the planner has read the rows
	out := make([]*Task, g.GetGroupSize())
	for sample := range out {
		name := "sess-" + id.New(now)
		task := &Task{
			SessionId: name, BaseUrl: url + "/sessions/" + name + "/v1", Model: cmp.Or(r.config.GetName(), r.id), GroupSize: g.GetGroupSize(),
			Key: &trajectoryv1.TrajectoryKey{RunId: r.id, Epoch: g.GetEpoch(), Index: g.GetIndex(), Attempt: g.GetAttempt(), Sample: uint32(sample)},
			Row: g.GetRow(), RowJson: g.GetRowJson(), PromptJson: row[r.config.GetData().GetPromptField()], MinWeightsVersion: g.GetMinVersion(),
			Deadline: timestamppb.New(now.Add(time.Duration(r.config.GetLimits().GetAgentSeconds() * float64(time.Second)))),
		}
		if sample < len(g.GetSeeds()) {
			task.Seed = g.GetSeeds()[sample]
		}
		out[sample] = task
	}
	return out
}

// ask counts an agent that asks for prompts, or no longer does.
func (r *agentRun) ask(agents int, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asking += agents
	r.asked = now
}

// hold keeps a delivery until its group is settled.
func (r *agentRun) hold(d *workItem, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	d.since = now
	r.held[d.id()] = append(r.held[d.id()], d)
}

func (r *agentRun) takeSpare() []*Task {
	r.mu.Lock()
	defer r.mu.Unlock()
	tasks := r.spare
	r.spare = nil
	return tasks
}

func (r *agentRun) putBack(tasks []*Task) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.spare = append(r.spare, tasks...)
}

// release returns the deliveries of a group and keeps them no longer.
func (r *agentRun) release(group string) []*workItem {
	r.mu.Lock()
	defer r.mu.Unlock()
	deliveries := r.held[group]
	delete(r.held, group)
	return deliveries
}

// groups returns the groups that are held, with their deliveries.
func (r *agentRun) groups() map[string][]*workItem {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make(map[string][]*workItem, len(r.held))
	for group, deliveries := range r.held {
		out[group] = deliveries
	}
	return out
}

// settled acknowledges a group if all of its sessions are settled.
func (a *agents) settled(ctx context.Context, group string) {
	n, err := a.store.Unsettled(ctx, group)
	if err != nil || n > 0 {
		return // the next tick tries again
	}
	for _, run := range a.all() {
		for _, d := range run.release(group) {
			_ = d.Ack() // if this is lost, the group is delivered again, and found settled
		}
	}
}

// all returns the runs that this gateway has issued groups of.
func (a *agents) all() []*agentRun {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]*agentRun, 0, len(a.known))
	for _, run := range a.known {
		out = append(out, run)
	}
	return out
}

// tick is how often deliveries are extended and due sessions are read. A quarter of the ack wait of
// the stream.
const tick = time.Second

// serve extends the deliveries of open groups, closes sessions at their deadlines, and settles
// sessions whose gateway died, until ctx ends. Groups that are still open then go to another
// gateway.
func (a *agents) serve(ctx context.Context) {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			for _, run := range a.all() {
				for group := range run.groups() {
					for _, d := range run.release(group) {
						_ = d.Nak(0) // if this is lost, the ack wait has the same effect
					}
				}
			}
			return
		case <-ticker.C:
		}
		for _, run := range a.all() {
			for group, deliveries := range run.groups() {
				for _, d := range deliveries {
					_ = d.Progress() // if this is lost, the group is delivered again
				}
				a.settled(ctx, group) // another gateway may have settled it
			}
		}
		a.sweep(ctx)
	}
}

const sweepBatch = 64

// sweep settles the sessions that are due: those that no one closed by their deadline, and those
// that a gateway closed and did not settle.
func (a *agents) sweep(ctx context.Context) {
	due, err := a.store.Due(ctx, a.now(), a.now().Add(settleRetry), sweepBatch)
	if err != nil {
		a.log.WarnContext(ctx, "reading the sessions that are due failed and is repeated", "error", err)
		return
	}
	for _, name := range due {
		if err := a.expire(ctx, name); err != nil && ctx.Err() == nil {
			a.log.WarnContext(ctx, "settling a session failed and is repeated", "session", name, "error", err)
		}
	}
}

// expire closes a session as lost unless it is closed, and settles it.
func (a *agents) expire(ctx context.Context, name string) error {
	session, err := a.store.Session(ctx, name, 0)
	if err != nil {
		return err
	}
	end := &End{
		Outcome: trajectoryv1.Outcome_OUTCOME_INFRA_FAILED, Reason: reasonAgentLost, Trajectories: 1, Key: session.GetTask().GetKey(), Time: timestamp(a.now()),
	}
	if session, err = a.store.Finish(ctx, name, end, a.now().Add(settleRetry)); err != nil {
		return err
	}
	_, err = a.settle(ctx, name, session)
	return err
}
