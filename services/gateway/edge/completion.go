package edge

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// Completion is one completion, or a piece of it.
type Completion struct {
	Index      uint32 // prompt * n + sample
	Text       string
	Message    Message // of a chat
	Tokens     []Token
	Finish     string // stop, length, or abort, with the last piece
	StopString string
	Versions   []Version
	Prompt     Prompt
	Cached     int // tokens of the prompt that were not computed again
}

// Message is what the policy said, parsed.
type Message struct {
	Content   string
	Reasoning string
	Calls     []Call
}

// Call is a tool call, or an addition to one.
type Call struct {
	Index     uint32
	ID        string
	Name      string
	Arguments string
}

// Token is a token of a completion or a prompt.
type Token struct {
	ID      uint32
	Bytes   []byte
	Logprob float32 // under the unmodified softmax
	Sampled float32 // under the sampling distribution
	Top     []Token // most likely tokens at its position, best first
	Content bool    // of the content of the message
}

// Version is the weights version that sampled the tokens from Start to before End.
type Version struct {
	Version uint64 `json:"version"`
	Start   uint32 `json:"start"`
	End     uint32 `json:"end"`
}

// Prompt is the prompt of a completion, known with the last piece.
type Prompt struct {
	Count  int      // of tokens
	IDs    []uint32 // all
	Tokens []Token  // with logprobs, if they were requested
}

// Text returns the text of a token. Bytes that are not UTF-8, such as those of a part of a
// character, are written as OpenAI does.
func (t Token) Text() string {
	if utf8.Valid(t.Bytes) {
		return string(t.Bytes)
	}
	var b strings.Builder
	b.WriteString("bytes:")
	for _, c := range t.Bytes {
		fmt.Fprintf(&b, `\x%02x`, c)
	}
	return b.String()
}

// Label returns the token's text, or its id in the form of vLLM's return_tokens_as_token_ids.
func (t Token) Label(asID bool) string {
	if asID {
		return "token_id:" + strconv.FormatUint(uint64(t.ID), 10)
	}
	return t.Text()
}

// ByteValues returns the bytes as numbers.
func (t Token) ByteValues() []int {
	values := make([]int, len(t.Bytes))
	for i, c := range t.Bytes {
		values[i] = int(c)
	}
	return values
}

// Finite replaces values that JSON does not have. OpenAI writes -9999 for a token that can't be
// sampled.
func Finite(logprob float32) float32 {
	if math.IsInf(float64(logprob), 0) || math.IsNaN(float64(logprob)) {
		return -9999
	}
	return logprob
}

// IDs returns the token ids.
func (c *Completion) IDs() []uint32 {
	ids := make([]uint32, len(c.Tokens))
	for i, t := range c.Tokens {
		ids[i] = t.ID
	}
	return ids
}

// SampledLogprobs returns the logprob of each token under the distribution it was sampled from.
func (c *Completion) SampledLogprobs() []float32 {
	logprobs := make([]float32, len(c.Tokens))
	for i, t := range c.Tokens {
		logprobs[i] = Finite(t.Sampled)
	}
	return logprobs
}

// pieceOf converts a piece. A worker that does not parse sends no delta: the text is the content.
func pieceOf(raw *inferencev1.GenerateResponse, n uint32, parse bool) *Completion {
	c := &Completion{
		Index: raw.GetPrompt()*n + raw.GetSample(), Text: raw.GetText(), Tokens: tokensOf(raw), Finish: raw.GetFinishReason(),
		StopString: raw.GetStopString(), Cached: int(raw.GetCachedTokens()),
		Prompt: Prompt{Count: int(raw.GetPromptTokens()), IDs: raw.GetPromptTokenIds(), Tokens: promptOf(raw)},
	}
	for _, span := range raw.GetVersionSpans() {
		c.Versions = append(c.Versions, Version{Version: span.GetVersion(), Start: span.GetStart(), End: span.GetEnd()})
	}
	if delta := raw.GetDelta(); delta != nil {
		c.Message.Content, c.Message.Reasoning = delta.GetContent(), delta.GetReasoning()
		for _, call := range delta.GetToolCalls() {
			c.Message.Calls = append(c.Message.Calls, Call{Index: call.GetIndex(), ID: call.GetId(), Name: call.GetName(), Arguments: call.GetArguments()})
		}
	} else if parse {
		c.Message.Content = raw.GetText()
	}
	for i := range c.Tokens {
		c.Tokens[i].Content = c.Message.Content != ""
	}
	return c
}

// tokensOf returns the tokens of a piece. Without token_bytes the text belongs to the last one.
func tokensOf(raw *inferencev1.GenerateResponse) []Token {
	out := make([]Token, len(raw.GetTokenIds()))
	for i, id := range raw.GetTokenIds() {
		out[i] = Token{ID: id, Logprob: at(raw.GetRawLogprobs(), i, at(raw.GetLogprobs(), i, 0)), Sampled: at(raw.GetLogprobs(), i, 0)}
		if i < len(raw.GetTokenBytes()) {
			out[i].Bytes = raw.GetTokenBytes()[i]
		} else if i == len(out)-1 {
			out[i].Bytes = []byte(raw.GetText())
		}
		if i < len(raw.GetTopLogprobs()) {
			out[i].Top = topOf(raw.GetTopLogprobs()[i])
		}
	}
	return out
}

// promptOf returns the tokens of the prompt with their logprobs.
func promptOf(raw *inferencev1.GenerateResponse) []Token {
	out := make([]Token, len(raw.GetPromptLogprobs()))
	for i, logprob := range raw.GetPromptLogprobs() {
		out[i] = Token{Logprob: logprob, Sampled: logprob}
		if i < len(raw.GetPromptTokenIds()) {
			out[i].ID = raw.GetPromptTokenIds()[i]
		}
		if i < len(raw.GetPromptTexts()) {
			out[i].Bytes = []byte(raw.GetPromptTexts()[i])
		}
		if i < len(raw.GetPromptTopLogprobs()) {
			out[i].Top = topOf(raw.GetPromptTopLogprobs()[i])
		}
	}
	return out
}

func topOf(raw *inferencev1.TopLogprobs) []Token {
	out := make([]Token, len(raw.GetTokenIds()))
	for i, id := range raw.GetTokenIds() {
		logprob := at(raw.GetLogprobs(), i, 0)
		out[i] = Token{ID: id, Logprob: logprob, Sampled: logprob}
		if i < len(raw.GetTokenBytes()) {
			out[i].Bytes = raw.GetTokenBytes()[i]
		}
	}
	return out
}

// at returns list[i], or absent.
func at(list []float32, i int, absent float32) float32 {
	if i < len(list) {
		return list[i]
	}
	return absent
}

// Assembly is a completion whose pieces arrive. Its texts grow in builders, so that a long one is
// not copied with each token.
type Assembly struct {
	whole                    Completion
	text, content, reasoning strings.Builder
	arguments                []*strings.Builder // of each call of the message
}

// Add appends a piece.
func (a *Assembly) Add(piece *Completion) {
	a.text.WriteString(piece.Text)
	a.content.WriteString(piece.Message.Content)
	a.reasoning.WriteString(piece.Message.Reasoning)
	c := &a.whole
	c.Index, c.Tokens = piece.Index, append(c.Tokens, piece.Tokens...)
	for _, call := range piece.Message.Calls {
		at := slices.IndexFunc(c.Message.Calls, func(known Call) bool { return known.Index == call.Index })
		if at < 0 {
			at = len(c.Message.Calls)
			c.Message.Calls, a.arguments = append(c.Message.Calls, Call{Index: call.Index}), append(a.arguments, &strings.Builder{})
		}
		found := &c.Message.Calls[at]
		a.arguments[at].WriteString(call.Arguments)
		found.ID, found.Name = cmp.Or(call.ID, found.ID), cmp.Or(call.Name, found.Name)
	}
	if piece.Finish != "" {
		c.Finish, c.StopString, c.Versions, c.Prompt, c.Cached = piece.Finish, piece.StopString, piece.Versions, piece.Prompt, piece.Cached
	}
}

// Whole returns the completion so far. The next Add changes it.
func (a *Assembly) Whole() *Completion {
	c := &a.whole
	c.Text, c.Message.Content, c.Message.Reasoning = a.text.String(), a.content.String(), a.reasoning.String()
	for i, arguments := range a.arguments {
		c.Message.Calls[i].Arguments = arguments.String()
	}
	return c
}
