package plugin

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime/debug"
	"strings"
	"sync"

	pluginv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plugin/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// server answers rollout.plugin.v1.
type server struct {
	pluginv1.UnimplementedPluginServiceServer
	plugins  []Plugin
	maxBatch uint32
}

func newServer(config Config, plugins []Plugin) (*server, error) {
	arguments := config.Arguments
	if len(arguments) == 0 {
		arguments = json.RawMessage("{}")
	}
	seen := map[string]bool{}
	for _, plugin := range plugins {
		key := plugin.info.GetKind().String() + plugin.info.GetName()
		if plugin.info.GetName() == "" || seen[key] {
			return nil, fmt.Errorf("the name %q of a plugin is empty, or two of a kind have it", plugin.info.GetName())
		}
		seen[key] = true
		plugin.info.Version = config.Version
		if plugin.info.GetKind() == pluginv1.PluginKind_PLUGIN_KIND_TOOL && !json.Valid([]byte(plugin.info.GetParametersJson())) {
			return nil, fmt.Errorf("the parameters of the tool %s are not JSON", plugin.info.GetName())
		}
		if plugin.environment != nil {
			if err := plugin.environment.prepare(arguments, plugin.info); err != nil {
				return nil, err
			}
		}
	}
	return &server{plugins: plugins, maxBatch: config.MaxBatch}, nil
}

func (s *server) Handshake(_ context.Context, request *pluginv1.HandshakeRequest) (*pluginv1.HandshakeResponse, error) {
	if request.GetSchemaVersion() != SchemaVersion {
		return nil, statusOf(&Error{
			Reason:  "PLUGIN_SCHEMA",
			Message: fmt.Sprintf("the caller has version %d of rollout.plugin.v1, this service %d", request.GetSchemaVersion(), SchemaVersion),
			Fix:     "update the one with the older version",
		}, "")
	}
	response := &pluginv1.HandshakeResponse{SchemaVersion: SchemaVersion, MaxBatch: s.maxBatch}
	for _, plugin := range s.plugins {
		response.Plugins = append(response.Plugins, plugin.info)
	}
	return response, nil
}

func (s *server) Reward(ctx context.Context, request *pluginv1.RewardRequest) (*pluginv1.RewardResponse, error) {
	plugin, err := s.find(pluginv1.PluginKind_PLUGIN_KIND_REWARD, request.GetPlugin())
	if err != nil {
		return nil, err
	}
	scores, err := score(ctx, plugin, request.GetGroups())
	return &pluginv1.RewardResponse{Scores: scores}, err
}

func (s *server) Evaluate(ctx context.Context, request *pluginv1.EvaluateRequest) (*pluginv1.EvaluateResponse, error) {
	plugin, err := s.find(pluginv1.PluginKind_PLUGIN_KIND_EVALUATION, request.GetPlugin())
	if err != nil {
		return nil, err
	}
	scores, err := score(ctx, plugin, request.GetGroups())
	if err != nil || len(scores) == 0 {
		return &pluginv1.EvaluateResponse{}, err
	}
	var sum float64
	for _, score := range scores {
		sum += score.GetReward()
	}
	return &pluginv1.EvaluateResponse{Scores: scores, Metrics: map[string]float64{"score": sum / float64(len(scores))}}, nil
}

func score(ctx context.Context, plugin Plugin, groups []*pluginv1.RewardGroup) ([]*pluginv1.RewardScore, error) {
	var samples []Sample
	for _, group := range groups {
		for _, sample := range group.GetSamples() {
			samples = append(samples, Sample{sample.GetPrompt(), sample.GetCompletion(), idsOf(sample.GetTokenIds()), group.GetRowJson()})
		}
	}
	scores, err := plugin.reward(ctx, samples)
	if err != nil {
		return nil, statusOf(err, "REWARD_RAISED")
	}
	if len(scores) != len(samples) {
		return nil, badScore("`%s` returned %d scores for %d samples", plugin.info.GetName(), len(scores), len(samples))
	}
	found := make([]*pluginv1.RewardScore, len(scores))
	for i, score := range scores {
		if math.IsNaN(score.Reward) || math.IsInf(score.Reward, 0) {
			return nil, badScore("`%s` returned %v as a reward", plugin.info.GetName(), score.Reward)
		}
		made := &pluginv1.RewardScore{Reward: score.Reward, Metrics: score.Metrics, TokenRewards: score.TokenRewards}
		for _, step := range score.Steps {
			made.Steps = append(made.Steps, &pluginv1.StepReward{Start: step.Start, End: step.End, Reward: step.Reward})
		}
		found[i] = made
	}
	return found, nil
}

func badScore(format string, values ...any) error {
	return statusOf(&Error{
		Reason: "REWARD_BAD_RESULT", Message: fmt.Sprintf(format, values...), Fix: "return one finite number for each sample, in order",
	}, "")
}

func (s *server) ReadRows(ctx context.Context, request *pluginv1.ReadRowsRequest) (*pluginv1.ReadRowsResponse, error) {
	plugin, err := s.find(pluginv1.PluginKind_PLUGIN_KIND_DATA_SOURCE, request.GetPlugin())
	if err != nil {
		return nil, err
	}
	limit := int(request.GetLimit())
	rows, err := plugin.rows(ctx, request.GetSplit(), request.GetOffset(), limit)
	if err != nil {
		return nil, statusOf(err, "DATA_SOURCE_RAISED")
	}
	response := &pluginv1.ReadRowsResponse{End: len(rows) < limit}
	for i, row := range rows {
		if trimmed := bytes.TrimSpace(row); !json.Valid(trimmed) || trimmed[0] != '{' || i >= limit {
			return nil, statusOf(&Error{
				Reason:  "DATA_SOURCE_BAD_RESULT",
				Message: fmt.Sprintf("row %d of `%s` is not a JSON object, or more than the %d rows asked for", request.GetOffset()+uint64(i)+1, plugin.info.GetName(), limit),
				Fix:     "return at most `limit` JSON objects",
			}, "")
		}
		response.RowsJson = append(response.RowsJson, row)
	}
	return response, nil
}

func (s *server) CallTool(ctx context.Context, request *pluginv1.CallToolRequest) (*pluginv1.CallToolResponse, error) {
	response := &pluginv1.CallToolResponse{Results: make([]*pluginv1.ToolResult, len(request.GetCalls()))}
	err := each(len(request.GetCalls()), func(i int) error {
		call := request.GetCalls()[i]
		plugin, err := s.find(pluginv1.PluginKind_PLUGIN_KIND_TOOL, call.GetTool())
		if err != nil {
			return err
		}
		made := ToolCall{ID: call.GetCallId(), Task: call.GetEpisode().GetTask(), Sample: call.GetEpisode().GetSample()}
		content, err := plugin.tool(ctx, made, []byte(call.GetArgumentsJson()))
		result := &pluginv1.ToolResult{CallId: call.GetCallId(), Content: content}
		if err != nil {
			result.Content, result.Reason = err.Error(), "TOOL_RAISED"
			var typed *Error
			if errors.As(err, &typed) {
				result.Reason, result.Infrastructure = typed.Reason, typed.infrastructure
			}
		}
		response.Results[i] = result
		return nil
	})
	return response, err
}

func (s *server) ResetEnvironment(ctx context.Context, request *pluginv1.ResetEnvironmentRequest) (*pluginv1.ResetEnvironmentResponse, error) {
	environment, err := s.environment(request.GetPlugin())
	if err != nil {
		return nil, err
	}
	response := &pluginv1.ResetEnvironmentResponse{Starts: make([]*pluginv1.EnvironmentStart, len(request.GetTasks()))}
	err = each(len(request.GetTasks()), func(i int) error {
		start, err := environment.reset(ctx, request.GetTasks()[i])
		response.Starts[i] = start
		return statusOf(err, "ENVIRONMENT_FAILED")
	})
	return response, err
}

func (s *server) StepEnvironment(ctx context.Context, request *pluginv1.StepEnvironmentRequest) (*pluginv1.StepEnvironmentResponse, error) {
	environment, err := s.environment(request.GetPlugin())
	if err != nil {
		return nil, err
	}
	turns := request.GetTurns()
	response := &pluginv1.StepEnvironmentResponse{Answers: make([]*pluginv1.EnvironmentAnswer, len(turns))}
	states := make([][]byte, len(turns))
	err = each(len(turns), func(i int) error {
		answer, state, err := environment.step(ctx, turns[i], request.GetSave())
		response.Answers[i], states[i] = answer, state
		return statusOf(err, "ENVIRONMENT_FAILED")
	})
	if request.GetSave() {
		response.States = states
	}
	return response, err
}

func (s *server) CloseEnvironment(_ context.Context, request *pluginv1.CloseEnvironmentRequest) (*pluginv1.CloseEnvironmentResponse, error) {
	environment, err := s.environment(request.GetPlugin())
	if err != nil {
		return nil, err
	}
	for _, episode := range request.GetEpisodes() {
		environment.drop(episodeKey{episode.GetTask(), episode.GetSample()})
	}
	return &pluginv1.CloseEnvironmentResponse{}, nil
}

func (s *server) SaveEnvironment(_ context.Context, request *pluginv1.SaveEnvironmentRequest) (*pluginv1.SaveEnvironmentResponse, error) {
	environment, err := s.saved(request.GetPlugin())
	if err != nil {
		return nil, err
	}
	state, err := environment.save()
	return &pluginv1.SaveEnvironmentResponse{State: state}, statusOf(err, "ENVIRONMENT_FAILED")
}

func (s *server) LoadEnvironment(_ context.Context, request *pluginv1.LoadEnvironmentRequest) (*pluginv1.LoadEnvironmentResponse, error) {
	environment, err := s.saved(request.GetPlugin())
	if err != nil {
		return nil, err
	}
	return &pluginv1.LoadEnvironmentResponse{}, statusOf(environment.load(request.GetState(), request.GetAdd()), "ENVIRONMENT_FAILED")
}

func (s *server) environment(name string) (*episodes, error) {
	plugin, err := s.find(pluginv1.PluginKind_PLUGIN_KIND_ENVIRONMENT, name)
	if err != nil {
		return nil, err
	}
	return plugin.environment, nil
}

func (s *server) saved(name string) (*episodes, error) {
	plugin, err := s.find(pluginv1.PluginKind_PLUGIN_KIND_ENVIRONMENT, name)
	if err != nil {
		return nil, err
	}
	if !plugin.info.GetSavesState() {
		return nil, statusOf(&Error{Reason: "PLUGIN_UNSUPPORTED", Message: "the environment's episodes can't be saved"}, "")
	}
	return plugin.environment, nil
}

func (s *server) find(kind pluginv1.PluginKind, name string) (Plugin, error) {
	var found []Plugin
	var names []string
	for _, plugin := range s.plugins {
		if plugin.info.GetKind() != kind {
			continue
		}
		names = append(names, plugin.info.GetName())
		if name == "" || name == plugin.info.GetName() {
			found = append(found, plugin)
		}
	}
	if len(found) == 1 {
		return found[0], nil
	}
	what := strings.ToLower(strings.TrimPrefix(kind.String(), "PLUGIN_KIND_"))
	return Plugin{}, statusOf(&Error{
		Reason: "PLUGIN_UNKNOWN", Message: fmt.Sprintf("there is no %s named %q", what, name), Fix: "name one of: " + strings.Join(names, ", "),
	}, "")
}

// each calls f for 0 to n-1 concurrently, and returns the first error. A panic is an error.
func each(n int, f func(int) error) error {
	errs := make([]error, n)
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() {
			defer func() {
				if value := recover(); value != nil {
					errs[i] = panicked(value)
				}
			}()
			errs[i] = f(i)
		})
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// ended answers a call whose context has ended with that status: the deadline may pass here before
// it does at the caller, and a plugin that returns for this reason has not failed.
func ended(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	response, err := handler(ctx, request)
	if cause := ctx.Err(); err != nil && cause != nil {
		return nil, status.FromContextError(cause).Err()
	}
	return response, err
}

// recovered turns a panic of a plugin into an error, so that it does not end other calls.
func recovered(ctx context.Context, request any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (response any, err error) {
	defer func() {
		if value := recover(); value != nil {
			err = panicked(value)
		}
	}()
	return next(ctx, request)
}

func panicked(value any) error {
	fmt.Fprintf(os.Stderr, "panic: %v\n%s", value, debug.Stack())
	return statusOf(&Error{Reason: "PLUGIN_PANICKED", Message: fmt.Sprintf("the plugin panicked: %v", value), Fix: "see its stack in the worker's log"}, "")
}

// statusOf converts an error to a status with google.rpc.ErrorInfo. otherwise is the reason of an
// error without one.
func statusOf(err error, otherwise string) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	info := &errdetails.ErrorInfo{Reason: otherwise, Domain: "rollout", Metadata: map[string]string{}}
	var typed *Error
	if errors.As(err, &typed) {
		info.Reason = typed.Reason
		info.Metadata["fix"] = typed.Fix
	}
	code := codes.FailedPrecondition
	switch info.GetReason() {
	case "PLUGIN_UNKNOWN":
		code = codes.NotFound
	case "PLUGIN_UNSUPPORTED":
		code = codes.Unimplemented
	}
	made, detailed := status.New(code, err.Error()).WithDetails(info)
	if detailed != nil {
		return status.Error(code, err.Error())
	}
	return made.Err()
}

func idsOf(data []byte) []int32 {
	ids := make([]int32, len(data)/4)
	for i := range ids {
		ids[i] = int32(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return ids
}

func bytesOf(ids []int32) []byte {
	data := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		data = binary.LittleEndian.AppendUint32(data, uint32(id))
	}
	return data
}
