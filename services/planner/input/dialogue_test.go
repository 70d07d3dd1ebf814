package input

import (
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/services/planner/problem"
)

// TestRowsOfMessages checks the planner with the golden vectors that the workers also use.
func TestRowsOfMessages(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../../schemas/golden/dialogue_rows.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Name    string
		Fields  []string
		Row     json.RawMessage
		Plain   map[string]any
		Problem string
	}
	if err := json.Unmarshal(data, &vectors); err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		p := Preference{Completion: v.Fields[0]}
		if len(v.Fields) == 2 {
			p = Preference{Chosen: v.Fields[0], Rejected: v.Fields[1]}
		}
		var problems problem.List
		d := newRowCheck(&Dataset{PromptField: "prompt", Preference: p, ChatTemplate: true}, &problems)
		var fields map[string]json.RawMessage
		if err := json.Unmarshal(v.Row, &fields); err != nil {
			t.Fatal(err)
		}
		ok := d.plain(v.Row, fields)
		message := ""
		if found := problems.Sorted(); len(found) > 0 {
			message = found[0].GetMessage()
		}
		if ok == (v.Problem != "") || message != v.Problem {
			t.Errorf("%s: got %v, %q; want %q", v.Name, ok, message, v.Problem)
		}
		if v.Problem != "" {
			continue
		}
		whole, _ := json.Marshal(fields)
		var got map[string]any
		if err := json.Unmarshal(whole, &got); err != nil || !reflect.DeepEqual(got, v.Plain) {
			t.Errorf("%s: got %s, want %v", v.Name, whole, v.Plain)
		}
	}
}

func TestAConversationNeedsAChatTemplate(t *testing.T) {
	t.Parallel()
	row := `{"chosen": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], "rejected": "3"}`
	if _, problems := preferences(t, row, Preference{Chosen: "chosen", Rejected: "rejected"}); !strings.Contains(problems, "`chosen` is a conversation, which needs a chat template") {
		t.Error(problems)
	}
}
