package config

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"google.golang.org/protobuf/proto"
)

const good = `name = "addition"

[model]
path = "model"

[data]
train = "train.jsonl"

[sampling]
group_size = 8

[reward]
plugin = "reward.py:exact"

[algorithm.grpo]

[train]
steps = 4
`

func read(t *testing.T, text string, set ...string) *Reading {
	t.Helper()
	r, err := NewReader()
	if err != nil {
		t.Fatal(err)
	}
	return r.Read(&planv1.ConfigSource{Toml: []byte(text), File: "run.toml", Set: set})
}

// problems are `line:column reason field <text>`, one a line.
func problems(r *Reading) string {
	var b strings.Builder
	for _, p := range r.Sorted() {
		fmt.Fprintf(&b, "%s:%d:%d %s %s <%s>\n", p.GetFile(), p.GetLine(), p.GetColumn(), p.GetReason(), p.GetField(), p.GetText())
	}
	return b.String()
}

// A server of vLLM takes weights from any client, so it is on this host or behind TLS, and has one
// worker.
func TestEngineURL(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		set  []string
		want string // part of the only problem; empty: none
	}{
		{"loopback", []string{"engine.kind=vllm", "engine.url=http://127.0.0.1:8000"}, ""},
		{"localhost", []string{"engine.kind=vllm", "engine.url=http://localhost:8000/"}, ""},
		{"IPv6", []string{"engine.kind=vllm", "engine.url=http://[::1]:8000"}, ""},
		{"TLS", []string{"engine.kind=vllm", "engine.url=https://engine.example"}, ""},
		{"another host", []string{"engine.kind=vllm", "engine.url=http://10.0.0.7:8000"}, "`engine.url` must have a loopback address, or begin with `https://`"},
		{"a name that only begins like one", []string{"engine.kind=vllm", "engine.url=http://127.0.0.1.example:8000"}, "must have a loopback address"},
		{"a user before another host", []string{"engine.kind=vllm", "engine.url=http://localhost:1@engine.example"}, "must have a loopback address"},
		{"another scheme", []string{"engine.kind=vllm", "engine.url=unix:/run/vllm"}, "engine.url"},
		{"another engine", []string{"engine.url=http://127.0.0.1:8000"}, "`engine.url` needs `engine.kind = \"vllm\"`"},
		{"workers", []string{"engine.kind=vllm", "engine.url=http://127.0.0.1:8000", "engine.workers=2"}, "`engine.workers` must be 1 with `engine.url`"},
	} {
		found := read(t, good, c.set...).Sorted()
		if c.want == "" {
			if len(found) > 0 {
				t.Errorf("%s: %v", c.name, found)
			}
			continue
		}
		if len(found) != 1 || !strings.Contains(found[0].GetMessage()+found[0].GetField(), c.want) || found[0].GetFix() == "" {
			t.Errorf("%s: got %v, want %q", c.name, found, c.want)
		}
	}
}

func TestPlanIsNotAConfig(t *testing.T) {
	t.Parallel()
	r := read(t, "{\n  \"config\": {\n    \"name\": \"a\"\n  }\n}\n", "train.steps=3")
	if got, want := problems(r), "run.toml:1:1 SYNTAX  <{>\n"; got != want {
		t.Fatalf("%s, want %s", got, want)
	}
	if fix := r.Sorted()[0].GetFix(); !strings.Contains(fix, "--plan") {
		t.Errorf("fix: %s", fix)
	}
}

func TestGoodConfigGetsItsDefaults(t *testing.T) {
	t.Parallel()
	r := read(t, good)
	if !r.Problems.Empty() {
		t.Fatal(problems(r))
	}
	c := r.Config
	if !c.GetDeterministic() || c.GetMode() != "sync" || c.GetTrain().GetLearningRate() != 1e-6 || c.GetEngine().GetSlots() != 64 {
		t.Errorf("defaults: %v", c)
	}
	if c.GetEval() == nil || c.GetAlgorithm().GetSft() != nil {
		t.Errorf("tables: %v", c)
	}
	if c = read(t, good, `mode="async"`).Config; c.Deterministic == nil || c.GetDeterministic() {
		t.Error("an async run is deterministic")
	}
	sft := strings.NewReplacer("[algorithm.grpo]", "[algorithm.sft]", "[reward]", "", `plugin = "reward.py:exact"`, "", "group_size = 8", "").Replace(good)
	if r = read(t, sft); !r.Problems.Empty() || r.Config.Reward != nil {
		t.Errorf("SFT without a reward: %s %v", problems(r), r.Config)
	}
}

// A run whose agents are outside has no reward of its own, and can't promise bits.
func TestExternalEnvironment(t *testing.T) {
	t.Parallel()
	external := strings.NewReplacer("[reward]", "", `plugin = "reward.py:exact"`, "").Replace(good)
	set := []string{`environment.kind="external"`, "eval.every_steps=0"}
	r := read(t, external, set...)
	if !r.Problems.Empty() || r.Config.Deterministic == nil || r.Config.GetDeterministic() || r.Config.GetLimits().GetAgentSeconds() != 600 {
		t.Fatalf("%s%v", problems(r), r.Config)
	}
	for name, c := range map[string]struct{ text, set, want string }{
		"reward":        {good, "seed=0", "`[reward]` must be absent"},
		"evaluation":    {external, "eval.every_steps=1", "`eval.every_steps` must be 0"},
		"deterministic": {external, "deterministic=true", "`deterministic` must be false"},
		"smaller":       {external, "limits.min_group_size=2", "`limits.min_group_size` must be 0"},
		"rows":          {strings.NewReplacer("[algorithm.grpo]", "[algorithm.sft]", "group_size = 8", "").Replace(external), "seed=0", "needs an algorithm that samples"},
	} {
		r := read(t, c.text, append(set, c.set)...)
		if list := r.Sorted(); len(list) != 1 || !strings.Contains(list[0].GetMessage(), c.want) {
			t.Errorf("%s: %v", name, list)
		}
	}
}

// An environment of the user's has a path and arguments of any form, and scores its episodes.
func TestPythonEnvironment(t *testing.T) {
	t.Parallel()
	text := strings.NewReplacer("[reward]", "", `plugin = "reward.py:exact"`, "").Replace(good)
	set := []string{`environment.kind="python"`, `environment.path="guess.py:Guess"`}
	r := read(t, text, append(set, "environment.args.highest=9", `environment.args.names=["a", 1.0, {b = true}]`)...)
	if got := r.Config.GetEnvironment(); !r.Problems.Empty() || got.GetArgs() != `{"highest":9,"names":["a",1.0,{"b":true}]}` || got.GetMaxTurns() != 16 {
		t.Fatalf("%s%v", problems(r), got)
	}
	if again := read(t, text, append(set, `environment.args='{"highest": 9}'`)...); again.Config.GetEnvironment().GetArgs() != `{"highest":9}` {
		t.Errorf("arguments as JSON: %s%v", problems(again), again.Config.GetEnvironment())
	}
	for name, c := range map[string]struct{ text, set, want string }{
		"reward":        {good, "seed=0", "`[reward]` must be absent"},
		"path":          {good, `environment.kind="single_turn"`, "`environment.path` must be set for"},
		"pattern":       {text, `environment.path="guess"`, "environment.path"},
		"credit":        {strings.Replace(text, "[algorithm.grpo]", "[algorithm.rloo]", 1), `environment.credit="turn"`, "its tokens have no rewards of their own"},
		"rows":          {strings.NewReplacer("[algorithm.grpo]", "[algorithm.sft]", "group_size = 8", "").Replace(text), "seed=0", "needs an algorithm that samples"},
		"smaller":       {text, "limits.min_group_size=9", "must not exceed `sampling.group_size`"},
		"alone":         {text, "limits.min_group_size=1", "must not be 1"},
		"date":          {text, "environment.args.day=1979-05-27", "which JSON can't hold"},
		"not a table":   {text, "environment.args=7", "`environment.args` is a table, got an integer"},
		"not an object": {text, `environment.args="[1]"`, "`environment.args` is a table, got a string"},
	} {
		r := read(t, c.text, append(set, c.set)...)
		if list := r.Sorted(); len(list) == 0 || !strings.Contains(list[0].GetMessage(), c.want) {
			t.Errorf("%s: %v", name, list)
		}
	}
}

// Reserved workers leave at least one that samples, and need evaluations that sample.
func TestWorkersForEvaluations(t *testing.T) {
	t.Parallel()
	set := []string{"eval.every_steps=5", `data.eval="eval.jsonl"`}
	if r := read(t, good, append(set, "engine.workers=3", "eval.workers=2")...); !r.Problems.Empty() || r.Config.GetEval().GetWorkers() != 2 {
		t.Fatal(problems(r))
	}
	for name, c := range map[string]struct {
		set  []string
		want string
	}{
		"all":           {append(set, "engine.workers=2", "eval.workers=2"), "`eval.workers` must be less than `engine.workers`"},
		"more":          {append(set, "eval.workers=2"), "`eval.workers` must be less than `engine.workers`"},
		"no evaluation": {[]string{"engine.workers=2", "eval.workers=1"}, "`eval.workers` needs evaluations that sample completions"},
	} {
		r := read(t, good, c.set...)
		if list := r.Sorted(); len(list) != 1 || !strings.Contains(list[0].GetMessage(), c.want) {
			t.Errorf("%s: %v", name, list)
		}
	}
}

func TestNumbers(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{
		"sampling.temperature=1":              "",
		"sampling.temperature=1e0":            "",
		"sampling.temperature=0x1":            "",
		"sampling.temperature=nan":            "OUT_OF_RANGE",
		"sampling.temperature=inf":            "OUT_OF_RANGE",
		"sampling.temperature=1979-05-27":     "WRONG_TYPE",
		"train.steps=1_000":                   "",
		"train.steps=0xff":                    "",
		"train.steps=4.0":                     "WRONG_TYPE",
		"train.steps=-0":                      "OUT_OF_RANGE",
		"train.steps=99999999999999999999999": "OUT_OF_RANGE",
		"seed=9007199254740991":               "",
		"seed=9007199254740992":               "OUT_OF_RANGE",
		"train.groups_per_step=4294967296":    "OUT_OF_RANGE",
	} {
		r := read(t, good, value)
		got := ""
		if list := r.Sorted(); len(list) > 0 {
			got = list[0].GetReason()
		}
		if got != want {
			t.Errorf("%s: %q, want %q: %s", value, got, want, problems(r))
		}
	}
	if got := read(t, good, "train.steps=1_000").Config.GetTrain().GetSteps(); got != 1000 {
		t.Errorf("1_000 reads as %d", got)
	}
	if got := read(t, good, "train.max_grad_norm=inf").Config.GetTrain().GetMaxGradNorm(); !math.IsInf(got, 1) {
		t.Errorf("inf reads as %v", got)
	}
}

func TestOverrides(t *testing.T) {
	t.Parallel()
	r := read(t, good, "mode=async", "staleness.max_steps=2", `sampling.stop=["a", "b"]`, "algorithm.grpo.clip_low=0.1", "model={path='m'}", "data.eval = data/eval set.jsonl ")
	if !r.Problems.Empty() {
		t.Fatal(problems(r))
	}
	c := r.Config
	got := []any{c.GetMode(), c.GetStaleness().GetMaxSteps(), c.GetSampling().GetStop(), c.GetAlgorithm().GetGrpo().GetLoss().GetClipLow(), c.GetModel().GetPath(), c.GetData().GetEval()}
	want := []any{"async", uint32(2), []string{"a", "b"}, 0.1, "m", "data/eval set.jsonl"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got := problems(read(t, good, "x", "[a]=3", "train.steps=", "sampling.stop=[1]", "sampling.stop=['']")); got != "--set:1:1 SYNTAX  <x>\n--set:2:4 SYNTAX  <=>\n"+
		"--set:3:13 WRONG_TYPE train.steps <>\n--set:5:15 BAD_VALUE sampling.stop <['']>\n" {
		t.Error(got)
	}
}

// A suggestion for a value of another type can be followed as it is.
func TestSuggestionsForListsAndTexts(t *testing.T) {
	t.Parallel()
	for set, want := range map[string]string{
		"lora={rank=8, targets='q_proj'}":     "lora.targets: write `targets = ['q_proj']`",
		"lora.targets=q_proj":                 "lora.targets: write `targets = [\"q_proj\"]`",
		"lora.targets=[q_proj, v_proj]":       "lora.targets: write `targets = [\"q_proj\", \"v_proj\"]`",
		`data.train=["a.jsonl", "b.jsonl"]`:   "data.train: write one glob, such as `train = \"data/*.jsonl\"`, or a table [data.train_mix.NAME] with `path` for each file",
		`model.path=["a", "b"]`:               "model.path: write one string, such as `path = \"models/tiny\"`",
		`data.train_mix={a={path="b.jsonl"}}`: "data.train: remove `data.train`, or write it as a table [data.train_mix.NAME] with `path`",
	} {
		text := good
		if strings.HasPrefix(set, "lora.") {
			text += "[lora]\nrank = 8\n"
		}
		if got := suggestions(read(t, text, set)); got != want {
			t.Errorf("%s:\n got %s\nwant %s", set, got, want)
		}
	}
}

func TestProblemsAreInTheOrderOfTheFile(t *testing.T) {
	t.Parallel()
	text := "\ufeff# comment\r\n\tnaem = \"x\"\r\n[model]\r\npath = \"m\"\r\n\"größe\" = 1\r\n[data]\r\n  train = 3\r\n[algorithm]\r\n[train]\r\nsteps = 0\r\n"
	want := `run.toml:2:2 UNKNOWN_KEY naem <naem>
run.toml:5:1 UNKNOWN_KEY model.größe <"größe">
run.toml:7:11 WRONG_TYPE data.train <3>
run.toml:8:1 MISSING_KEY algorithm <[algorithm]>
run.toml:10:9 OUT_OF_RANGE train.steps <0>
`
	if diff := cmp.Diff(want, problems(read(t, text))); diff != "" {
		t.Error(diff)
	}
}

// TestContract compares the annotations of the contract with the code that reads them.
func TestContract(t *testing.T) {
	t.Parallel()
	rules := expressions()
	_, _, byAlgorithm := defaultTables(t)
	for _, rule := range traitRules {
		rules[rule.id] = rule.message
		for _, path := range rule.keys {
			if !strings.HasPrefix(path, "algorithm.*.") && keyAt(path) == nil {
				t.Errorf("the rule %s reads %s, which is not a key", rule.id, path)
			}
		}
	}
	for id := range rules {
		if fixes[id] == "" {
			t.Errorf("the rule %s has no fix", id)
		}
	}
	for id := range fixes {
		if rules[id] == "" {
			t.Errorf("the rule %s does not exist", id)
		}
	}
	walk(root(), "", func(path string, field key) {
		meta := metaOf(field)
		if field.Message() != nil || field.IsList() || path == "deterministic" {
			return
		}
		chosen := rulesOf(field).GetRequired() || meta.GetChoice() != ""
		if meta.GetDefault() == "" && !chosen && !meta.GetAbsent() && byAlgorithm[path] == nil {
			t.Errorf("%s has no default, is not required, and its absence means nothing", path)
		}
		if chosen && meta.GetExample() == "" {
			t.Errorf("%s is required and has no example", path)
		}
		for _, text := range []string{field.defaultText(), meta.GetDefault(), meta.GetExample()} {
			if text != "" {
				literal(field, text) // panics if the text is invalid
			}
		}
	})
}

// FuzzRead checks that every failure of the reader is a problem with a place.
func FuzzRead(f *testing.F) {
	for _, text := range []string{good, "", "=", "[", "[[a]]", "a.b.c = {d = [1, {e = 2}]}", "[a]\n[a.b]\n[a]\na = 1", "x = \"\"\"\n", "a = 1\na.b = 2", "\xff = 1", "model = 3\n[model]\npath = 1"} {
		f.Add(text, "train.steps=1")
		f.Add(good, text)
	}
	r, err := NewReader()
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text, set string) {
		reading := r.Read(&planv1.ConfigSource{Toml: []byte(text), File: "run.toml", Set: []string{set}})
		for _, p := range reading.Sorted() {
			if p.GetMessage() == "" || p.GetLine() == 0 || p.GetColumn() == 0 {
				t.Errorf("a problem without message or place: %v", p)
			}
		}
	})
}

func TestInvalidUTF8IsOneProblem(t *testing.T) {
	t.Parallel()
	got := read(t, "# caf\xc3\xa9\nname = \"caf\xe9 \xff\"\n").Sorted()
	if len(got) != 1 || !proto.Equal(got[0], &planv1.Problem{
		Reason: "SYNTAX", File: "run.toml", Line: 2, Column: 12, Text: "\uFFFD", Message: "the byte 0xe9 is not UTF-8", Fix: "save the file as UTF-8",
		Excerpt: "name = \"caf\uFFFD \uFFFD\"",
	}) {
		t.Errorf("problems %s", got)
	}
	if _, err := proto.Marshal(got[0]); err != nil {
		t.Error(err)
	}
}
