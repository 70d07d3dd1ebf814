package input

import (
	"encoding/json"
	"fmt"
)

// tokens are the texts of a tokenizer.json by id, of the model (a map or a list of pairs) and the
// added tokens.
func tokens(tokenizer map[string]json.RawMessage) map[int64]string {
	var model struct {
		Vocab json.RawMessage `json:"vocab"`
	}
	var added []struct {
		ID      int64  `json:"id"`
		Content string `json:"content"`
	}
	_ = json.Unmarshal(tokenizer["model"], &model)
	_ = json.Unmarshal(tokenizer["added_tokens"], &added)
	out := map[int64]string{}
	var byText map[string]int64
	var list [][]any
	if json.Unmarshal(model.Vocab, &byText) == nil {
		for text, id := range byText {
			out[id] = text
		}
	} else if json.Unmarshal(model.Vocab, &list) == nil {
		for id, pair := range list {
			if len(pair) > 0 {
				out[int64(id)], _ = pair[0].(string)
			}
		}
	}
	for _, token := range added {
		out[token.ID] = token.Content
	}
	return out
}

// OtherTokens describes the first difference to the tokens of another model; "" without one. A
// model without a known vocabulary has no difference.
func (m *Model) OtherTokens(other *Model) string {
	if len(m.tokens) == 0 || len(other.tokens) == 0 {
		return ""
	}
	if len(m.tokens) != len(other.tokens) {
		return fmt.Sprintf("it has %d tokens, the model has %d", len(other.tokens), len(m.tokens))
	}
	first := int64(-1)
	for id, text := range m.tokens {
		if theirs, ok := other.tokens[id]; (!ok || theirs != text) && (first < 0 || id < first) {
			first = id
		}
	}
	if first < 0 {
		return ""
	}
	return fmt.Sprintf("its token %d is %q, the model's %q", first, other.tokens[first], m.tokens[first])
}
