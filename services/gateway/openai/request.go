package openai

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"

	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// sampling is the fields that chats and completions share.
type sampling struct {
	vllm
	Model            *string         `json:"model"`
	Temperature      *float64        `json:"temperature"`
	TopP             *float64        `json:"top_p"`
	TopK             *whole          `json:"top_k"`
	MinP             *float64        `json:"min_p"`
	N                *whole          `json:"n"`
	Stop             json.RawMessage `json:"stop"`
	Seed             *whole          `json:"seed"`
	MaxTokens        *whole          `json:"max_tokens"`
	Stream           bool            `json:"stream"`
	StreamOptions    *streamOptions  `json:"stream_options"`
	PresencePenalty  *float64        `json:"presence_penalty"`
	FrequencyPenalty *float64        `json:"frequency_penalty"`
	LogitBias        map[string]any  `json:"logit_bias"`
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

// decode reads one JSON object. Errors say where it broke, and which field has the wrong type.
func decode(r *http.Request, into any) error {
	raw, err := io.ReadAll(r.Body)
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return &apiError{Status: http.StatusRequestEntityTooLarge, Type: typeInvalid, Code: "request_too_large", Message: "the request body is larger than 16 MiB"}
	}
	if err != nil {
		return err
	}
	err = json.Unmarshal(raw, into)
	var syntax *json.SyntaxError
	var wrong *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &syntax):
		return &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Code: "invalid_json", Message: "we could not parse the JSON body of your request: " + place(raw, syntax)}
	case errors.As(err, &wrong):
		if wrong.Field == "" {
			return &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Code: "invalid_json", Message: "the body must be a JSON object, it is: " + wrong.Value}
		}
		field := wrong.Field[strings.LastIndexByte(wrong.Field, '.')+1:]
		return &apiError{
			Status: http.StatusBadRequest, Type: typeInvalid, Param: field, Code: "invalid_type",
			Message: "invalid type for `" + field + "`: expected " + kindOf(wrong.Type.String()) + ", got " + wrong.Value,
		}
	}
	return &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Code: "invalid_json", Message: err.Error()}
}

func (s *sampling) check() error {
	inRange := func(param string, value *float64, low, high float64) error {
		if value != nil && (*value < low || *value > high) {
			return invalid(param, "`%s` must be between %g and %g, it is %g", param, low, high, *value)
		}
		return nil
	}
	atLeast := func(param string, value *whole, low whole) error {
		if value != nil && *value < low {
			return invalid(param, "`%s` must be at least %d, it is %d", param, low, *value)
		}
		return nil
	}
	for _, err := range []error{
		inRange("temperature", s.Temperature, 0, 2), inRange("top_p", s.TopP, 1e-9, 1), inRange("min_p", s.MinP, 0, 1),
		atLeast("top_k", s.TopK, -1), atLeast("n", s.N, 1), atLeast("max_tokens", s.MaxTokens, 1), atLeast("seed", s.Seed, 0),
	} {
		if err != nil {
			return err
		}
	}
	switch {
	case s.N != nil && *s.N > 128:
		return invalid("n", "`n` must be at most 128, it is %d", *s.N)
	case s.PresencePenalty != nil && *s.PresencePenalty != 0:
		return unsupported("presence_penalty", "training would not know the changed distribution; leave it out or send 0")
	case s.FrequencyPenalty != nil && *s.FrequencyPenalty != 0:
		return unsupported("frequency_penalty", "training would not know the changed distribution; leave it out or send 0")
	case len(s.LogitBias) > 0:
		return unsupported("logit_bias", "training would not know the changed distribution; leave it out")
	case s.StreamOptions != nil && !s.Stream:
		return invalid("stream_options", "`stream_options` goes with `stream: true`")
	}
	return s.vllm.check()
}

// stops reads a text, a list of texts, or null.
func (s *sampling) stops() ([]string, error) {
	if len(s.Stop) == 0 || string(s.Stop) == "null" {
		return nil, nil
	}
	var one string
	many := []string{}
	if json.Unmarshal(s.Stop, &one) == nil {
		many = append(many, one)
	} else if json.Unmarshal(s.Stop, &many) != nil {
		return nil, invalid("stop", "`stop` must be a text or a list of texts")
	}
	if len(many) > 16 {
		return nil, invalid("stop", "`stop` holds %d texts; at most 16 are taken", len(many))
	}
	for _, text := range many {
		if text == "" {
			return nil, invalid("stop", "`stop` holds an empty text")
		}
	}
	return many, nil
}

// request puts the shared fields into the gateway's terms.
func (s *sampling) request(r *http.Request) (*gatewayv1.CompleteRequest, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	stops, err := s.stops()
	if err != nil {
		return nil, err
	}
	if s.Model == nil || *s.Model == "" {
		return nil, &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Param: "model", Code: "missing_required_parameter", Message: "you must provide a `model`; GET /v1/models lists them"}
	}
	params := &inferencev1.SamplingParams{Temperature: s.Temperature, TopP: s.TopP, MinP: s.MinP, Stop: stops}
	if s.TopK != nil {
		params.TopK = ptr(uint32(min(max(0, *s.TopK), 1<<31))) // vLLM's clients send -1 for all
	}
	if s.MaxTokens != nil {
		params.MaxTokens = ptr(uint32(min(*s.MaxTokens, 1<<31)))
	}
	if s.Seed != nil {
		params.Seed = ptr(uint64(*s.Seed))
	}
	req := &gatewayv1.CompleteRequest{Model: *s.Model, Params: params, N: 1, SessionId: r.Header.Get("x-rollout-session")}
	if s.N != nil {
		req.N = uint32(*s.N)
	}
	if len(req.GetSessionId()) > 64 {
		return nil, invalid("x-rollout-session", "the header x-rollout-session is longer than 64 characters")
	}
	return req, nil
}

func ptr[T any](v T) *T { return &v }
