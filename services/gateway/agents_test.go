package gateway_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/gateway"
	"github.com/rollout-rl/rollout/services/gateway/sqlstore"
)

// buffer is a ledger that keeps the first trajectory of each key.
type buffer struct {
	bufferv1.BufferServiceClient
	mu     sync.Mutex
	puts   int
	have   map[string]*trajectoryv1.Trajectory // by key
	failed []string                            // reasons of failed samples
	down   bool
	closed bool // the run's ledger is closed
}

func (b *buffer) PutTrajectories(_ context.Context, in *bufferv1.PutTrajectoriesRequest, _ ...grpc.CallOption) (*bufferv1.PutTrajectoriesResponse, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.down {
		return nil, rpcerr.New(codes.Unavailable, "INGEST_FAILED", "down")
	}
	if b.closed {
		return nil, rpcerr.New(codes.FailedPrecondition, "LEDGER_CLOSED", "closed")
	}
	b.puts++
	result := &bufferv1.PutResult{}
	for _, e := range in.GetPuts()[0].GetTrajectories() {
		t := &trajectoryv1.Trajectory{}
		if err := proto.Unmarshal(e.GetPayload(), t); err != nil {
			return nil, err
		}
		key := e.GetHeader().GetKey().String()
		switch {
		case e.GetHeader().GetOutcome() == trajectoryv1.Outcome_OUTCOME_INFRA_FAILED:
			b.failed = append(b.failed, e.GetHeader().GetReason())
			result.Failed++
		case b.have[key] != nil:
			result.Duplicates++
		default:
			b.have[key] = t
			result.Accepted++
		}
	}
	return &bufferv1.PutTrajectoriesResponse{Results: []*bufferv1.PutResult{result}}, nil
}

func (b *buffer) set(down bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.down = down
}

func (b *buffer) samples() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.have)
}

func (b *buffer) failures() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.failed)
}

// scheduler knows one run.
type scheduler struct {
	runv1.SchedulerServiceClient
	mu  sync.Mutex
	run *runv1.Run
}

func (s *scheduler) GetRun(_ context.Context, in *runv1.GetRunRequest, _ ...grpc.CallOption) (*runv1.GetRunResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if in.GetRunId() != s.run.GetRunId() && in.GetRunId() != s.run.GetName() {
		return nil, rpcerr.New(codes.NotFound, "RUN_NOT_FOUND", "no such run")
	}
	return &runv1.GetRunResponse{Status: &runv1.RunStatus{Run: proto.CloneOf(s.run)}}, nil
}

func (s *scheduler) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.run.State = runv1.RunState_RUN_STATE_SUCCEEDED
}

// agency is a run whose prompts go to agents, with its buffer and its work stream.
type agency struct {
	*testing.T
	worker    *fakeWorker
	buffer    *buffer
	scheduler *scheduler
	bus       *bus.Bus
	store     *sqlstore.Store
	gateway   *gateway.Server
	stop      func() <-chan error // ends the gateway
}

const agencyRun = "run-tiny"

// setup starts a gateway. edit changes the configuration of the run.
func setup(t *testing.T, edit func(*configv1.RunConfig)) *agency {
	t.Helper()
	nats, err := bus.StartEmbedded(t.TempDir(), bus.EmbeddedOptions{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nats.Stop)
	b, err := bus.Connect(t.Context(), bus.Options{URL: nats.URL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	if err := b.EnsureRun(t.Context(), agencyRun); err != nil {
		t.Fatal(err)
	}
	store, err := sqlstore.Open(t.Context(), sqldb.Files(t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	config := &configv1.RunConfig{
		Name: proto.String("tiny"), Environment: &configv1.EnvironmentConfig{Kind: proto.String("external")},
		Sampling: &configv1.SamplingConfig{GroupSize: proto.Uint32(2)}, Data: &configv1.DataConfig{PromptField: proto.String("prompt")},
		Limits: &configv1.LimitsConfig{AgentSeconds: proto.Float64(600)},
	}
	edit(config)
	a := &agency{
		T: t, worker: &fakeWorker{model: "tiny"}, buffer: &buffer{have: map[string]*trajectoryv1.Trajectory{}}, bus: b, store: store,
		scheduler: &scheduler{run: &runv1.Run{RunId: agencyRun, Name: "tiny", State: runv1.RunState_RUN_STATE_RUNNING, Plan: &planv1.Plan{Config: config}}},
	}
	a.worker.generate = func(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
		return stream.Send(&inferencev1.GenerateResponse{
			Text: "c", TokenIds: []uint32{3}, Logprobs: []float32{-1}, RawLogprobs: []float32{-1}, FinishReason: "stop", PromptTokenIds: req.GetPrompts()[0].GetTokens().GetIds(),
			VersionSpans: []*trajectoryv1.VersionSpan{{Version: 4, End: 1, Digest: "blake3-aa"}},
		})
	}
	a.start()
	return a
}

func (a *agency) start() {
	a.Helper()
	unused := &ledger{sessions: map[string]*gateway.Session{}, expired: make(chan time.Time, 1)}
	a.gateway, _, a.stop = runWith(a.T, gateway.Config{}, unused, func(d *gateway.Deps) {
		d.Store, d.Work, d.Buffer, d.Runs, d.Now = a.store, a.bus, a.buffer, a.scheduler, time.Now
	}, a.worker)
}

func (a *agency) publish(index uint64) {
	a.Helper()
	group := &runv1.PromptGroup{
		RunId: agencyRun, Index: index, Row: 7, RowJson: []byte(`{"prompt":"guess","answer":42}`), GroupSize: a.scheduler.run.GetPlan().GetConfig().GetSampling().GetGroupSize(), Seeds: []uint64{5, 6},
	}
	if err := a.bus.Publish(a.Context(), bus.Message{Subject: names.WorkSubject(agencyRun), Body: group}); err != nil {
		a.Fatal(err)
	}
}

func (a *agency) next() []*gateway.Task {
	a.Helper()
	got, err := a.gateway.NextPrompts(a.Context(), &gatewayv1.NextPromptsRequest{Model: "tiny", MaxGroups: 4, WaitSeconds: 10})
	if err != nil {
		a.Fatal(err)
	}
	return got.GetSessions()
}

// play samples two turns in a session.
func (a *agency) play(task *gateway.Task) {
	a.Helper()
	call(a.T, a.gateway, task.GetSessionId(), tokens(1, 2))
	call(a.T, a.gateway, task.GetSessionId(), tokens(1, 2, 3, 9))
}

func (a *agency) close(task *gateway.Task, reward float64) (*gateway.End, error) {
	got, err := a.gateway.CloseSession(a.Context(), &gatewayv1.CloseSessionRequest{SessionId: task.GetSessionId(), Reward: reward, RunId: agencyRun})
	return got.GetEnd(), err
}

// acknowledged waits until the work stream has no group.
func (a *agency) acknowledged() {
	a.Helper()
	work, err := a.bus.Work(a.Context(), agencyRun)
	if err != nil {
		a.Fatal(err)
	}
	a.await("the group is not acknowledged", func() bool {
		depth, err := work.Depth(a.Context())
		return err == nil && depth.Waiting+depth.Delivered == 0
	})
}

func (a *agency) await(problem string, done func() bool) {
	a.Helper()
	tick, late := time.NewTicker(20*time.Millisecond), time.After(30*time.Second)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-late:
			a.Fatal(problem)
		}
	}
}

func TestAnAgentTrainsARun(t *testing.T) {
	t.Parallel()
	a := setup(t, func(*configv1.RunConfig) {})
	a.publish(3)
	tasks := a.next()
	if len(tasks) != 2 || tasks[1].GetKey().GetSample() != 1 || tasks[1].GetSeed() != 6 || string(tasks[0].GetPromptJson()) != `"guess"` || tasks[0].GetModel() != "tiny" ||
		!strings.HasSuffix(tasks[0].GetBaseUrl(), "/sessions/"+tasks[0].GetSessionId()+"/v1") {
		t.Fatalf("got %v", tasks)
	}
	var row struct{ Answer int }
	if err := json.Unmarshal(tasks[0].GetRowJson(), &row); err != nil || row.Answer != 42 {
		t.Errorf("the row is %s, %v", tasks[0].GetRowJson(), err)
	}
	for i, task := range tasks {
		a.play(task)
		end, err := a.close(task, float64(i))
		if err != nil || !end.GetAccepted() || end.GetOutcome() != trajectoryv1.Outcome_OUTCOME_COMPLETED || end.GetTrajectories() != 1 {
			t.Fatalf("got %v, %v", end, err)
		}
		if again, err := a.close(task, float64(i)); err != nil || !proto.Equal(again, end) {
			t.Errorf("closed again: %v, %v", again, err)
		}
		if _, err := a.close(task, 9); !errors.Is(err, gateway.ErrSessionClosed) {
			t.Errorf("closed with another reward: %v", err)
		}
	}
	a.acknowledged()
	if a.buffer.samples() != 2 || a.buffer.puts != 2 {
		t.Errorf("the buffer has %d samples of %d puts", a.buffer.samples(), a.buffer.puts)
	}
	got := a.buffer.have[tasks[1].GetKey().String()]
	if got.GetPromptTokens() != 2 || !slices.Equal(got.GetLossMask(), []byte{0, 0, 1, 0, 1}) || got.GetReward() != 1 || len(got.GetVersionSpans()) != 1 ||
		got.GetVersionSpans()[0].GetEnd() != 3 || got.GetVersionSpans()[0].GetDigest() != "blake3-aa" || len(got.GetRawLogprobs()) != 20 {
		t.Errorf("the trajectory is %v", got)
	}
	stream := &collected{ctx: t.Context()}
	err := a.gateway.Complete(&gatewayv1.CompleteRequest{Model: "tiny", SessionId: tasks[0].GetSessionId(), Params: &inferencev1.SamplingParams{}, Prompts: []*inferencev1.Prompt{tokens(1)}}, stream)
	if !errors.Is(err, gateway.ErrSessionClosed) {
		t.Errorf("a turn after the end: %v", err)
	}
	a.scheduler.end()
	if got, err := a.gateway.NextPrompts(t.Context(), &gatewayv1.NextPromptsRequest{Model: "tiny"}); err != nil || !got.GetEnded() {
		t.Errorf("after the end: %v, %v", got, err)
	}
}

// The scheduler closes the ledger before it records the end of the run. An agent that closes its
// session then repeats the call, and learns that the run has ended.
func TestASessionIsClosedAfterTheEndOfItsRun(t *testing.T) {
	t.Parallel()
	a := setup(t, func(*configv1.RunConfig) {})
	a.publish(3)
	task := a.next()[0]
	a.play(task)
	a.buffer.mu.Lock()
	a.buffer.closed = true
	a.buffer.mu.Unlock()
	if _, err := a.close(task, 1); !errors.Is(err, gateway.ErrRunAway) || rpcerr.Code(err) != codes.Unavailable {
		t.Fatalf("before the end is recorded: %v", err)
	}
	a.scheduler.end()
	for range 2 {
		if end, err := a.close(task, 1); err != nil || end.GetAccepted() || !slices.Equal(end.GetRefused(), []string{"RUN_ENDED"}) {
			t.Fatalf("after it is recorded: %v, %v", end, err)
		}
	}
}

// The text of a sample has the turns of its conversation, for people.
func TestTheTextOfAConversation(t *testing.T) {
	t.Parallel()
	a := setup(t, func(*configv1.RunConfig) {})
	a.worker.generate = newChatter().turn
	a.publish(3)
	task := a.next()[0]
	call(t, a.gateway, task.GetSessionId(), chat())
	call(t, a.gateway, task.GetSessionId(), chat())
	if _, err := a.close(task, 1); err != nil {
		t.Fatal(err)
	}
	got := a.buffer.have[task.GetKey().String()]
	if got.GetPrompt() != "\n[user] hi\n" || got.GetCompletion() != "three\n[user] hi\n[assistant] three" {
		t.Errorf("got %q, %q", got.GetPrompt(), got.GetCompletion())
	}
	var turns []string
	for at, turn := range got.GetTurns() {
		turns = append(turns, fmt.Sprintf("%t %d %d %s", turn.GetSampled(), turn.GetStart(), turn.GetEnd(), strings.Join(turn.GetMessages(), ", ")+turn.GetText()))
		if at > 0 && turn.GetStart() != got.GetTurns()[at-1].GetEnd() {
			t.Errorf("turn %d begins at %d", at, turn.GetStart())
		}
	}
	if len(turns) != 4 || got.GetTurns()[0].GetEnd() != got.GetPromptTokens() || int(got.GetTurns()[3].GetEnd())*4 != len(got.GetTokenIds()) ||
		!got.GetTurns()[1].GetSampled() || got.GetTurns()[2].GetSampled() || !strings.Contains(turns[2], `"user"`) {
		t.Errorf("the turns are %q", turns)
	}
}

// A token that two leaves share is trained by the first of them.
func TestForksTrainTheirPrefixOnce(t *testing.T) {
	t.Parallel()
	a := setup(t, func(*configv1.RunConfig) {})
	a.publish(3)
	task := a.next()[0]
	a.play(task)
	call(t, a.gateway, task.GetSessionId(), tokens(1, 2, 3, 8)) // the client changed its second message
	end, err := a.close(task, 1)
	if err != nil || end.GetTrajectories() != 2 || !end.GetAccepted() {
		t.Fatalf("got %v, %v", end, err)
	}
	for part, want := range [][]byte{{0, 0, 1, 0, 1}, {0, 0, 0, 0, 1}} {
		key := proto.CloneOf(task.GetKey())
		key.Part = uint32(part)
		if got := a.buffer.have[key.String()]; !slices.Equal(got.GetLossMask(), want) {
			t.Errorf("part %d: %v", part, got)
		}
	}
}

// The gateway dies after a session was closed and before its group is acknowledged, and the buffer
// may have the sample or not. The next gateway sends it, and each sample is there once.
func TestTheGatewayDiesBetweenCloseAndAcknowledgement(t *testing.T) {
	t.Parallel()
	a := setup(t, func(*configv1.RunConfig) {})
	a.publish(3)
	tasks := a.next()
	for _, task := range tasks {
		a.play(task)
	}
	if _, err := a.close(tasks[0], 1); err != nil {
		t.Fatal(err)
	}
	a.buffer.set(true)
	if _, err := a.close(tasks[1], 0); rpcerr.Code(err) != codes.Unavailable {
		t.Fatalf("got %v", err)
	}
	if err := <-a.stop(); err != nil {
		t.Fatal(err)
	}
	a.buffer.set(false)
	a.start()
	a.await("the sample was lost", func() bool { return a.buffer.samples() == 2 })
	if end, err := a.close(tasks[1], 0); err != nil || !end.GetAccepted() { // the agent repeats its call
		t.Errorf("got %v, %v", end, err)
	}
	if got := a.nextNone(); len(got) != 0 {
		t.Errorf("the group was issued again: %v", got)
	}
	a.acknowledged()
	if a.buffer.samples() != 2 {
		t.Errorf("the buffer has %d samples", a.buffer.samples())
	}
}

// nextNone asks for groups when there is none that an agent does not have.
func (a *agency) nextNone() []*gateway.Task {
	a.Helper()
	got, err := a.gateway.NextPrompts(a.Context(), &gatewayv1.NextPromptsRequest{Model: agencyRun, MaxGroups: 4, WaitSeconds: 0.5})
	if err != nil {
		a.Fatal(err)
	}
	return got.GetSessions()
}

// The group of an agent that goes on after the gateway was restarted stays with it.
func TestAnAgentKeepsItsGroupOverARestart(t *testing.T) {
	t.Parallel()
	a := setup(t, func(*configv1.RunConfig) {})
	a.publish(3)
	tasks := a.next()
	if err := <-a.stop(); err != nil {
		t.Fatal(err)
	}
	a.start()
	if got := a.nextNone(); len(got) != 0 {
		t.Errorf("the group was issued again: %v", got)
	}
	for _, task := range tasks {
		a.play(task)
		if end, err := a.close(task, 1); err != nil || !end.GetAccepted() {
			t.Errorf("got %v, %v", end, err)
		}
	}
	a.acknowledged()
}

func TestALostAgentFailsItsSamples(t *testing.T) {
	t.Parallel()
	a := setup(t, func(c *configv1.RunConfig) { c.Limits.AgentSeconds = proto.Float64(0.5) })
	a.publish(3)
	task := a.next()[0]
	a.play(task)
	a.await("the session stays open", func() bool { return len(a.buffer.failures()) == 2 })
	if got := a.buffer.failures(); !slices.Equal(got, []string{"AGENT_LOST", "AGENT_LOST"}) || a.buffer.samples() != 0 {
		t.Errorf("got %v", got)
	}
	a.acknowledged()
	if _, err := a.close(task, 1); !errors.Is(err, gateway.ErrSessionClosed) {
		t.Errorf("a close after the deadline: %v", err)
	}
}

// A session without a group is a group of one, in runs that compare no groups.
func TestASessionWithoutAGroup(t *testing.T) {
	t.Parallel()
	compared := setup(t, func(*configv1.RunConfig) {})
	call(t, compared.gateway, "sess-free", tokens(1, 2))
	if _, err := compared.close(&gateway.Task{SessionId: "sess-free"}, 1); !errors.Is(err, gateway.ErrSessionGroup) {
		t.Errorf("got %v", err)
	}
	a := setup(t, func(c *configv1.RunConfig) { c.Sampling.GroupSize = proto.Uint32(1) })
	a.publish(3)
	call(t, a.gateway, "sess-free", tokens(1, 2))
	end, err := a.close(&gateway.Task{SessionId: "sess-free"}, 1)
	if err != nil || !end.GetAccepted() || end.GetKey().GetIndex() != 3 {
		t.Fatalf("got %v, %v", end, err)
	}
	a.acknowledged()
}

func TestBadEndsOfSessions(t *testing.T) {
	t.Parallel()
	a := setup(t, func(*configv1.RunConfig) {})
	a.publish(3)
	tasks := a.next()
	a.play(tasks[1])
	infra := trajectoryv1.Outcome_OUTCOME_INFRA_FAILED
	for _, c := range []struct {
		name   string
		req    *gatewayv1.CloseSessionRequest
		reason string
	}{
		{"unknown session", &gatewayv1.CloseSessionRequest{SessionId: "sess-x"}, gateway.ReasonSession},
		{"other run", &gatewayv1.CloseSessionRequest{SessionId: tasks[1].GetSessionId(), RunId: "run-other"}, gateway.ReasonSessionRun},
		{"nothing sampled", &gatewayv1.CloseSessionRequest{SessionId: tasks[0].GetSessionId(), Reward: 1}, gateway.ReasonEmpty},
		{"reason of a success", &gatewayv1.CloseSessionRequest{SessionId: tasks[1].GetSessionId(), Reason: "TOOL_TIMEOUT"}, rpcerr.ReasonInvalidRequest},
		{"failure", &gatewayv1.CloseSessionRequest{SessionId: tasks[0].GetSessionId(), Outcome: infra, Reason: "TOOL_TIMEOUT", Reward: 1}, ""},
	} {
		got, err := a.gateway.CloseSession(t.Context(), c.req)
		if rpcerr.Reason(err) != c.reason {
			t.Errorf("%s: %v, %v", c.name, got, err)
		}
		if c.reason == "" && (got.GetEnd().GetReward() != 0 || got.GetEnd().GetReason() != "TOOL_TIMEOUT") {
			t.Errorf("%s: %v", c.name, got)
		}
	}
	if got := a.buffer.failures(); !slices.Equal(got, []string{"TOOL_TIMEOUT"}) {
		t.Errorf("got %v", got)
	}
	if _, err := a.gateway.NextPrompts(t.Context(), &gatewayv1.NextPromptsRequest{Model: "no-run"}); rpcerr.Reason(err) != gateway.ReasonUnknownModel {
		t.Errorf("got %v", err)
	}
	own := setup(t, func(c *configv1.RunConfig) { c.Environment.Kind = proto.String("single_turn") })
	if _, err := own.gateway.NextPrompts(t.Context(), &gatewayv1.NextPromptsRequest{Model: "tiny"}); !errors.Is(err, gateway.ErrNotExternal) {
		t.Errorf("got %v", err)
	}
}

// An agent that knows HTTP alone takes prompts, uses the OpenAI API at the URL of a session, and
// closes it.
func TestAnAgentOverHTTP(t *testing.T) {
	t.Parallel()
	a := setup(t, func(*configv1.RunConfig) {})
	a.publish(3)
	resp, body := do(t, a.gateway, "POST", "/v1/rollout/prompts", `{"model":"tiny","wait_seconds":10}`, "")
	var got struct {
		Run      string `json:"run_id"`
		Sessions []struct {
			ID     string `json:"session_id"`
			URL    string `json:"base_url"`
			Prompt string
			Row    struct{ Answer int }
			Group  string
			Sample int
		}
	}
	if err := json.Unmarshal([]byte(body), &got); err != nil || len(got.Sessions) != 2 || got.Sessions[1].Row.Answer != 42 || got.Sessions[1].Sample != 1 ||
		got.Sessions[0].Group != "0/3/0" || got.Sessions[0].Prompt != "guess" || got.Run != agencyRun {
		t.Fatalf("%s: %s, %v", resp.Status, body, err)
	}
	first, second := got.Sessions[0], got.Sessions[1]
	if first.URL != a.gateway.URL()+"/sessions/"+first.ID+"/v1" {
		t.Errorf("the URL is %s", first.URL)
	}
	if resp, body := do(t, a.gateway, "POST", "/sessions/"+first.ID+"/v1/completions", `{"model":"tiny","prompt":[1,2]}`, ""); resp.StatusCode != http.StatusOK || resp.Header.Get("x-rollout-session") != first.ID {
		t.Fatalf("%s: %s", resp.Status, body)
	}
	for _, c := range []struct{ path, body, want string }{
		{"/sessions/" + first.ID + "/close", `{"reward":0.5,"metrics":{"turns":1}}`, `{"session_id":"` + first.ID + `","outcome":"COMPLETED","reward":0.5,"metrics":{"turns":1},"trajectories":1,"accepted":true}`},
		{"/v1/sessions/" + first.ID + "/close", `{"reward":0.5,"metrics":{"turns":1}}`, `"accepted":true`},
		{"/v1/sessions/" + first.ID + "/close", `{"reward":1}`, `"reason":"SESSION_CLOSED"`},
		{"/v1/sessions/" + second.ID + "/close", `{"reward":1}`, `"reason":"SESSION_EMPTY"`},
		{"/v1/sessions/" + second.ID + "/close", `{"outcome":"good","reward":1}`, "`outcome` must be one of"},
		{"/v1/sessions/" + second.ID + "/close", `{}`, "`reward` is missing"},
		{"/v1/sessions/" + second.ID + "/close", `{"outcome":"infra_failed","reason":"TOOL_TIMEOUT"}`, `"outcome":"INFRA_FAILED","reason":"TOOL_TIMEOUT"`},
		{"/v1/sessions/sess-x/close", `{"reward":1}`, `"reason":"SESSION_NOT_FOUND"`},
		{"/v1/rollout/prompts", `{"model":"tiny","max_groups":0}`, "`max_groups` must be between 1 and 256"},
		{"/v1/rollout/prompts", `{"model":"tiny","wait_seconds":61}`, "`wait_seconds` must be between 0 and 60"},
		{"/v1/rollout/prompts", `{"model":"gpt-4"}`, "the model"},
	} {
		if _, body := do(t, a.gateway, "POST", c.path, c.body, ""); !strings.Contains(body, c.want) {
			t.Errorf("%s %s: %s, want %s", c.path, c.body, body, c.want)
		}
	}
	a.acknowledged()
}
