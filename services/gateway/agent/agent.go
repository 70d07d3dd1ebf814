// Package agent is the dialect of agents outside of a run that know HTTP alone: they take prompts
// and close sessions. Between the two they use any other dialect at the base URL of a session.
//
//	POST /v1/rollout/prompts      {"model": "guess", "max_groups": 4, "wait_seconds": 20}
//	POST /v1/sessions/{id}/close  {"reward": 1.0}
package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/libs/apikey"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

// Sessions issues and closes sessions; *gateway.Server is one.
type Sessions interface {
	NextPrompts(ctx context.Context, req *gatewayv1.NextPromptsRequest) (*gatewayv1.NextPromptsResponse, error)
	CloseSession(ctx context.Context, req *gatewayv1.CloseSessionRequest) (*gatewayv1.CloseSessionResponse, error)
}

// Routes are the endpoints of the dialect.
func Routes(sessions Sessions) []edge.Route {
	h := &handler{sessions}
	route := func(path, about string, request any, serve func(w http.ResponseWriter, r *http.Request) error) edge.Route {
		return edge.Route{
			Method: http.MethodPost, Path: path, Tag: "Agents", About: about, Request: request, Serve: serve, Body: edge.PlainBody, Scope: apikey.Session,
		}
	}
	const end = "End a session with a reward. Each leaf of its tree becomes a trajectory of the run."
	return []edge.Route{
		route("/v1/rollout/prompts", "Take prompt groups of a run: a session per sample.", promptsRequest{}, h.prompts),
		route("/v1/sessions/{session}/close", end, closeRequest{}, h.close),
		route("/sessions/{session}/close", end, closeRequest{}, h.close),
	}
}

type handler struct{ sessions Sessions }

// Limits of the contract.
const (
	maxGroups = 256
	maxWait   = 60
	maxReason = 128
	maxMetric = 64
)

type promptsRequest struct {
	Model       string        `json:"model"`
	MaxGroups   *edge.Integer `json:"max_groups"`
	WaitSeconds float64       `json:"wait_seconds"`
}

type promptsResponse struct {
	RunID    string     `json:"run_id"`
	Sessions []taskJSON `json:"sessions"`
	Ended    bool       `json:"ended"`
}

type taskJSON struct {
	SessionID         string          `json:"session_id"`
	BaseURL           string          `json:"base_url"`
	Model             string          `json:"model"`
	Group             string          `json:"group"` // epoch/index/attempt
	Sample            uint32          `json:"sample"`
	GroupSize         uint32          `json:"group_size"`
	Prompt            json.RawMessage `json:"prompt,omitempty"`
	Row               json.RawMessage `json:"row,omitempty"`
	Seed              uint64          `json:"seed"`
	MinWeightsVersion uint64          `json:"min_weights_version"`
	Deadline          time.Time       `json:"deadline"`
}

func (h *handler) prompts(w http.ResponseWriter, r *http.Request) error {
	var body promptsRequest
	if err := edge.Decode(w, r, &body); err != nil {
		return err
	}
	groups := edge.Integer(1)
	if body.MaxGroups != nil {
		groups = *body.MaxGroups
	}
	if groups < 1 || groups > maxGroups {
		return edge.Invalid("max_groups", "`max_groups` must be between 1 and %d, got %d", maxGroups, groups)
	}
	if body.WaitSeconds < 0 || body.WaitSeconds > maxWait {
		return edge.Invalid("wait_seconds", "`wait_seconds` must be between 0 and %d, got %g", maxWait, body.WaitSeconds)
	}
	got, err := h.sessions.NextPrompts(r.Context(), &gatewayv1.NextPromptsRequest{Model: body.Model, MaxGroups: uint32(groups), WaitSeconds: body.WaitSeconds})
	if err != nil {
		return err
	}
	out := promptsResponse{RunID: got.GetRunId(), Ended: got.GetEnded(), Sessions: []taskJSON{}}
	for _, t := range got.GetSessions() {
		key := t.GetKey()
		out.Sessions = append(out.Sessions, taskJSON{
			SessionID: t.GetSessionId(), BaseURL: baseURL(r, t.GetSessionId()), Model: t.GetModel(), GroupSize: t.GetGroupSize(), Sample: key.GetSample(),
			Group:  fmt.Sprintf("%d/%d/%d", key.GetEpoch(), key.GetIndex(), key.GetAttempt()),
			Prompt: t.GetPromptJson(), Row: t.GetRowJson(), Seed: t.GetSeed(), MinWeightsVersion: t.GetMinWeightsVersion(), Deadline: t.GetDeadline().AsTime(),
		})
	}
	return edge.WriteJSON(w, http.StatusOK, out)
}

// baseURL is the URL of a session for clients of the OpenAI API, at the host that the agent uses.
func baseURL(r *http.Request, session string) string {
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	return scheme + "://" + r.Host + "/sessions/" + session + "/v1"
}

type closeRequest struct {
	Reward  *float64           `json:"reward"`
	Metrics map[string]float64 `json:"metrics"`
	Outcome string             `json:"outcome"`
	Reason  string             `json:"reason"`
	RunID   string             `json:"run_id"`
}

type closeResponse struct {
	SessionID    string             `json:"session_id"`
	Outcome      string             `json:"outcome"`
	Reason       string             `json:"reason,omitempty"`
	Reward       float64            `json:"reward"`
	Metrics      map[string]float64 `json:"metrics,omitempty"`
	Trajectories uint32             `json:"trajectories"`
	Accepted     bool               `json:"accepted"`
	Refused      []string           `json:"refused,omitempty"`
}

const prefix = "OUTCOME_"

// outcomes are the names that a request may send.
var outcomes = []string{"COMPLETED", "TRUNCATED", "ABORTED", "INFRA_FAILED"}

func (h *handler) close(w http.ResponseWriter, r *http.Request) error {
	var body closeRequest
	if err := edge.Decode(w, r, &body); err != nil {
		return err
	}
	outcome := strings.ToUpper(body.Outcome)
	failed := outcome == "ABORTED" || outcome == "INFRA_FAILED"
	switch {
	case outcome != "" && !slices.Contains(outcomes, outcome):
		return edge.Invalid("outcome", "`outcome` must be one of %s, got %q", strings.Join(outcomes, ", "), body.Outcome)
	case body.Reward == nil && !failed:
		return edge.Missing("reward", "`reward` is missing; without a reward, send `\"outcome\": \"INFRA_FAILED\"`")
	case len(body.Reason) > maxReason:
		return edge.Invalid("reason", "`reason` must have at most %d characters, got %d", maxReason, len(body.Reason))
	case len(body.Metrics) > maxMetric:
		return edge.Invalid("metrics", "`metrics` must have at most %d numbers, got %d", maxMetric, len(body.Metrics))
	}
	req := &gatewayv1.CloseSessionRequest{
		SessionId: r.PathValue("session"), Metrics: body.Metrics, Reason: body.Reason, RunId: body.RunID, Outcome: trajectoryv1.Outcome(trajectoryv1.Outcome_value[prefix+outcome]),
	}
	if body.Reward != nil {
		req.Reward = *body.Reward
	}
	got, err := h.sessions.CloseSession(r.Context(), req)
	if err != nil {
		return err
	}
	end := got.GetEnd()
	return edge.WriteJSON(w, http.StatusOK, closeResponse{
		SessionID: req.GetSessionId(), Outcome: strings.TrimPrefix(end.GetOutcome().String(), prefix), Reason: end.GetReason(), Reward: end.GetReward(),
		Metrics: end.GetMetrics(), Trajectories: end.GetTrajectories(), Accepted: end.GetAccepted(), Refused: end.GetRefused(),
	})
}
