package openai

import (
	"encoding/json"
	"strings"
)

// vllm is what vLLM knows beyond OpenAI's fields and would sample otherwise for. None of it is honoured: what is ignored would be an
// answer to another question.
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

// check refuses every field that asks for something.
func (v *vllm) check() error {
	const shape = "training would not know the changed distribution; leave it out"
	switch {
	case v.RepetitionPenalty != nil && *v.RepetitionPenalty != 1:
		return unsupported("repetition_penalty", shape+" or send 1")
	case v.LengthPenalty != nil && *v.LengthPenalty != 1:
		return unsupported("length_penalty", "nothing is searched for; leave it out or send 1")
	}
	for _, field := range []struct {
		name, why string
		value     json.RawMessage
	}{
		{"use_beam_search", "completions are sampled", v.BeamSearch},
		{"ignore_eos", "the end token ends a completion", v.IgnoreEOS},
		{"min_tokens", "the end token ends a completion", v.MinTokens},
		{"stop_token_ids", "send the texts as `stop`", v.StopTokenIDs},
		{"bad_words", shape, v.BadWords},
		{"allowed_token_ids", shape, v.AllowedTokenIDs},
		{"structured_outputs", "only text is sampled", v.StructuredOutputs},
		{"guided_json", "only text is sampled", v.GuidedJSON},
		{"guided_regex", "only text is sampled", v.GuidedRegex},
		{"guided_choice", "only text is sampled", v.GuidedChoice},
		{"guided_grammar", "only text is sampled", v.GuidedGrammar},
		{"chat_template", "chats go through the tokenizer's own", v.ChatTemplate},
		{"continue_final_message", "the assistant speaks anew; send the whole prompt to /v1/completions", v.ContinueFinalMessage},
	} {
		if asks(field.value) {
			return unsupported(field.name, field.why)
		}
	}
	return nil
}

// asks reports whether a value is there and is not one that stands for nothing.
func asks(value json.RawMessage) bool {
	return !strings.Contains(" null false 0 [] {} \"\" ", " "+string(value)+" ") && len(value) > 0
}
