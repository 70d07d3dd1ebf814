package scheduler_test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// mesh is a ledger, a work stream, a controller, and workers behind one lock: each publish is
// sampled in a random order, and each full window is committed.
type mesh struct {
	t          *testing.T
	bus        *stream
	busAway    bool // no NATS server answers
	events     *events
	erased     *erased
	ledger     *ledger
	controller *controller

	mu        sync.Mutex
	changed   chan struct{}
	rng       *rand.Rand
	scheduler *generation

	queue     []*runv1.PromptGroup
	places    map[*runv1.PromptGroup]uint64 // in the work stream
	retrained string                        // digest of the newest weights, if the one that the step recorded was lost
	refused   []string                      // what a former scheduler asked for
	published []*runv1.PromptGroup
	ids       map[string]bool // message ids that the stream remembers
	streams   string          // "", "there", "deleted"

	duplicates int // samples of groups that were sampled already, or of another attempt
	config     *bufferv1.LedgerConfig

	leaders fencetest.Memory

	open     bool
	groups   map[uint64]*bufferv1.GroupRecord
	step     uint64
	stalled  string                                                    // why the buffer ingests nothing
	noRoom   string                                                    // what the controller lacks on the disk
	held     bool                                                      // workers do nothing
	outcome  func(g *runv1.PromptGroup) (reason string, failures bool) // "" is a good sample
	request  *learnerv1.StartRunRequest
	stopping bool            // by drain
	begins   learnerv1.Phase // of a controller that was just started; 0: LEASING
	progress *learnerv1.Progress
}

type (
	stream     struct{ m *mesh }
	ledger     struct{ m *mesh }
	controller struct{ m *mesh }
)

func newMesh(t *testing.T) *mesh {
	m := &mesh{t: t, changed: make(chan struct{}), rng: rand.New(rand.NewPCG(1, 2)), ids: map[string]bool{}, places: map[*runv1.PromptGroup]uint64{}, groups: map[uint64]*bufferv1.GroupRecord{}}
	m.bus, m.ledger, m.controller = &stream{m}, &ledger{m}, &controller{m}
	return m
}

// do changes the mesh, then lets workers and controller work.
func (m *mesh) do(change func()) {
	m.mu.Lock()
	change()
	m.settle()
	close(m.changed)
	m.changed = make(chan struct{})
	m.mu.Unlock()
}

// settle samples and commits until nothing more can happen.
func (m *mesh) settle() {
	for !m.held && (m.sample() || m.commit()) {
	}
}

// sample takes a random group of the queue whose weights exist.
func (m *mesh) sample() bool {
	for _, i := range m.rng.Perm(len(m.queue)) {
		g := m.queue[i]
		if g.GetMinVersion() > m.step || !m.open {
			continue
		}
		m.queue = slices.Delete(m.queue, i, i+1)
		r := m.groups[g.GetPosition()]
		if r == nil {
			r = &bufferv1.GroupRecord{Position: g.GetPosition(), Key: &bufferv1.GroupKey{Epoch: g.GetEpoch(), Index: g.GetIndex()}, State: bufferv1.GroupState_GROUP_STATE_OPEN}
			m.groups[g.GetPosition()] = r
		}
		if r.GetState() != bufferv1.GroupState_GROUP_STATE_OPEN || r.GetKey().GetAttempt() != g.GetAttempt() {
			m.duplicates++
			return true
		}
		r.State, r.Samples = bufferv1.GroupState_GROUP_STATE_READY, 2
		if m.outcome != nil {
			if reason, failure := m.outcome(g); reason != "" {
				r.State, r.Reason, r.Samples = bufferv1.GroupState_GROUP_STATE_DISSOLVED, reason, 0
				if failure {
					r.Failures++
				}
			}
		}
		return true
	}
	return false
}

// commit consumes the window of the next step, if the controller is active and the window is
// complete.
func (m *mesh) commit() bool {
	p := m.progress
	if p == nil || p.GetPhase() > learnerv1.Phase_PHASE_SNAPSHOTTING || m.stopping {
		return false
	}
	if total := m.request.GetPlan().GetConfig().GetTrain().GetSteps(); m.step >= total {
		m.report(learnerv1.Phase_PHASE_FINISHED, p.GetWeights())
		m.complete(runv1.RunState_RUN_STATE_SUCCEEDED, "", "")
		return true
	}
	from := m.config.GetFirstPosition() + (m.step-m.config.GetFirstStep())*uint64(m.config.GetGroupsPerStep())
	for pos := from; pos < from+uint64(m.config.GetGroupsPerStep()); pos++ {
		if s := m.groups[pos].GetState(); s != bufferv1.GroupState_GROUP_STATE_READY && s != bufferv1.GroupState_GROUP_STATE_EXCLUDED {
			return false
		}
	}
	m.step++
	for pos := from; pos < from+uint64(m.config.GetGroupsPerStep()); pos++ {
		if g := m.groups[pos]; g.GetState() == bufferv1.GroupState_GROUP_STATE_READY {
			g.State, g.Step = bufferv1.GroupState_GROUP_STATE_CONSUMED, m.step
		}
	}
	folder := filepath.Join(m.request.GetRunDirectory(), "weights", fmt.Sprintf("v%06d", m.step))
	m.report(learnerv1.Phase_PHASE_LEASING, &weightsv1.WeightsManifest{Version: m.step, Directory: folder, Digest: fmt.Sprint("digest-", m.step)})
	return true
}

// report replaces the progress. Messages that were returned are never changed.
func (m *mesh) report(phase learnerv1.Phase, weights *weightsv1.WeightsManifest) {
	m.progress = &learnerv1.Progress{
		RunId: m.request.GetRunId(), Phase: phase, Step: m.step, TotalSteps: m.request.GetPlan().GetConfig().GetTrain().GetSteps(), Weights: weights,
	}
	if m.noRoom != "" {
		m.progress.Wait = &waitv1.Wait{Owner: "user", Reason: "DISK_FULL", Evidence: "space on the disk: " + m.noRoom, Fix: "free some"}
	}
}

func (m *mesh) complete(state runv1.RunState, reason, message string) {
	g, req := m.scheduler, &runv1.CompleteRunRequest{
		RunId: m.request.GetRunId(), Fence: fencetest.Controller(m.request.GetFence().GetIncarnation(), 1), State: state, Reason: reason, Message: message,
	}
	go func() {
		if _, err := g.internal.CompleteRun(context.Background(), req); err != nil {
			m.t.Logf("CompleteRun: %v", err)
		}
	}()
}

func (m *mesh) read(look func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	look()
}

// until waits for a condition.
func (m *mesh) until(what string, is func() bool) {
	m.t.Helper()
	for so := false; !so; {
		var changed chan struct{}
		m.read(func() { so, changed = is(), m.changed })
		if so {
			return
		}
		select {
		case <-changed:
		case <-time.After(2 * time.Minute):
			m.t.Fatalf("waited for %s", what)
		}
	}
}

// ---- the work stream ----------------------------------------------------------------------------

func (s *stream) EnsureRun(context.Context, string) error {
	s.m.do(func() { s.m.streams = "there" })
	return nil
}

func (s *stream) DeleteRun(context.Context, string) error {
	s.m.do(func() { s.m.streams, s.m.queue = "deleted", nil })
	return nil
}

func (s *stream) Runs(context.Context) (runs []string, err error) {
	s.m.read(func() {
		if s.m.streams == "there" && s.m.request != nil {
			runs = []string{s.m.request.GetRunId()}
		}
	})
	return runs, nil
}

func (s *stream) WorkMark(context.Context, string) (mark uint64, err error) {
	s.m.read(func() { mark = uint64(len(s.m.places)) + 1 })
	return mark, nil
}

func (s *stream) PurgeWork(_ context.Context, _ string, before uint64) error {
	s.m.do(func() {
		s.m.queue = slices.DeleteFunc(s.m.queue, func(g *runv1.PromptGroup) bool { return s.m.places[g] < before })
	})
	return nil
}

func (s *stream) InspectRun(context.Context, string) (*bus.RunState, error) {
	state := &bus.RunState{Work: map[bus.WorkItem]struct{}{}}
	s.m.read(func() {
		if s.m.streams != "there" {
			state.Missing = []string{"stream WORK"}
		}
		for _, g := range s.m.queue {
			state.Work[bus.WorkItem{Position: g.GetPosition(), Attempt: g.GetAttempt()}] = struct{}{}
		}
	})
	return state, nil
}

func (s *stream) EventsStored(context.Context) error {
	s.m.events.mu.Lock()
	defer s.m.events.mu.Unlock()
	s.m.events.stored = s.m.events.flushed
	return nil
}

func (s *stream) Servers() []string { return []string{"127.0.0.1:4222"} }

func (s *stream) Healthy() bool {
	up := true
	s.m.do(func() { up = !s.m.busAway })
	return up
}

func (s *stream) Publish(_ context.Context, messages ...bus.Message) error {
	s.m.do(func() {
		for _, message := range messages {
			g := message.Body.(*runv1.PromptGroup)
			if s.m.ids[message.ID] {
				continue
			}
			s.m.ids[message.ID] = true
			s.m.published = append(s.m.published, g)
			s.m.queue = append(s.m.queue, g)
			s.m.places[g] = uint64(len(s.m.places)) + 1
		}
		if n, bound := s.m.outstanding(), s.m.bound(); n > bound {
			s.m.t.Errorf("%d groups are outstanding, the bound is %d", n, bound)
		}
	})
	return nil
}

// outstanding counts the positions that were published and are not consumed or excluded.
func (m *mesh) outstanding() (n uint64) {
	seen := map[uint64]bool{}
	for _, g := range m.published {
		s := m.groups[g.GetPosition()].GetState()
		if !seen[g.GetPosition()] && s != bufferv1.GroupState_GROUP_STATE_CONSUMED && s != bufferv1.GroupState_GROUP_STATE_EXCLUDED {
			n++
		}
		seen[g.GetPosition()] = true
	}
	return n
}

func (m *mesh) bound() uint64 {
	return uint64(m.config.GetMaxStaleness()+1) * uint64(m.config.GetGroupsPerStep())
}

// ---- the controller -----------------------------------------------------------------------------

func (c *controller) StartRun(_ context.Context, in *learnerv1.StartRunRequest, _ ...grpc.CallOption) (*learnerv1.StartRunResponse, error) {
	if err := c.m.admit("StartRun", in); err != nil {
		return nil, err
	}
	c.m.do(func() {
		if c.m.request.GetFence().GetIncarnation() == in.GetFence().GetIncarnation() {
			return
		}
		c.m.request, c.m.stopping = in, false
		c.m.report(cmp.Or(c.m.begins, learnerv1.Phase_PHASE_LEASING), nil)
	})
	return &learnerv1.StartRunResponse{}, nil
}

func (c *controller) StopRun(_ context.Context, in *learnerv1.StopRunRequest, _ ...grpc.CallOption) (*learnerv1.StopRunResponse, error) {
	if err := c.m.admit("StopRun", in); err != nil {
		return nil, err
	}
	var p *learnerv1.Progress
	c.m.do(func() {
		c.m.stopping = true
		if c.m.progress.GetPhase() <= learnerv1.Phase_PHASE_SNAPSHOTTING && c.m.progress != nil {
			c.m.report(learnerv1.Phase_PHASE_STOPPED, c.m.progress.GetWeights())
		}
		p = c.m.progress
	})
	return &learnerv1.StopRunResponse{Progress: p}, nil
}

func (c *controller) GetProgress(context.Context, *learnerv1.GetProgressRequest, ...grpc.CallOption) (*learnerv1.GetProgressResponse, error) {
	var p *learnerv1.Progress
	c.m.read(func() { p = c.m.progress })
	return &learnerv1.GetProgressResponse{Progress: p}, nil
}

func (c *controller) WatchProgress(ctx context.Context, _ *learnerv1.WatchProgressRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[learnerv1.WatchProgressResponse], error) {
	return &follow[learnerv1.WatchProgressResponse]{ctx: ctx, m: c.m, next: func() (*learnerv1.WatchProgressResponse, bool) {
		return &learnerv1.WatchProgressResponse{Progress: c.m.progress}, c.m.progress.GetPhase() > learnerv1.Phase_PHASE_RECOVERING
	}}, nil
}

// follow is a stream that sends the message of next, at once and after each change, until next
// returns the last one.
type follow[T any] struct {
	grpc.ClientStream
	ctx   context.Context
	m     *mesh
	next  func() (message *T, last bool)
	after chan struct{}
	ended bool
}

func (f *follow[T]) Recv() (*T, error) {
	if f.ended {
		return nil, io.EOF
	}
	if f.after != nil {
		select {
		case <-f.after:
		case <-f.ctx.Done():
			return nil, status.FromContextError(f.ctx.Err()).Err()
		}
	}
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	f.after = f.m.changed
	var message *T
	message, f.ended = f.next()
	return message, nil
}

func (l *ledger) OpenLedger(_ context.Context, in *bufferv1.OpenLedgerRequest, _ ...grpc.CallOption) (*bufferv1.OpenLedgerResponse, error) {
	var state *bufferv1.LedgerState
	if err := l.m.admit("OpenLedger", in); err != nil {
		return nil, err
	}
	l.m.do(func() {
		if l.m.config != nil && !proto.Equal(l.m.config, in.GetConfig()) {
			l.m.t.Errorf("the ledger was opened with %v, then with %v", l.m.config, in.GetConfig())
		}
		if l.m.config == nil {
			l.m.config, l.m.step = in.GetConfig(), in.GetConfig().GetFirstStep()
		}
		l.m.open = true
	})
	l.m.read(func() { state = l.m.state() })
	return &bufferv1.OpenLedgerResponse{State: state}, nil
}

// admit refuses what a former scheduler asks for, as buffer and controller do.
func (m *mesh) admit(what string, in interface {
	GetRunId() string
	GetFence() *fencev1.Fence
}) error {
	err := m.leaders.Admit(in.GetRunId(), in.GetFence())
	if err != nil {
		m.read(func() { m.refused = append(m.refused, what) })
	}
	return err
}

func (l *ledger) CloseLedger(_ context.Context, in *bufferv1.CloseLedgerRequest, _ ...grpc.CallOption) (*bufferv1.CloseLedgerResponse, error) {
	if err := l.m.admit("CloseLedger", in); err != nil {
		return nil, err
	}
	l.m.do(func() { l.m.open = false })
	return &bufferv1.CloseLedgerResponse{}, nil
}

func (m *mesh) state() *bufferv1.LedgerState {
	s := &bufferv1.LedgerState{Step: m.step}
	if m.stalled != "" {
		s.Stall = &waitv1.Wait{Owner: "user", Reason: m.stalled, Evidence: m.stalled, Fix: "free some"}
	}
	if m.step > 0 {
		s.WeightsVersion, s.WeightsDigest = m.step, cmp.Or(m.retrained, fmt.Sprint("digest-", m.step))
	}
	for _, p := range m.positions() {
		switch g := m.groups[p]; g.GetState() {
		case bufferv1.GroupState_GROUP_STATE_OPEN:
			s.Open++
		case bufferv1.GroupState_GROUP_STATE_READY:
			s.Ready++
		case bufferv1.GroupState_GROUP_STATE_CONSUMED:
			s.Consumed++
		case bufferv1.GroupState_GROUP_STATE_EXCLUDED:
			s.Excluded++
		case bufferv1.GroupState_GROUP_STATE_DISSOLVED:
			s.Dissolved = append(s.Dissolved, proto.CloneOf(g))
		}
	}
	return s
}

func (m *mesh) positions() (out []uint64) {
	for p := range m.groups {
		out = append(out, p)
	}
	slices.Sort(out)
	return out
}

func (l *ledger) WatchLedger(ctx context.Context, _ *bufferv1.WatchLedgerRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[bufferv1.WatchLedgerResponse], error) {
	return &follow[bufferv1.WatchLedgerResponse]{ctx: ctx, m: l.m, next: func() (*bufferv1.WatchLedgerResponse, bool) {
		return &bufferv1.WatchLedgerResponse{State: l.m.state()}, false
	}}, nil
}

func (l *ledger) ListIncompleteGroups(_ context.Context, in *bufferv1.ListIncompleteGroupsRequest, _ ...grpc.CallOption) (*bufferv1.ListIncompleteGroupsResponse, error) {
	out := &bufferv1.ListIncompleteGroupsResponse{}
	l.m.read(func() {
		for p := range l.m.groups {
			out.EndPosition = max(out.GetEndPosition(), p+1)
		}
		for p := in.GetFromPosition(); p < max(out.GetEndPosition(), in.GetEndPosition()); p++ { // they fit in a page
			if g := l.m.groups[p]; g == nil {
				out.Groups = append(out.Groups, &bufferv1.GroupRecord{Position: p})
			} else if g.GetState() == bufferv1.GroupState_GROUP_STATE_OPEN {
				out.Groups = append(out.Groups, proto.CloneOf(g))
			}
		}
	})
	return out, nil
}

func (l *ledger) ExcludeGroups(_ context.Context, in *bufferv1.ExcludeGroupsRequest, _ ...grpc.CallOption) (*bufferv1.ExcludeGroupsResponse, error) {
	l.m.do(func() {
		for _, k := range in.GetGroups() {
			g := l.m.groups[uint64(k.GetEpoch())*rows+k.GetIndex()]
			g.State, g.Reason = bufferv1.GroupState_GROUP_STATE_EXCLUDED, in.GetReason()
		}
	})
	return &bufferv1.ExcludeGroupsResponse{}, nil
}

func (l *ledger) ReissueGroups(_ context.Context, in *bufferv1.ReissueGroupsRequest, _ ...grpc.CallOption) (*bufferv1.ReissueGroupsResponse, error) {
	var err error
	l.m.do(func() {
		for _, k := range in.GetGroups() {
			g := l.m.groups[uint64(k.GetEpoch())*rows+k.GetIndex()]
			if g.GetKey().GetAttempt() >= k.GetAttempt() {
				continue
			}
			if g.GetState() != bufferv1.GroupState_GROUP_STATE_DISSOLVED {
				err = status.Error(codes.FailedPrecondition, "not dissolved")
				return
			}
			g.Key, g.State = k, bufferv1.GroupState_GROUP_STATE_OPEN
		}
	})
	return &bufferv1.ReissueGroupsResponse{}, err
}
