package episodes

import "testing"

func TestMessagesAreShownByTheirText(t *testing.T) {
	t.Parallel()
	for want, messages := range map[string][]string{
		"guess 1-5:":    {`{"role": "user", "content": "guess 1-5:"}`},
		"lower:\nagain": {`{"role": "user", "content": "lower:"}`, `{"role": "user", "content": "again"}`},
		`{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}`: {`{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}`},
		`{"role": "user", "content": [{"type": "text"}]}`:                   {`{"role": "user", "content": [{"type": "text"}]}`},
		"not JSON": {"not JSON"},
	} {
		if got := said(messages); got != want {
			t.Errorf("%q is shown as %q", messages, got)
		}
	}
}
