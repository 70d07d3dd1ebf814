package completions

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/completion"
)

// episode prints one sample turn by turn: who said what, tool calls with their arguments, and for
// each turn of the policy its reward, weights, and duration.
type episode struct {
	of     completion.Completion
	style  output.Style
	tokens bool // print token ids
	out    strings.Builder
}

// message is a message in the form of OpenAI's API.
type message struct {
	Role      string          `json:"role"`
	Name      string          `json:"name"`
	Content   json.RawMessage `json:"content"`
	Reasoning string          `json:"reasoning_content"`
	ToolCalls []struct {
		Function struct {
			Name      string          `json:"name"`
			Arguments json.RawMessage `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
}

func (e *episode) text() string {
	number := 0
	policy := 0
	for _, t := range e.of.Turns {
		if t.Sampled {
			policy++
		}
	}
	e.line(1, e.style.Bold(strings.Join(e.head(policy), "  ")))
	for _, t := range e.of.Turns {
		if t.Sampled {
			e.sampled(number, t)
			number++
		} else {
			e.read(t)
		}
	}
	return e.out.String()
}

func (e *episode) line(level int, text string) {
	if e.of.Parent != nil {
		level++ // below the episode that opened it
	}
	e.out.WriteString(strings.Repeat("  ", level) + text + "\n")
}

// head describes the whole sample.
func (e *episode) head(turns int) []string {
	c := e.of
	cells := []string{fmt.Sprintf("sample %d", c.Sample)}
	if c.Parent != nil {
		cells[0] = fmt.Sprintf("child session %d, opened after turn %d", c.Parent.Child+1, c.Parent.Turn+1)
	} else if c.Part > 0 {
		cells = append(cells, fmt.Sprintf("part %d", c.Part))
	}
	cells = append(cells, "reward "+output.Number(c.Reward), "advantage "+signed(c.Advantage), c.Outcome,
		output.Plural(turns, "turn"), output.Plural(c.Tokens, "token"))
	cells = append(cells, numbers(c.Metrics)...)
	return slices.DeleteFunc(cells, func(cell string) bool { return cell == "" })
}

// sampled adds a turn of the policy.
func (e *episode) sampled(number int, t completion.Turn) {
	dim := func(text string) string { return text }
	facts := []string{}
	if t.Reward != 0 {
		facts = append(facts, "reward "+output.Number(t.Reward))
	}
	facts = append(facts, numbers(t.Metrics)...)
	if versions := e.versions(t); versions != "" {
		facts = append(facts, "weights "+versions)
	}
	if trained, known := e.trained(t); !known || trained == int(t.End-t.Start) {
		facts = append(facts, output.Plural(t.End-t.Start, "token"))
	} else {
		facts = append(facts, fmt.Sprintf("%d of %s trained on", trained, output.Plural(t.End-t.Start, "token")))
		if trained == 0 {
			dim = e.style.Dim
		}
	}
	var tools []uint32
	if times := e.of.Times; times != nil && number < len(times.Turns) {
		at := times.Turns[number]
		tools = at.ToolMs
		facts = append(facts, "sampled in "+milliseconds(at.AskedMs, at.SampledMs))
		if at.AnsweredMs > 0 {
			facts = append(facts, "answered in "+milliseconds(at.SampledMs, at.AnsweredMs))
		}
	}
	e.line(2, e.style.Cyan(fmt.Sprintf("policy, turn %d", number+1))+"  "+e.style.Dim(strings.Join(facts, ", ")))
	if len(t.Messages) == 0 {
		e.line(3, dim(strconv.Quote(t.Text)))
	}
	for _, raw := range t.Messages {
		m := parsed(raw)
		if m.Reasoning != "" {
			e.line(3, dim("reasoning "+strconv.Quote(m.Reasoning)))
		}
		if text := contentOf(m); text != "" || len(m.ToolCalls) == 0 {
			e.line(3, dim(strconv.Quote(text)))
		}
		for i, call := range m.ToolCalls {
			text := dim(fmt.Sprintf("call %s(%s)", printable(call.Function.Name), printable(unquoted(call.Function.Arguments))))
			if i < len(tools) {
				text += e.style.Dim("  took " + milliseconds(0, tools[i]))
			}
			e.line(3, text)
		}
	}
	e.ids(t)
}

// read adds what the policy read, which is never trained on.
func (e *episode) read(t completion.Turn) {
	if len(t.Messages) == 0 {
		e.line(2, e.style.Cyan("environment"))
		e.line(3, e.style.Dim(strconv.Quote(t.Text)))
	}
	for _, raw := range t.Messages {
		m := parsed(raw)
		e.line(2, e.style.Cyan(strings.TrimSpace(printable(m.Role)+" "+printable(m.Name))))
		e.line(3, e.style.Dim(strconv.Quote(contentOf(m))))
	}
	e.ids(t)
}

// ids adds the tokens of a turn: those that are trained on with their logprob, others in brackets.
func (e *episode) ids(t completion.Turn) {
	if !e.tokens || t.End <= e.of.PromptTokens {
		return
	}
	from, to := int(t.Start-e.of.PromptTokens), int(t.End-e.of.PromptTokens)
	var words []string
	for i := from; i < min(to, len(e.of.TokenIDs)); i++ {
		words = append(words, e.token(i, t.Sampled))
	}
	if to > len(e.of.TokenIDs) {
		words = append(words, e.style.Dim("..."))
	}
	for line := range slices.Chunk(words, 10) {
		e.line(3, strings.Join(line, " "))
	}
}

func (e *episode) token(i int, sampled bool) string {
	text := strconv.Itoa(int(e.of.TokenIDs[i]))
	logprob := ""
	if sampled && i < len(e.of.Logprobs) {
		logprob = fmt.Sprintf(":%.3f", e.of.Logprobs[i])
	}
	if slices.ContainsFunc(e.of.Trained, func(run [2]int) bool { return run[0] <= i && i < run[1] }) {
		return text + logprob
	}
	return e.style.Dim("[" + text + logprob + "]")
}

// versions are those of the weights that sampled a turn, oldest first.
func (e *episode) versions(t completion.Turn) string {
	var found []string
	for _, s := range e.of.Spans {
		if s.Start+e.of.PromptTokens < t.End && t.Start < s.End+e.of.PromptTokens {
			found = append(found, strconv.FormatUint(s.Version, 10))
		}
	}
	return strings.Join(slices.Compact(found), "+")
}

// trained is the number of tokens of a turn that are trained on, if all of its tokens were
// recorded.
func (e *episode) trained(t completion.Turn) (n int, known bool) {
	from, to := int(t.Start)-int(e.of.PromptTokens), int(t.End)-int(e.of.PromptTokens)
	if from < 0 || to > len(e.of.TokenIDs) {
		return 0, false
	}
	for _, run := range e.of.Trained {
		n += max(0, min(run[1], to)-max(run[0], from))
	}
	return n, true
}

func parsed(raw json.RawMessage) message {
	var m message
	_ = json.Unmarshal(raw, &m) // a message of another form is shown as far as it is known
	return m
}

// contentOf is the text of a message; content of several parts is shown as JSON.
func contentOf(m message) string { return unquoted(m.Content) }

// unquoted is the text of a JSON string, and other JSON as it is.
func unquoted(raw json.RawMessage) string {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text
	}
	return string(raw)
}

// printable escapes what a terminal would interpret.
func printable(text string) string {
	quoted := strconv.Quote(text)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
}

// numbers are metrics by name.
func numbers(metrics map[string]float64) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		out = append(out, printable(name)+" "+output.Number(metrics[name]))
	}
	return out
}

func milliseconds(from, to uint32) string {
	took := max(to, from) - from
	if took < 1000 {
		return fmt.Sprintf("%d ms", took)
	}
	return output.Duration(time.Duration(took) * time.Millisecond)
}

func signed(advantage *float64) string {
	if advantage == nil {
		return "-"
	}
	return fmt.Sprintf("%+.3f", *advantage)
}
