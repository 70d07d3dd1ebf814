package plugin

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	pluginv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plugin/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"google.golang.org/protobuf/proto"
)

// Task is what an episode begins with. Row is the row of the data set, a JSON object, and Number
// its number. Seed has 63 bits and is the same for all samples and attempts of the row.
type Task struct {
	Key    string
	Row    json.RawMessage
	Number uint64
	Seed   uint64
}

// Turn is one answer of the policy. Content is the answer without reasoning and tool calls in an
// episode of messages, otherwise Text.
type Turn struct {
	Task      Task
	Sample    uint32
	Number    uint32 // from 0
	Text      string
	TokenIDs  []int32
	Truncated bool // whether it ended at the token limit
	Content   string
	Reasoning string
	ToolCalls []TurnToolCall
}

// TurnToolCall is a call of a function in an answer. Error is why the arguments can't be parsed.
type TurnToolCall struct {
	ID, Name  string
	Arguments json.RawMessage
	Error     string
}

// Answer is what follows a turn: an Observation or a Result.
type Answer interface {
	answer() *pluginv1.EnvironmentAnswer
}

// Observation is what the policy reads next: messages (JSON objects in OpenAI's format), tokens, or
// a text. Reward and Metrics are of the turn before it. Tools are those of a first observation.
type Observation struct {
	Text     string
	TokenIDs []int32
	Messages []string
	Tools    []string
	Reward   float64
	Metrics  map[string]float64
}

// Outcome is how an episode ended.
type Outcome int

// The outcomes. Aborted and InfraFailed need a reason.
const (
	Completed Outcome = iota
	Truncated
	Aborted
	InfraFailed
)

// Result ends an episode.
type Result struct {
	Reward      float64
	Metrics     map[string]float64
	TurnRewards []float64 // empty, or one per turn
	Outcome     Outcome
	Reason      string
	Message     string
}

// Episode is one episode of an environment. Each sample has its own; its methods are called one at
// a time.
type Episode interface {
	// Reset returns the first observation, which may depend on the task only: the samples of a task
	// share it.
	Reset(ctx context.Context, task Task) (Observation, error)
	// Step returns what follows a turn.
	Step(ctx context.Context, turn Turn) (Answer, error)
}

// SavedEpisode is an Episode whose state can be saved between turns, as JSON, and continued in
// another process.
type SavedEpisode interface {
	Episode
	Save() (json.RawMessage, error)
	Load(state json.RawMessage) error
}

// Environment returns an environment with this name. begin makes an episode; arguments are those of
// `[environment.args]`, a JSON object. An episode that implements io.Closer is closed at its end.
func Environment(name string, begin func(arguments json.RawMessage) (Episode, error)) Plugin {
	return Plugin{
		info:        &pluginv1.PluginInfo{Kind: pluginv1.PluginKind_PLUGIN_KIND_ENVIRONMENT, Name: name, OneAtATime: true},
		environment: &episodes{name: name, begin: begin, open: map[episodeKey]*openEpisode{}},
	}
}

type episodeKey struct {
	task   string
	sample uint32
}

type openEpisode struct {
	mu      sync.Mutex
	episode Episode
}

// episodes are the open episodes of an environment.
type episodes struct {
	name      string
	begin     func(json.RawMessage) (Episode, error)
	arguments json.RawMessage

	mu   sync.Mutex
	open map[episodeKey]*openEpisode
}

// prepare sets the arguments, and makes one episode to see that they are right.
func (e *episodes) prepare(arguments json.RawMessage, info *pluginv1.PluginInfo) error {
	e.arguments = arguments
	made, err := e.begin(arguments)
	if err != nil {
		return fmt.Errorf("make an episode of %s: %w", e.name, err)
	}
	_, saves := made.(SavedEpisode)
	info.SavesState, info.SavesEpisodes = saves, saves
	closeEpisode(made)
	return nil
}

func (e *episodes) reset(ctx context.Context, task *pluginv1.EnvironmentTask) (*pluginv1.EnvironmentStart, error) {
	var first *pluginv1.EnvironmentObservation
	for _, sample := range task.GetSamples() {
		key := episodeKey{task.GetKey(), sample}
		e.drop(key)
		made, err := e.begin(e.arguments)
		if err != nil {
			return nil, err
		}
		said, err := made.Reset(ctx, taskOf(task))
		var refused *Error
		if errors.As(err, &refused) {
			e.dropTask(task)
			return &pluginv1.EnvironmentStart{Kind: &pluginv1.EnvironmentStart_Refusal{
				Refusal: &pluginv1.EnvironmentRefusal{Reason: refused.Reason, Message: refused.Message},
			}}, nil
		}
		if err != nil {
			e.dropTask(task)
			return nil, err
		}
		found := said.message()
		if first != nil && !proto.Equal(first, found) {
			e.dropTask(task)
			return nil, &Error{
				Reason: "ENVIRONMENT_BAD_RESULT", Message: fmt.Sprintf("`%s.Reset` gave two samples of a task different observations", e.name),
				Fix: "make it depend on the task only",
			}
		}
		first = found
		e.mu.Lock()
		e.open[key] = &openEpisode{episode: made}
		e.mu.Unlock()
	}
	return &pluginv1.EnvironmentStart{Kind: &pluginv1.EnvironmentStart_Observation{Observation: first}}, nil
}

// step returns the answer to a turn and, with save, the state after it; empty if the episode has
// ended or can't be saved.
func (e *episodes) step(ctx context.Context, m *pluginv1.EnvironmentTurn, save bool) (*pluginv1.EnvironmentAnswer, []byte, error) {
	key := episodeKey{m.GetTask().GetKey(), m.GetSample()}
	e.mu.Lock()
	found := e.open[key]
	e.mu.Unlock()
	if found == nil {
		return nil, nil, &Error{
			Reason:  "ENVIRONMENT_FAILED",
			Message: fmt.Sprintf("sample %d of %s has no open episode: its process has ended", key.sample, key.task),
		}
	}
	found.mu.Lock()
	defer found.mu.Unlock()
	answer, err := found.episode.Step(ctx, turnOf(m))
	if err != nil {
		return nil, nil, err
	}
	if answer == nil {
		return nil, nil, &Error{Reason: "ENVIRONMENT_BAD_RESULT", Message: fmt.Sprintf("`%s.Step` returned neither an observation nor a result", e.name)}
	}
	if _, ended := answer.(Result); ended {
		e.drop(key)
		return answer.answer(), nil, nil
	}
	saved, ok := found.episode.(SavedEpisode)
	if !save || !ok {
		return answer.answer(), nil, nil
	}
	state, err := saved.Save()
	return answer.answer(), state, err
}

func (e *episodes) drop(key episodeKey) {
	e.mu.Lock()
	found := e.open[key]
	delete(e.open, key)
	e.mu.Unlock()
	if found != nil {
		closeEpisode(found.episode)
	}
}

func (e *episodes) dropTask(task *pluginv1.EnvironmentTask) {
	for _, sample := range task.GetSamples() {
		e.drop(episodeKey{task.GetKey(), sample})
	}
}

// savedEpisodes is the state of several episodes: entries are task, sample, and state.
type savedEpisodes struct {
	Episodes [][3]json.RawMessage `json:"episodes"`
}

func (e *episodes) save() ([]byte, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := savedEpisodes{Episodes: [][3]json.RawMessage{}}
	for key, open := range e.open {
		state, err := open.episode.(SavedEpisode).Save()
		if err != nil {
			return nil, err
		}
		task, err := json.Marshal(key.task)
		if err != nil {
			return nil, err
		}
		all.Episodes = append(all.Episodes, [3]json.RawMessage{task, json.RawMessage(fmt.Sprint(key.sample)), state})
	}
	return json.Marshal(all)
}

func (e *episodes) load(data []byte, add bool) error {
	var all savedEpisodes
	if err := json.Unmarshal(data, &all); err != nil {
		return fmt.Errorf("read the state of episodes: %w", err)
	}
	made := map[episodeKey]*openEpisode{}
	for _, entry := range all.Episodes {
		var key episodeKey
		if err := errors.Join(json.Unmarshal(entry[0], &key.task), json.Unmarshal(entry[1], &key.sample)); err != nil {
			return fmt.Errorf("read the state of episodes: %w", err)
		}
		episode, err := e.begin(e.arguments)
		if err != nil {
			return err
		}
		if err := episode.(SavedEpisode).Load(entry[2]); err != nil {
			return err
		}
		made[key] = &openEpisode{episode: episode}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !add {
		clear(e.open)
	}
	for key, episode := range made {
		e.open[key] = episode
	}
	return nil
}

func closeEpisode(episode Episode) {
	if closer, ok := episode.(interface{ Close() error }); ok {
		_ = closer.Close()
	}
}

func taskOf(m *pluginv1.EnvironmentTask) Task {
	seed := binary.LittleEndian.AppendUint64([]byte("rollout.task.v1"), m.GetRow())
	digest := sha256.Sum256(append(seed, m.GetRowJson()...)) // as `Task.seed` in Python
	return Task{Key: m.GetKey(), Row: m.GetRowJson(), Number: m.GetRow(), Seed: binary.LittleEndian.Uint64(digest[:]) & (1<<63 - 1)}
}

func turnOf(m *pluginv1.EnvironmentTurn) Turn {
	turn := Turn{
		Task: taskOf(m.GetTask()), Sample: m.GetSample(), Number: m.GetNumber(), Text: m.GetText(), TokenIDs: idsOf(m.GetTokenIds()),
		Truncated: m.GetTruncated(), Content: m.GetContent(), Reasoning: m.GetReasoning(),
	}
	for _, call := range m.GetToolCalls() {
		turn.ToolCalls = append(turn.ToolCalls, TurnToolCall{
			ID: call.GetId(), Name: call.GetName(), Arguments: json.RawMessage(call.GetArgumentsJson()), Error: call.GetError(),
		})
	}
	return turn
}

func (o Observation) message() *pluginv1.EnvironmentObservation {
	return &pluginv1.EnvironmentObservation{
		Text: o.Text, TokenIds: bytesOf(o.TokenIDs), Messages: o.Messages, Tools: o.Tools, Reward: o.Reward, Metrics: o.Metrics,
	}
}

func (o Observation) answer() *pluginv1.EnvironmentAnswer {
	return &pluginv1.EnvironmentAnswer{Kind: &pluginv1.EnvironmentAnswer_Observation{Observation: o.message()}}
}

var outcomes = map[Outcome]trajectoryv1.Outcome{
	Completed:   trajectoryv1.Outcome_OUTCOME_COMPLETED,
	Truncated:   trajectoryv1.Outcome_OUTCOME_TRUNCATED,
	Aborted:     trajectoryv1.Outcome_OUTCOME_ABORTED,
	InfraFailed: trajectoryv1.Outcome_OUTCOME_INFRA_FAILED,
}

func (r Result) answer() *pluginv1.EnvironmentAnswer {
	return &pluginv1.EnvironmentAnswer{Kind: &pluginv1.EnvironmentAnswer_Result{Result: &pluginv1.EnvironmentResult{
		Outcome: outcomes[r.Outcome], Score: &pluginv1.RewardScore{Reward: r.Reward, Metrics: r.Metrics}, TurnRewards: r.TurnRewards,
		Reason: r.Reason, Message: r.Message,
	}}}
}
