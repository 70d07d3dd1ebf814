package edge

import (
	"encoding/json"
	"strconv"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// Limits of the contract of inference workers.
const (
	maxN       = 128
	maxTop     = 20
	maxStops   = 16
	maxStopIDs = 64
	maxBias    = 1024
	maxChoices = 1024
	MaxPrompts = 256
	maxOfAInt  = 1 << 31
)

// Sampling is how completions are sampled, with the names of OpenAI and vLLM.
type Sampling struct {
	Temperature       *float64        `json:"temperature"`
	TopP              *float64        `json:"top_p"`
	TopK              *Integer        `json:"top_k"`
	MinP              *float64        `json:"min_p"`
	Stop              json.RawMessage `json:"stop"`
	Seed              *Integer        `json:"seed"`
	MaxTokens         *Integer        `json:"max_tokens"`
	MinTokens         *Integer        `json:"min_tokens"`
	PresencePenalty   *float64        `json:"presence_penalty"`
	FrequencyPenalty  *float64        `json:"frequency_penalty"`
	RepetitionPenalty *float64        `json:"repetition_penalty"`
	LogitBias         json.RawMessage `json:"logit_bias"`
	StopTokenIDs      []Integer       `json:"stop_token_ids"`
	IgnoreEOS         *bool           `json:"ignore_eos"`
	Structured
	refused
}

// refused is fields of vLLM that change what is sampled and are not supported. They are not
// ignored, because the completion would differ from the one that was requested.
type refused struct {
	LengthPenalty    *float64        `json:"length_penalty"`
	BeamSearch       json.RawMessage `json:"use_beam_search"`
	BadWords         json.RawMessage `json:"bad_words"`
	AllowedTokenIDs  json.RawMessage `json:"allowed_token_ids"`
	IncludeStop      json.RawMessage `json:"include_stop_str_in_output"`
	TruncatePrompt   json.RawMessage `json:"truncate_prompt_tokens"`
	LogitsProcessors json.RawMessage `json:"logits_processors"`
}

func (f *refused) check() error {
	if f.LengthPenalty != nil && *f.LengthPenalty != 1 {
		return Unsupported("length_penalty", "beam search is not supported; omit it or send 1")
	}
	for _, field := range []struct {
		name, why string
		value     json.RawMessage
	}{
		{"use_beam_search", "completions are sampled", f.BeamSearch},
		{"bad_words", "use `logit_bias` with the ids of their tokens", f.BadWords},
		{"allowed_token_ids", "use `structured_outputs` or `logit_bias`", f.AllowedTokenIDs},
		{"include_stop_str_in_output", "the text ends before the stop string", f.IncludeStop},
		{"truncate_prompt_tokens", "truncate the prompt before you send it", f.TruncatePrompt},
		{"logits_processors", "use `logit_bias` or `structured_outputs`", f.LogitsProcessors},
	} {
		if IsSet(field.value) {
			return Unsupported(field.name, field.why)
		}
	}
	return nil
}

// Params checks the fields and converts them.
func (s *Sampling) Params() (*inferencev1.SamplingParams, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	stops, err := s.stops()
	if err != nil {
		return nil, err
	}
	bias, err := s.bias()
	if err != nil {
		return nil, err
	}
	constraint, err := s.Constraint()
	if err != nil {
		return nil, err
	}
	params := &inferencev1.SamplingParams{
		Temperature: s.Temperature, TopP: s.TopP, MinP: s.MinP, Stop: stops, PresencePenalty: s.PresencePenalty,
		FrequencyPenalty: s.FrequencyPenalty, RepetitionPenalty: s.RepetitionPenalty, LogitBias: bias, IgnoreEos: s.IgnoreEOS,
		Constraint: constraint, TopK: small(s.TopK), MaxTokens: small(s.MaxTokens), MinTokens: small(s.MinTokens),
	}
	for _, id := range s.StopTokenIDs {
		params.StopTokenIds = append(params.StopTokenIds, uint32(id))
	}
	if s.Seed != nil {
		params.Seed = Ptr(uint64(*s.Seed))
	}
	return params, nil
}

// small converts an optional count. Negative counts are 0: clients of vLLM send top_k -1 for all.
func small(n *Integer) *uint32 {
	if n == nil {
		return nil
	}
	return Ptr(uint32(min(max(0, *n), maxOfAInt)))
}

// check returns an error for the first invalid or unsupported field.
func (s *Sampling) check() error {
	for _, err := range []error{
		InRange("temperature", s.Temperature, 0, 10), InRange("top_p", s.TopP, 1e-9, 1), InRange("min_p", s.MinP, 0, 1),
		InRange("presence_penalty", s.PresencePenalty, -2, 2), InRange("frequency_penalty", s.FrequencyPenalty, -2, 2),
		InRange("repetition_penalty", s.RepetitionPenalty, 1e-9, 10),
		AtLeast("top_k", s.TopK, -1), AtLeast("max_tokens", s.MaxTokens, 0), AtLeast("min_tokens", s.MinTokens, 0), AtLeast("seed", s.Seed, 0),
		s.refused.check(),
	} {
		if err != nil {
			return err
		}
	}
	if s.MinTokens != nil && s.MaxTokens != nil && *s.MinTokens > *s.MaxTokens {
		return Invalid("min_tokens", "`min_tokens` must be at most `max_tokens`, got %d and %d", *s.MinTokens, *s.MaxTokens)
	}
	if len(s.StopTokenIDs) > maxStopIDs {
		return Invalid("stop_token_ids", "`stop_token_ids` must have at most %d ids, got %d", maxStopIDs, len(s.StopTokenIDs))
	}
	for _, id := range s.StopTokenIDs {
		if id < 0 || id >= maxOfAInt {
			return Invalid("stop_token_ids", "`stop_token_ids` must have token ids, got %d", id)
		}
	}
	return nil
}

// InRange returns an error for a number outside of [low, high].
func InRange(param string, value *float64, low, high float64) error {
	if value != nil && (*value < low || *value > high) {
		return Invalid(param, "`%s` must be between %g and %g, got %g", param, low, high, *value)
	}
	return nil
}

// AtLeast returns an error for an integer below low.
func AtLeast(param string, value *Integer, low Integer) error {
	if value != nil && *value < low {
		return Invalid(param, "`%s` must be at least %d, got %d", param, low, *value)
	}
	return nil
}

// Count returns an optional integer between low and high; absent: the default.
func Count(param string, value *Integer, low, high, absent Integer) (uint32, error) {
	if value == nil {
		return uint32(absent), nil
	}
	if err := AtLeast(param, value, low); err != nil {
		return 0, err
	}
	if *value > high {
		return 0, Invalid(param, "`%s` must be at most %d, got %d", param, high, *value)
	}
	return uint32(*value), nil
}

// Completions returns the number of completions per prompt.
func Completions(n *Integer) (uint32, error) { return Count("n", n, 1, maxN, 1) }

// Top returns a number of most likely tokens.
func Top(param string, n *Integer) (uint32, error) { return Count(param, n, 0, maxTop, 0) }

// stops reads a string, a list of strings, or null.
func (s *Sampling) stops() ([]string, error) {
	if len(s.Stop) == 0 || string(s.Stop) == "null" {
		return nil, nil
	}
	var one string
	many := []string{}
	if json.Unmarshal(s.Stop, &one) == nil {
		many = append(many, one)
	} else if json.Unmarshal(s.Stop, &many) != nil {
		return nil, Invalid("stop", "`stop` must be a string or a list of strings")
	}
	if len(many) > maxStops {
		return nil, Invalid("stop", "`stop` must have at most %d strings, got %d", maxStops, len(many))
	}
	for _, text := range many {
		if text == "" {
			return nil, Invalid("stop", "`stop` must not have an empty string")
		}
	}
	return many, nil
}

// bias reads an object of token ids and numbers.
func (s *Sampling) bias() (map[uint32]float64, error) {
	if !IsSet(s.LogitBias) {
		return nil, nil
	}
	var sent map[string]float64
	if json.Unmarshal(s.LogitBias, &sent) != nil {
		return nil, Invalid("logit_bias", "`logit_bias` must be an object of token ids and numbers, such as {\"42\": -100}")
	}
	if len(sent) > maxBias {
		return nil, Invalid("logit_bias", "`logit_bias` must have at most %d token ids, got %d", maxBias, len(sent))
	}
	out := make(map[uint32]float64, len(sent))
	for text, value := range sent {
		id, err := strconv.ParseUint(text, 10, 31)
		if err != nil {
			return nil, Invalid("logit_bias", "`logit_bias` must have token ids as keys, got %q", text)
		}
		if value < -100 || value > 100 {
			return nil, Invalid("logit_bias", "`logit_bias` of token %d must be between -100 and 100, got %g", id, value)
		}
		out[uint32(id)] = value
	}
	return out, nil
}

// Ptr returns a pointer to a copy of v.
func Ptr[T any](v T) *T { return &v }
