package report

import (
	"encoding/json"
	"fmt"
	"html/template"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/completion"
)

// episode is one episode of several turns: its conversation, and a chart of when its turns were
// sampled and answered.
type episode struct {
	Title, Note string
	SVG         template.HTML
	Lines       []said
}

// said is what one side of a conversation said.
type said struct {
	Who, Text string
	Sampled   bool
}

// episodes are the best, the worst, and the longest of the stored episodes whose times are known.
func episodes(kept []record.Kept) []episode {
	type stored struct {
		step uint64
		completion.Completion
	}
	var all []stored
	for _, k := range kept {
		for _, c := range k.Completions {
			if len(c.Turns) > 0 && c.Times != nil && len(c.Times.Turns) > 0 {
				all = append(all, stored{k.Step, c})
			}
		}
	}
	if len(all) == 0 {
		return nil
	}
	best := func(less func(a, b stored) bool) int {
		at := 0
		for i := range all {
			if less(all[at], all[i]) {
				at = i
			}
		}
		return at
	}
	names := map[int][]string{}
	var order []int
	for _, pick := range []struct {
		name string
		less func(a, b stored) bool
	}{
		{"best", func(a, b stored) bool { return a.Reward < b.Reward }},
		{"worst", func(a, b stored) bool { return a.Reward > b.Reward }},
		{"longest", func(a, b stored) bool { return took(a.Times) < took(b.Times) }},
	} {
		at := best(pick.less)
		if names[at] = append(names[at], pick.name); !slices.Contains(order, at) {
			order = append(order, at)
		}
	}
	var out []episode
	for _, at := range order {
		c := all[at]
		out = append(out, episode{
			Title: fmt.Sprintf("%s: step %d, row %d, sample %d", strings.Join(names[at], ", "), c.step, c.Index, c.Sample),
			Note: fmt.Sprintf("reward %s, %s, %s", output.Number(c.Reward), output.Plural(len(c.Times.Turns), "turn"),
				strings.ToLower(c.Outcome)),
			SVG: timeline(c.Completion), Lines: conversation(c.Completion),
		})
	}
	return out
}

// took is the duration of an episode in milliseconds.
func took(times *completion.Times) uint32 {
	end := uint32(0)
	for _, t := range times.Turns {
		end = max(end, t.AskedMs, t.SampledMs, t.AnsweredMs)
	}
	return end
}

// timeline draws an episode on one axis of time: bars of sampling, of the environment, and of
// tools, which are part of the environment's time, and the reward of each turn.
func timeline(c completion.Completion) template.HTML {
	const width, left, right, row = 560.0, 90.0, 30.0, 26.0
	total := float64(max(took(c.Times), 1))
	x := func(ms float64) float64 { return left + (width-left-right)*min(ms, total)/total }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg class="timeline" viewBox="0 0 %g %g" role="img" aria-label="timeline of an episode">`, width, 5*row+8)
	for i, lane := range []string{"sampling", "environment", "tools", "reward"} {
		fmt.Fprintf(&b, `<text class="tick" x="0" y="%.1f">%s</text><line class="grid" x1="%g" x2="%g" y1="%.1f" y2="%.1f"/>`,
			row*float64(i)+17, lane, left, width-right, row*float64(i+1), row*float64(i+1))
	}
	bar := func(lane int, class string, from, to float64, title string) {
		fmt.Fprintf(&b, `<rect class="%s" x="%.1f" y="%.1f" width="%.1f" height="%.1f"><title>%s</title></rect>`,
			class, x(from), row*float64(lane)+5, max(x(to)-x(from), 1), row-9, template.HTMLEscapeString(title))
	}
	var sampled []completion.Turn
	for _, t := range c.Turns {
		if t.Sampled {
			sampled = append(sampled, t)
		}
	}
	for i, t := range c.Times.Turns {
		asked, done, answered := float64(t.AskedMs), float64(t.SampledMs), float64(t.AnsweredMs)
		if done > 0 {
			bar(0, "a", asked, done, fmt.Sprintf("turn %d: sampled in %.0f ms", i+1, done-asked))
		}
		if answered > 0 {
			bar(1, "b", done, answered, fmt.Sprintf("turn %d: answered in %.0f ms", i+1, answered-done))
		}
		for n, ms := range t.ToolMs {
			bar(2, "c", done, done+float64(ms), fmt.Sprintf("turn %d, call %d: %d ms", i+1, n+1, ms))
		}
		if i < len(sampled) && sampled[i].Reward != 0 {
			fmt.Fprintf(&b, `<text class="reward" text-anchor="middle" x="%.1f" y="%.1f">%s</text>`, x(max(done, answered)), 3*row+17, output.Number(sampled[i].Reward))
		}
	}
	for _, share := range []float64{0, 0.5, 1} {
		fmt.Fprintf(&b, `<text class="tick" text-anchor="middle" x="%.1f" y="%.1f">%s s</text>`, x(share*total), 4*row+20, output.Number(share*total/1000))
	}
	b.WriteString(`</svg>`)
	return template.HTML(b.String()) //nolint:gosec // numbers, and escaped titles
}

// conversation is what was said, with tool calls.
func conversation(c completion.Completion) []said {
	var out []said
	for _, t := range c.Turns {
		if len(t.Messages) == 0 {
			who := "environment"
			if t.Sampled {
				who = "policy"
			}
			out = append(out, said{who, t.Text, t.Sampled})
		}
		for _, raw := range t.Messages {
			var m struct {
				Role      string          `json:"role"`
				Content   json.RawMessage `json:"content"`
				ToolCalls []struct {
					Function struct {
						Name      string          `json:"name"`
						Arguments json.RawMessage `json:"arguments"`
					} `json:"function"`
				} `json:"tool_calls"`
			}
			_ = json.Unmarshal(raw, &m) // a message of another form is shown as far as it is known
			text := plain(m.Content)
			for _, call := range m.ToolCalls {
				text = strings.TrimLeft(fmt.Sprintf("%s\n%s(%s)", text, call.Function.Name, plain(call.Function.Arguments)), "\n")
			}
			if t.Sampled {
				m.Role = "policy"
			}
			out = append(out, said{m.Role, text, t.Sampled})
		}
	}
	return out
}

// plain is the text of a JSON string, and other JSON as it is.
func plain(raw json.RawMessage) string {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text
	}
	return string(raw)
}
