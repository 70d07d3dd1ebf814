package openai

import (
	"encoding/json"
	"net/http"
	"strings"

	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// sampling is the fields that chat completions and completions share.
type sampling struct {
	vllm
	Model            *string         `json:"model"`
	Temperature      *float64        `json:"temperature"`
	TopP             *float64        `json:"top_p"`
	TopK             *integer        `json:"top_k"`
	MinP             *float64        `json:"min_p"`
	N                *integer        `json:"n"`
	Stop             json.RawMessage `json:"stop"`
	Seed             *integer        `json:"seed"`
	MaxTokens        *integer        `json:"max_tokens"`
	Stream           bool            `json:"stream"`
	StreamOptions    *streamOptions  `json:"stream_options"`
	PresencePenalty  *float64        `json:"presence_penalty"`
	FrequencyPenalty *float64        `json:"frequency_penalty"`
	LogitBias        map[string]any  `json:"logit_bias"`
}

// unrecorded is why fields that change the distribution are not supported.
const unrecorded = "training would not know the changed distribution; omit it"

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

// check returns an error for the first invalid or unsupported field.
func (s *sampling) check() error {
	inRange := func(param string, value *float64, low, high float64) error {
		if value != nil && (*value < low || *value > high) {
			return invalid(param, "`%s` must be between %g and %g, got %g", param, low, high, *value)
		}
		return nil
	}
	atLeast := func(param string, value *integer, low integer) error {
		if value != nil && *value < low {
			return invalid(param, "`%s` must be at least %d, got %d", param, low, *value)
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
		return invalid("n", "`n` must be at most 128, got %d", *s.N)
	case s.PresencePenalty != nil && *s.PresencePenalty != 0:
		return unsupported("presence_penalty", unrecorded+" or send 0")
	case s.FrequencyPenalty != nil && *s.FrequencyPenalty != 0:
		return unsupported("frequency_penalty", unrecorded+" or send 0")
	case len(s.LogitBias) > 0:
		return unsupported("logit_bias", unrecorded)
	case s.StreamOptions != nil && !s.Stream:
		return invalid("stream_options", "`stream_options` requires `stream: true`")
	}
	return s.vllm.check()
}

// stops reads a string, a list of strings, or null.
func (s *sampling) stops() ([]string, error) {
	if len(s.Stop) == 0 || string(s.Stop) == "null" {
		return nil, nil
	}
	var one string
	many := []string{}
	if json.Unmarshal(s.Stop, &one) == nil {
		many = append(many, one)
	} else if json.Unmarshal(s.Stop, &many) != nil {
		return nil, invalid("stop", "`stop` must be a string or a list of strings")
	}
	if len(many) > 16 {
		return nil, invalid("stop", "`stop` must have at most 16 strings, got %d", len(many))
	}
	for _, text := range many {
		if text == "" {
			return nil, invalid("stop", "`stop` must not have an empty string")
		}
	}
	return many, nil
}

// request makes the request for the gateway from the shared fields.
func (s *sampling) request(r *http.Request) (*gatewayv1.CompleteRequest, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	stops, err := s.stops()
	if err != nil {
		return nil, err
	}
	if s.Model == nil || *s.Model == "" {
		return nil, &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Param: "model", Code: "missing_required_parameter", Message: "`model` is missing; GET /v1/models lists the models"}
	}
	params := &inferencev1.SamplingParams{Temperature: s.Temperature, TopP: s.TopP, MinP: s.MinP, Stop: stops}
	if s.TopK != nil {
		params.TopK = ptr(uint32(min(max(0, *s.TopK), 1<<31))) // clients of vLLM send -1 for all
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
		return nil, invalid("x-rollout-session", "the header x-rollout-session must have at most 64 characters, got %d", len(req.GetSessionId()))
	}
	return req, nil
}

// vllm is the fields of vLLM beyond OpenAI's that change what is sampled. None is supported, and
// none is ignored, because the completion would differ from the one that was requested.
type vllm struct {
	RepetitionPenalty    *float64        `json:"repetition_penalty"`
	LengthPenalty        *float64        `json:"length_penalty"`
	BeamSearch           json.RawMessage `json:"use_beam_search"`
	IgnoreEOS            json.RawMessage `json:"ignore_eos"`
	MinTokens            json.RawMessage `json:"min_tokens"`
	StopTokenIDs         json.RawMessage `json:"stop_token_ids"`
	BadWords             json.RawMessage `json:"bad_words"`
	AllowedTokenIDs      json.RawMessage `json:"allowed_token_ids"`
	StructuredOutputs    json.RawMessage `json:"structured_outputs"`
	GuidedJSON           json.RawMessage `json:"guided_json"`
	GuidedRegex          json.RawMessage `json:"guided_regex"`
	GuidedChoice         json.RawMessage `json:"guided_choice"`
	GuidedGrammar        json.RawMessage `json:"guided_grammar"`
	ChatTemplate         json.RawMessage `json:"chat_template"`
	ContinueFinalMessage json.RawMessage `json:"continue_final_message"`
}

// check returns an error for the first field that is set to something else than its default.
func (v *vllm) check() error {
	switch {
	case v.RepetitionPenalty != nil && *v.RepetitionPenalty != 1:
		return unsupported("repetition_penalty", unrecorded+" or send 1")
	case v.LengthPenalty != nil && *v.LengthPenalty != 1:
		return unsupported("length_penalty", "beam search is not supported; omit it or send 1")
	}
	for _, field := range []struct {
		name, why string
		value     json.RawMessage
	}{
		{"use_beam_search", "completions are sampled", v.BeamSearch},
		{"ignore_eos", "a completion ends at the end token", v.IgnoreEOS},
		{"min_tokens", "a completion ends at the end token", v.MinTokens},
		{"stop_token_ids", "send the strings as `stop`", v.StopTokenIDs},
		{"bad_words", unrecorded, v.BadWords},
		{"allowed_token_ids", unrecorded, v.AllowedTokenIDs},
		{"structured_outputs", "only free text is sampled", v.StructuredOutputs},
		{"guided_json", "only free text is sampled", v.GuidedJSON},
		{"guided_regex", "only free text is sampled", v.GuidedRegex},
		{"guided_choice", "only free text is sampled", v.GuidedChoice},
		{"guided_grammar", "only free text is sampled", v.GuidedGrammar},
		{"chat_template", "the chat template of the tokenizer is used", v.ChatTemplate},
		{"continue_final_message", "a chat completion is a new message; send the whole prompt to /v1/completions", v.ContinueFinalMessage},
	} {
		if isSet(field.value) {
			return unsupported(field.name, field.why)
		}
	}
	return nil
}

// isSet reports whether a value is present and is not a default.
func isSet(value json.RawMessage) bool {
	return !strings.Contains(" null false 0 [] {} \"\" ", " "+string(value)+" ") && len(value) > 0
}

func ptr[T any](v T) *T { return &v }
