package planner

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

func TestPlanPinsTheTeacher(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, "def exact(samples): return [1.0 for _ in samples]\n")
	teacher := filepath.Join(dir, "teacher")
	ask := func() *planv1.CreatePlanResponse { return taught(t, s, dir, "teacher") }
	report := func(reason string) {
		t.Helper()
		if p := ask().GetProblems(); len(p) != 1 || p[0].GetReason() != reason || p[0].GetField() != "algorithm.distillation.teacher" || p[0].GetLine() == 0 {
			t.Errorf("want %s, got %v", reason, p)
		}
	}
	report("MISSING_FILE")
	if err := os.CopyFS(teacher, os.DirFS(filepath.Join(dir, "model"))); err != nil {
		t.Fatal(err)
	}
	pinned := 0
	for _, in := range ask().GetPlan().GetInputs() {
		if strings.HasPrefix(in.GetPath(), "teacher/") && in.GetRole() == planv1.InputRole_INPUT_ROLE_MODEL {
			pinned++
		}
	}
	if pinned != 3 {
		t.Errorf("%d files of the teacher are pinned", pinned)
	}
	for folder, size := range map[string]string{"model": "4", "teacher": "5"} {
		if err := os.WriteFile(filepath.Join(dir, folder, "config.json"), []byte(`{"n_positions": 32, "vocab_size": `+size+`}`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	report("BAD_MODEL")
}

// A reward model has a score head and no head for tokens.
func TestRewardModelCannotBeATeacher(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, exact)
	if err := os.CopyFS(filepath.Join(dir, "scorer"), os.DirFS(filepath.Join(dir, "model"))); err != nil {
		t.Fatal(err)
	}
	config := `{"n_positions": 32, "architectures": ["LlamaForSequenceClassification"]}`
	if err := os.WriteFile(filepath.Join(dir, "scorer/config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	problems := taught(t, s, dir, "scorer").GetProblems()
	if len(problems) != 1 || problems[0].GetReason() != "BAD_MODEL" || problems[0].GetField() != "algorithm.distillation.teacher" || problems[0].GetLine() == 0 ||
		problems[0].GetMessage() != "scorer is a reward model (LlamaForSequenceClassification), which can't generate completions" {
		t.Errorf("%v", problems)
	}
}

// A teacher with the weights of the policy gives a loss of 0, which is a warning.
func TestTeacherWithTheWeightsOfThePolicyIsAWarning(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, exact)
	for name, weight := range map[string]string{"copy": "0123", "other": "0124"} {
		folder := filepath.Join(dir, name)
		if err := os.CopyFS(folder, os.DirFS(filepath.Join(dir, "model"))); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(folder, "model.safetensors")
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.Remove(file), os.WriteFile(filepath.Join(folder, "weights.safetensors"), append(data[:len(data)-4], weight...), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for name, warned := range map[string]bool{"model": true, "copy": true, "other": false} {
		got := taught(t, s, dir, name)
		if got.GetPlan() == nil || len(got.GetWarnings()) > 0 != warned {
			t.Errorf("%s: %v", name, got)
			continue
		}
		if w := got.GetWarnings(); warned && (w[0].GetField() != "algorithm.distillation.teacher" || w[0].GetLine() == 0 ||
			!strings.Contains(w[0].GetMessage(), "the loss is 0 and nothing is learned")) {
			t.Errorf("%s: %v", name, w)
		}
	}
}

const exact = "def exact(samples):\n    return [1.0] * len(samples)\n"

// taught plans a distillation from a teacher's folder.
func taught(t *testing.T, s *Server, dir, teacher string) *planv1.CreatePlanResponse {
	t.Helper()
	text := strings.Replace(configText, "[algorithm.grpo]", fmt.Sprintf("[algorithm.distillation]\nteacher = %q", teacher), 1)
	response, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{Toml: []byte(text), File: "run.toml", BaseDir: dir, Set: []string{"train.groups_per_step=1"}}})
	if err != nil {
		t.Fatal(err)
	}
	return response
}

// endpoint is a server that echoes what `rollout.teacher` asks: each token with its text and a
// log-probability.
func endpoint(t *testing.T, answer func(tokens []int) (int, string)) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var asked struct {
			Prompt []int `json:"prompt"`
		}
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil || r.URL.Path != "/v1/completions" {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		code, text := answer(asked.Prompt)
		w.WriteHeader(code)
		_, _ = w.Write([]byte(text))
	}))
	t.Cleanup(s.Close)
	return s.URL + "/v1"
}

// byID answers as vLLM does, with the ids moved by so many.
func byID(move int) func(tokens []int) (int, string) {
	return func(tokens []int) (int, string) {
		entries := []string{"null"}
		for _, token := range tokens[1:] {
			entries = append(entries, fmt.Sprintf(`{"%d": {"logprob": -1.5}}`, token+move))
		}
		return http.StatusOK, `{"choices": [{"prompt_logprobs": [` + strings.Join(entries, ",") + `]}]}`
	}
}

func TestPlanCallsTheEndpointOfTheTeacher(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer func([]int) (int, string)
		lines  string // in addition to base_url and model
		reason string // "": a plan
	}{
		"equal tokens":     {answer: byID(0)},
		"other tokens":     {answer: byID(1), reason: "TEACHER_TOKENS_DIFFER"},
		"no such model":    {answer: func([]int) (int, string) { return http.StatusNotFound, "no model" }, reason: "TEACHER_REFUSED"},
		"server error":     {answer: func([]int) (int, string) { return http.StatusInternalServerError, "oh" }, reason: "TEACHER_UNREACHABLE"},
		"no logprobs":      {answer: func([]int) (int, string) { return http.StatusOK, `{"choices": [{}]}` }, reason: "TEACHER_BAD_ANSWER"},
		"a key's variable": {answer: byID(0), lines: "api_key = \"env:NO_SUCH_KEY\"\n", reason: "SECRET_REFERENCE"},
		"a key itself":     {answer: byID(0), lines: "api_key = \"sk-123\"\n", reason: "BAD_VALUE"},
		"a folder too":     {answer: byID(0), lines: "[algorithm.distillation]\nteacher = \"model\"\n", reason: "CONFLICT"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, dir := server(t), project(t, "def exact(samples): return [1.0 for _ in samples]\n")
			table := fmt.Sprintf("[algorithm.distillation.endpoint]\nbase_url = %q\nmodel = \"teacher\"\nprotocol = \"prompt_logprobs\"\n%s", endpoint(t, c.answer), c.lines)
			text := strings.Replace(configText, "[algorithm.grpo]", table, 1)
			response, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{Toml: []byte(text), File: "run.toml", BaseDir: dir}})
			if err != nil {
				t.Fatal(err)
			}
			problems := response.GetProblems()
			if c.reason == "" && len(problems) == 0 && response.GetPlan() != nil {
				return
			}
			if len(problems) != 1 || problems[0].GetReason() != c.reason || !strings.HasPrefix(problems[0].GetField(), "algorithm.distillation") || problems[0].GetLine() == 0 {
				t.Errorf("want %q, got %v", c.reason, problems)
			}
		})
	}
}

func TestEndpointOfTheTeacherNeedsTemperatureOne(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, "")
	text := strings.Replace(configText, "[algorithm.grpo]", "[algorithm.distillation.endpoint]\nbase_url = \"http://h/v1\"\nmodel = \"t\"", 1)
	response, err := s.ValidateConfig(t.Context(), &planv1.ValidateConfigRequest{Source: &planv1.ConfigSource{
		Toml: []byte(text), File: "run.toml", BaseDir: dir, Set: []string{"sampling.temperature=0.7"},
	}})
	if p := response.GetProblems(); err != nil || len(p) != 1 || !strings.Contains(p[0].GetMessage(), "`sampling.temperature` must be 1.0") {
		t.Errorf("%v, %v", p, err)
	}
}
