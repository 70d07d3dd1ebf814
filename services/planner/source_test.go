package planner

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	planformat "github.com/rollout-rl/rollout/libs/plan"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// write writes the files of a project.
func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// inputOf is the input of a role, and the rows that a run reads.
func inputOf(t *testing.T, s *Server, dir string, plan *planv1.Plan, role planv1.InputRole) (*planv1.Input, []string) {
	t.Helper()
	for _, in := range plan.GetInputs() {
		if in.GetRole() != role {
			continue
		}
		data, err := os.ReadFile(s.inputs.Locate(dir, in))
		if err != nil {
			t.Fatal(err)
		}
		return in, strings.Split(strings.TrimSpace(string(data)), "\n")
	}
	t.Fatal("the plan has no such input")
	return nil, nil
}

func prompts(lengths ...int) string {
	var b strings.Builder
	for i, n := range lengths {
		fmt.Fprintf(&b, `{"prompt": %q, "answer": "%d"}`+"\n", strings.Repeat("1", n), i)
	}
	return b.String()
}

// The model has 32 positions and a completion 6 tokens, so a prompt may have 26.
func TestOverlongRows(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, exact)
	write(t, dir, map[string]string{"train.jsonl": prompts(3, 27, 26, 40, 5)})
	plan := create(t, s, dir)
	if p := plan.GetProblems(); len(p) != 1 || p[0].GetReason() != "CONTEXT_TOO_LONG" || !strings.Contains(p[0].GetFix(), "write `overlong = \"drop\"`") {
		t.Fatalf("%v", p)
	}
	plan = create(t, s, dir, `data.overlong="drop"`)
	in, rows := inputOf(t, s, dir, plan.GetPlan(), planv1.InputRole_INPUT_ROLE_TRAIN_DATA)
	if in.GetRows() != 3 || in.GetDropped() != 2 || in.GetPath() != "train.jsonl" || in.GetSources()[0].GetFiles()[0].GetPath() != "train.jsonl" {
		t.Errorf("%v", in)
	}
	if want := strings.Split(strings.TrimSpace(prompts(3, 26, 5)), "\n"); len(rows) != 3 || rows[2] != strings.Replace(want[2], `"2"`, `"4"`, 1) {
		t.Errorf("rows %q", rows)
	}
	if again := create(t, s, dir, `data.overlong="drop"`); again.GetPlan().GetPlanId() != plan.GetPlan().GetPlanId() {
		t.Error("the same inputs give another plan")
	}
	plan = create(t, s, dir, `data.overlong="truncate"`)
	in, rows = inputOf(t, s, dir, plan.GetPlan(), planv1.InputRole_INPUT_ROLE_TRAIN_DATA)
	if in.GetRows() != 5 || in.GetTruncated() != 2 || in.GetDropped() != 0 || len(in.GetSources()) != 0 || len(rows) != 5 {
		t.Errorf("%v", in)
	}
	write(t, dir, map[string]string{"train.jsonl": prompts(27, 40)})
	if p := create(t, s, dir, `data.overlong="drop"`).GetProblems(); len(p) != 1 || p[0].GetReason() != "CONTEXT_TOO_LONG" {
		t.Errorf("no row is left: %v", p)
	}
}

func TestRowsThatRepeatAndAreFewAreWarnedOf(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, exact)
	write(t, dir, map[string]string{"train.jsonl": prompts(1, 2, 1, 1)})
	got := slices.DeleteFunc(create(t, s, dir, "train.groups_per_step=5").GetWarnings(), func(p *planv1.Problem) bool { return p.GetReason() != problem.BadRow })
	if len(got) != 2 || got[0].GetLine() != 3 || got[0].GetMessage() != "2 rows repeat the prompt of an earlier row; the first repeats line 1" ||
		got[1].GetMessage() != "a step takes 5 rows, but train.jsonl has 4: a step has the same row several times" {
		t.Errorf("%v", got)
	}
}

func TestOtherFormatsAreMadeIntoRows(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, exact)
	write(t, dir, map[string]string{
		"a.csv": "prompt,answer\n1+1=,02\n\"1+\n1\",3\n", "parts/1.jsonl": prompts(1), "parts/2.jsonl": prompts(2, 3),
		"split/train.jsonl": prompts(4), "split/test.jsonl": prompts(5, 6),
	})
	for path, want := range map[string]string{
		"a.csv":         `{"prompt": "1+1=", "answer": "02"} {"prompt": "1+\n1", "answer": "3"}`,
		"parts/*.jsonl": `{"prompt": "1", "answer": "0"} {"prompt": "11", "answer": "0"} {"prompt": "111", "answer": "1"}`,
		"split":         `{"prompt": "1111", "answer": "0"}`,
	} {
		plan := create(t, s, dir, fmt.Sprintf("data.train=%q", path))
		if len(plan.GetProblems()) > 0 {
			t.Errorf("%s: %v", path, plan.GetProblems())
			continue
		}
		in, rows := inputOf(t, s, dir, plan.GetPlan(), planv1.InputRole_INPUT_ROLE_TRAIN_DATA)
		if got := strings.Join(rows, " "); got != want || in.GetRows() != uint64(len(rows)) || len(in.GetSources()) != 1 {
			t.Errorf("%s: %s, want %s; %v", path, got, want, in)
		}
	}
}

// A plan is verified without its rows: they are made again. A changed source is reported.
func TestRowsAreVerifiedAndMadeAgain(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, exact)
	write(t, dir, map[string]string{"a.csv": "prompt,answer\n1+1=,2\n"})
	plan := create(t, s, dir, `data.train="a.csv"`)
	in, _ := inputOf(t, s, dir, plan.GetPlan(), planv1.InputRole_INPUT_ROLE_TRAIN_DATA)
	verify := func(folder planformat.Inputs) *planv1.VerifyPlanResponse {
		t.Helper()
		verified, err := s.VerifyPlan(t.Context(), &planv1.VerifyPlanRequest{
			Lock: plan.GetLock(), File: "plan.lock", BaseDir: dir, InputsDirectory: string(folder),
		})
		if err != nil {
			t.Fatal(err)
		}
		return verified
	}
	if err := os.Remove(s.inputs.Rows(in.GetDigest())); err != nil {
		t.Fatal(err)
	}
	if got := verify("/nowhere"); len(got.GetProblems()) > 0 || got.GetInputsDirectory() != string(s.inputs) {
		t.Errorf("%v", got)
	}
	own := planformat.InputsOf(t.TempDir())
	write(t, string(own), map[string]string{"rows/" + in.GetDigest() + ".jsonl": "changed"})
	if got := verify(own); len(got.GetProblems()) != 1 || got.GetProblems()[0].GetReason() != "INPUT_CHANGED" {
		t.Errorf("rows of a run that were changed: %v", got.GetProblems())
	}
	write(t, dir, map[string]string{"a.csv": "prompt,answer\n1+1=,3\n"})
	if got := verify("").GetProblems(); len(got) != 1 || got[0].GetReason() != "INPUT_CHANGED" || got[0].GetFile() != "a.csv" {
		t.Errorf("a changed source: %v", got)
	}
}

func TestMixturesHaveExactCounts(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, exact)
	write(t, dir, map[string]string{"a.csv": "question,answer\n" + strings.Repeat("1+1=,2\n", 9), "b.jsonl": prompts(1, 2, 3)})
	text := strings.Replace(configText, `train = "train.jsonl"`, "[data.train_mix.a]\npath = \"a.csv\"\nweight = 2\nprompt_field = \"question\"\n[data.train_mix.b]\npath = \"b.jsonl\"\nweight = 1", 1)
	counts := func(set ...string) (string, *planv1.CreatePlanResponse) {
		response, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{Toml: []byte(text), File: "run.toml", BaseDir: dir, Set: set}})
		if err != nil {
			t.Fatal(err)
		}
		if len(response.GetProblems()) > 0 {
			return response.GetProblems()[0].GetField() + ": " + response.GetProblems()[0].GetMessage(), response
		}
		in, rows := inputOf(t, s, dir, response.GetPlan(), planv1.InputRole_INPUT_ROLE_TRAIN_DATA)
		var names []string
		for _, source := range in.GetSources() {
			names = append(names, fmt.Sprintf("%s %d of %d", source.GetName(), source.GetTaken(), source.GetRows()))
		}
		return fmt.Sprintf("%s: %s, %d", in.GetPath(), strings.Join(names, ", "), len(rows)), response
	}
	for want, set := range map[string][]string{
		"data.train_mix: a 6 of 9, b 3 of 3, 9":                          nil,
		"data.train_mix: a 9 of 9, b 5 of 3, 14":                         {`data.mix_until="all_exhausted"`},
		"data.train_mix.b.path: no file matches " + dir + "/gone/*.csv":  {`data.train_mix.b.path="gone/*.csv"`},
		"data.train: `data.train` and `[data.train_mix.*]` are both set": {`data.train="b.jsonl"`},
	} {
		if got, _ := counts(set...); got != want {
			t.Errorf("%v: %q, want %q", set, got, want)
		}
	}
	_, one := counts()
	_, same := counts()
	_, other := counts("seed=2")
	first, _ := inputOf(t, s, dir, one.GetPlan(), planv1.InputRole_INPUT_ROLE_TRAIN_DATA)
	seeded, _ := inputOf(t, s, dir, other.GetPlan(), planv1.InputRole_INPUT_ROLE_TRAIN_DATA)
	if one.GetPlan().GetPlanId() != same.GetPlan().GetPlanId() || first.GetDigest() == seeded.GetDigest() {
		t.Error("the order does not follow from the seed")
	}
}

// A model that is not here is looked up on the hub, which the error says.
func TestAModelOfTheHub(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status         int
		header, reason string
	}{
		"unknown": {http.StatusNotFound, "RepoNotFound", "HUB_NOT_FOUND"},
		"gated":   {http.StatusForbidden, "GatedRepo", "HUB_DENIED"},
		"down":    {http.StatusServiceUnavailable, "", "HUB_UNREACHABLE"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("X-Error-Code", c.header)
				w.WriteHeader(c.status)
			}))
			defer hub.Close()
			cfg, dir := prober(t), project(t, exact)
			cfg.Env = append(slices.Clone(cfg.Env), "HF_ENDPOINT="+hub.URL, "HF_HOME="+t.TempDir())
			s, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			p := create(t, s, dir, `model.path="Qwen/Qwen2.5-0.5B"`).GetProblems()
			if len(p) != 1 || p[0].GetReason() != c.reason || p[0].GetField() != "model.path" || p[0].GetFix() == "" {
				t.Errorf("%v", p)
			}
		})
	}
}

// hubModel is a hub with one model, whose files it serves.
func hubModel(t *testing.T, name string, files map[string]string) (address string, asked func() []string) {
	t.Helper()
	const commit = "0123456789012345678901234567890123456789"
	var lock sync.Mutex
	var fetched []string
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/api/models/"+name) {
			var siblings, tree []map[string]any
			for file, text := range files {
				siblings = append(siblings, map[string]any{"rfilename": file})
				tree = append(tree, map[string]any{"type": "file", "path": file, "size": len(text), "oid": file})
			}
			if strings.Contains(r.URL.Path, "/tree/") {
				_ = json.NewEncoder(w).Encode(tree)
				return
			}
			_ = json.NewEncoder(w).Encode(map[string]any{"id": name, "sha": commit, "siblings": siblings})
			return
		}
		file := strings.TrimPrefix(r.URL.Path, "/"+name+"/resolve/"+commit+"/")
		text, ok := files[file]
		if !ok {
			http.NotFound(w, r)
			return
		}
		lock.Lock()
		fetched = append(fetched, file)
		lock.Unlock()
		w.Header().Set("X-Repo-Commit", commit)
		w.Header().Set("ETag", fmt.Sprintf("%q", file))
		w.Header().Set("Content-Length", strconv.Itoa(len(text)))
		if r.Method != http.MethodHead {
			_, _ = w.Write([]byte(text))
		}
	}))
	t.Cleanup(hub.Close)
	return hub.URL, func() []string {
		lock.Lock()
		defer lock.Unlock()
		slices.Sort(fetched)
		return slices.Compact(fetched)
	}
}

// The code of a policy is downloaded with it, and that of a language model is not.
func TestAPolicyOfTheHubIsDownloadedWithItsCode(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		set  []string
		want []string
	}{
		"policy":         {[]string{`multistep.environment="walk.py:Walk"`}, []string{"config.json", "policy.py"}},
		"language model": {nil, []string{"config.json"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hub, asked := hubModel(t, "us/policy", map[string]string{"config.json": "{}", "policy.py": "", "README.md": ""})
			cfg, dir := prober(t), project(t, exact)
			cfg.Env = append(slices.Clone(cfg.Env), "HF_ENDPOINT="+hub, "HF_HOME="+t.TempDir())
			s, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			found := create(t, s, dir, append(c.set, `model.path="us/policy"`)...)
			if got := asked(); !slices.Equal(got, c.want) {
				t.Errorf("downloaded are %v: %v", got, found.GetProblems())
			}
		})
	}
}
