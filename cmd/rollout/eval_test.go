package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

const suitesText = `[data]
prompt_field = "question"
[reward]
plugin = "reward.py:score"
[eval.suites.sums]
data = "test.jsonl"
samples = 2
limit = 4
seed = 3
metrics = ["mean", "pass@2", "best@1"]
[eval.suites.chat]
data = "test.jsonl"
metrics = ["win_rate"]
baseline = "base.jsonl"
cluster = "topic"
reward = { expression = "1.0" }
`

const evalEnd = `{"event": "end", "rows": 4, "samples": 8, "tokens": 40, "failures": {"REWARD_TIMEOUT": 1}, "model_digest": "blake3-ef"}`

// evalFolder has suites, a dataset, and a model.
func evalFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "suites.toml"), suitesText)
	write(t, filepath.Join(dir, "test.jsonl"), "{\"question\": \"1+1=\"}\n")
	write(t, filepath.Join(dir, "base.jsonl"), "{}\n")
	write(t, filepath.Join(dir, "model", "config.json"), "{}")
	return dir
}

// scoresOf writes what a worker writes: rows with two samples, whose scores are the letters of a
// word, 1 for a capital; a dot has none.
func scoresOf(t *testing.T, folder, name, data string, words ...string) {
	t.Helper()
	lines := []string{`{"rollout_scores":1,"inputs":{"data":"` + data + `"},"end":{}}`}
	for row, word := range words {
		scores := make([]string, len(word))
		for i, letter := range word {
			scores[i] = map[bool]string{true: "1.0", false: "0.0"}[letter < 'a']
			if letter == '.' {
				scores[i] = "null"
			}
		}
		lines = append(lines, fmt.Sprintf(`{"row":%d,"scores":[%s],"parts":{"length":[%d,2],"mean":[0.5,%d]},"prompt":"<%d>","completions":["yes","no"]}`, row, strings.Join(scores, ","), row, row, row))
	}
	write(t, filepath.Join(folder, name+".scores.jsonl"), strings.Join(lines, "\n")+"\n")
}

func TestEval(t *testing.T) {
	t.Parallel()
	dir := evalFolder(t)
	out := filepath.Join(dir, "out")
	scoresOf(t, out, "sums", "blake3-aa", "AA", "Ab", "ab", "A.")
	scoresOf(t, out, "chat", "blake3-bb", "Ab", "Ab", "ab", "A.")
	answering, kept := worker(t, evalEnd, "0")
	run := func(args ...string) (result, map[string]any) {
		got := call{}.run(t, append([]string{"eval", "--worker", answering, "--model", filepath.Join(dir, "model"), "--suite", filepath.Join(dir, "suites.toml"), "--output", out}, args...)...)
		var spec map[string]any
		if err := json.Unmarshal([]byte(read(t, kept)), &spec); err != nil {
			t.Fatal(err)
		}
		return got, spec
	}
	got, spec := run() // the last suite is sums
	golden(t, "testdata/command/eval.text", strings.ReplaceAll(got.text(), dir, "DIR"))
	config := spec["config"].(map[string]any)
	sampling := config["sampling"].(map[string]any)
	for name, pair := range map[string][2]any{
		"data": {spec["data"], filepath.Join(dir, "test.jsonl")}, "model": {spec["model"], filepath.Join(dir, "model")},
		"base_dir": {spec["base_dir"], dir}, "limit": {spec["limit"], 4.0}, "scores": {spec["scores"], filepath.Join(out, "sums.scores.jsonl")},
		"output": {spec["output"], filepath.Join(out, "sums.parquet")}, "samples": {sampling["group_size"], 2.0}, "temperature": {sampling["temperature"], 1.0},
		"seed": {config["seed"], "3"}, "reward": {config["reward"].(map[string]any)["plugin"], "reward.py:score"},
		"prompt": {config["data"].(map[string]any)["prompt_field"], "question"}, "baseline": {spec["baseline"], ""},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s is %v, want %v", name, pair[0], pair[1])
		}
	}
	page := read(t, filepath.Join(out, "index.html"))
	for _, wanted := range []string{"<h2>sums</h2>", "pass@2", "&lt;0&gt;", "REWARD_TIMEOUT 1", "blake3-ef"} {
		if !strings.Contains(page, wanted) {
			t.Errorf("the page lacks %s", wanted)
		}
	}
	if strings.Contains(page, "http") {
		t.Error("the page loads something")
	}
	got, spec = run("--only", "chat", "--limit", "3", "--format", "json")
	golden(t, "testdata/command/eval.json", strings.ReplaceAll(got.text(), filepath.Dir(dir), "DIR"))
	config = spec["config"].(map[string]any)
	if spec["baseline"] != filepath.Join(dir, "base.jsonl") || spec["cluster"] != "topic" || spec["limit"] != 3.0 || config["sampling"].(map[string]any)["temperature"] != 0.0 ||
		config["reward"].(map[string]any)["expression"] != "1.0" {
		t.Errorf("%v", spec)
	}
	if left, _ := filepath.Glob(filepath.Join(out, ".eval-*")); left != nil {
		t.Errorf("left are %v", left)
	}
}

const librarySuites = `[eval.suites.sums]
kind = "inspect_ai"
tasks = ["sums.py@sums", "words.py"]
args = { level = 2 }
limit = 5
`

// The metrics of a suite of a library are the library's, with its standard errors.
func TestEvalOfALibrary(t *testing.T) {
	t.Parallel()
	dir := evalFolder(t)
	out := filepath.Join(dir, "out")
	write(t, filepath.Join(dir, "suites.toml"), librarySuites)
	scoresOf(t, out, "sums", "blake3-aa", "AA", "bb")
	end := `{"event": "end", "rows": 2, "samples": 2, "tokens": 40, "failures": {}, "model_digest": "blake3-ef", "version": "0.3.285",` +
		` "metrics": [{"name": "sums/accuracy", "value": 0.5, "stderr": 0.1, "samples": 2}, {"name": "words/mean", "value": 7.5, "stderr": null, "samples": 1}]}`
	answering, kept := worker(t, end, "0")
	run := func(args ...string) result {
		return call{}.run(t, append([]string{"eval", "--state-dir", filepath.Join(dir, "state"), "--worker", answering, "--model", filepath.Join(dir, "model"), "--suite", filepath.Join(dir, "suites.toml"), "--output", out}, args...)...)
	}
	golden(t, "testdata/command/eval-no-library.txt", strings.ReplaceAll(run().text(), dir, "DIR"))
	write(t, filepath.Join(dir, "state", "plugins", "inspect_ai", "bin", "python"), "")
	golden(t, "testdata/command/eval-library.text", strings.ReplaceAll(run().text(), dir, "DIR"))
	golden(t, "testdata/command/eval-library.json", strings.ReplaceAll(run("--format", "json").text(), filepath.Dir(dir), "DIR"))
	var spec struct {
		Library map[string]any
		Limit   int
	}
	if err := json.Unmarshal([]byte(read(t, kept)), &spec); err != nil {
		t.Fatal(err)
	}
	if l := spec.Library; spec.Limit != 5 || l["kind"] != "inspect_ai" || len(l["tasks"].([]any)) != 2 || l["args"].(map[string]any)["level"] != 2.0 || l["url"] != "" {
		t.Errorf("%+v", spec)
	}
	if page := read(t, filepath.Join(out, "index.html")); !strings.Contains(page, "inspect_ai 0.3.285") {
		t.Error("the page lacks the library")
	}
	if got := (call{}).run(t, "compare", out, out); got.code != 0 || !strings.Contains(got.stdout, "mean") {
		t.Error(got.text())
	}
}

// An evaluation of some suites keeps the results of the others, if they are of the same weights.
func TestEvalKeepsResultsOfOtherSuites(t *testing.T) {
	t.Parallel()
	dir := evalFolder(t)
	out := filepath.Join(dir, "out")
	scoresOf(t, out, "sums", "blake3-aa", "AA", "Ab")
	scoresOf(t, out, "chat", "blake3-bb", "Ab", "Ab")
	run := func(digest, events string, args ...string) result {
		answering, _ := worker(t, events+strings.ReplaceAll(evalEnd, "blake3-ef", digest), "0")
		return call{}.run(t, append([]string{"eval", "--worker", answering, "--model", filepath.Join(dir, "model"), "--suite", filepath.Join(dir, "suites.toml"), "--output", out}, args...)...)
	}
	suites := func() (names []string) {
		var kept struct{ Suites []struct{ Name string } }
		if err := json.Unmarshal([]byte(read(t, filepath.Join(out, "results.json"))), &kept); err != nil {
			t.Fatal(err)
		}
		for _, s := range kept.Suites {
			names = append(names, s.Name)
		}
		return names
	}
	for _, only := range []string{"sums", "chat"} {
		if got := run("blake3-ef", "", "--only", only); got.code != 0 {
			t.Fatal(got.text())
		}
	}
	if got := suites(); !slices.Equal(got, []string{"chat", "sums"}) {
		t.Errorf("kept are %v", got)
	}
	if page := read(t, filepath.Join(out, "index.html")); !strings.Contains(page, "<h2>sums</h2>") || !strings.Contains(page, "<h2>chat</h2>") {
		t.Error("the page lacks a suite")
	}
	before := read(t, filepath.Join(out, "results.json"))
	for name, events := range map[string]string{"at the end": "", "at the begin": `{"event": "begin", "rows": 4, "samples": 2, "model_digest": "blake3-00"}` + "\n"} {
		got := run("blake3-00", events, "--only", "chat", "--restart")
		if got.code != 65 || !strings.Contains(got.stderr, "EVAL_MODELS_DIFFER") || !strings.Contains(got.stderr, "has the digest blake3-ef, and this model blake3-00") {
			t.Errorf("%s: %s", name, got.text())
		}
		if read(t, filepath.Join(out, "results.json")) != before {
			t.Errorf("%s: the results have changed", name)
		}
	}
	if got := run("blake3-00", ""); got.code != 0 || !strings.Contains(read(t, filepath.Join(out, "results.json")), "blake3-00") {
		t.Error(got.text())
	}
}

// The weights of a run have the digest of its snapshot only in the precision of the run.
func TestEvalOfARunInAnotherPrecision(t *testing.T) {
	t.Parallel()
	dir, run := evalFolder(t), (&fake{}).run(runv1.RunState_RUN_STATE_SUCCEEDED, 3)
	run.Plan.Config.Model.Dtype = proto.String("float32")
	state := storedRun(t, run)
	answering, kept := worker(t, evalEnd, "0")
	out := filepath.Join(dir, "out")
	scoresOf(t, out, "sums", "blake3-aa", "AA")
	for dtype, want := range map[string]string{"": snapshot().GetWeightsDigest(), "float32": snapshot().GetWeightsDigest(), "bfloat16": ""} {
		args := []string{"eval", "--worker", answering, "--state-dir", state, "--model", "addition-grpo", "--suite", filepath.Join(dir, "suites.toml"), "--output", out, "--only", "sums"}
		if dtype != "" {
			args = append(args, "--set", "model.dtype="+dtype)
		}
		got := call{}.run(t, args...)
		var spec struct {
			Digest string `json:"weights_digest"`
			Config struct{ Model struct{ Dtype string } }
		}
		if err := json.Unmarshal([]byte(read(t, kept)), &spec); err != nil || got.code != 0 || spec.Digest != want || dtype != "" && spec.Config.Model.Dtype != dtype {
			t.Errorf("%q: %v, %v, %s", dtype, err, spec, got.text())
		}
	}
}

// The rows of a data source are those of the plan of a run, also in a suite.
func TestRowsOfADataSourceAreThoseOfThePlan(t *testing.T) {
	t.Parallel()
	dir := evalFolder(t)
	run := (&fake{directory: filepath.Join(dir, "run")}).run(runv1.RunState_RUN_STATE_SUCCEEDED, 3)
	run.Plan.Config.Data.Eval = proto.String("rows.py:held")
	digest := "blake3-" + strings.Repeat("ab", 32)
	run.Plan.Inputs = append(run.Plan.Inputs, &planv1.Input{
		Role: planv1.InputRole_INPUT_ROLE_EVAL_DATA, Path: "rows.py:held", Digest: digest, Sources: []*planv1.Source{{Path: "rows.py:held"}},
	})
	state, out := storedRun(t, run), filepath.Join(dir, "out")
	write(t, filepath.Join(dir, "source.toml"), strings.Replace(strings.ReplaceAll(suitesText, "data = \"test.jsonl\"\n", ""), "[data]\n", "[data]\neval = \"rows.py:held\"\n", 1))
	scoresOf(t, out, "sums", "blake3-aa", "AA")
	pinned := filepath.Join(dir, "run", "inputs", "rows", digest+".jsonl")
	evaluated, sampled := "", ""
	ask := func(command *string, end string, args ...string) result {
		answering, kept := worker(t, end, "0")
		got := call{}.run(t, append(args, "--worker", answering, "--state-dir", state)...)
		if *command = ""; got.code == 0 {
			*command = read(t, kept)
		}
		return got
	}
	suites := []string{"eval", "--model", "addition-grpo", "--suite", filepath.Join(dir, "source.toml"), "--output", out, "--only", "sums"}
	batch := []string{"infer", "batch", "--run", "addition-grpo", "--no-reward", "--output", filepath.Join(dir, "a.jsonl")}
	for name, got := range map[string]result{"eval": ask(&evaluated, evalEnd, suites...), "infer": ask(&sampled, batchEnd, batch...)} {
		if got.code != 66 || !strings.Contains(got.stderr, "cannot read the rows of the data source rows.py:held that run "+runID+" has stored: no such file") {
			t.Errorf("%s without the file: %s", name, got.text())
		}
	}
	write(t, pinned, "{}\n")
	for name, got := range map[string]result{"eval": ask(&evaluated, evalEnd, suites...), "infer": ask(&sampled, batchEnd, batch...)} {
		if got.code != 0 {
			t.Errorf("%s: %s", name, got.text())
		}
	}
	for _, spec := range []string{evaluated, sampled} {
		if !strings.Contains(spec, `"data":"`+pinned+`"`) || !strings.Contains(spec, `"split":""`) {
			t.Errorf("the worker got %s", spec)
		}
	}
	// a model without a plan
	for name, got := range map[string]result{
		"infer": ask(&sampled, batchEnd, "infer", "batch", "--model", filepath.Join(dir, "model"), "--data", "rows.py:held", "--output", filepath.Join(dir, "b.jsonl")),
		"eval": ask(&evaluated, evalEnd, "eval", "--model", filepath.Join(dir, "model"), "--output", out,
			"--suite", filepath.Join(dir, "source.toml"), "--only", "chat"),
	} {
		if got.code != 65 || !strings.Contains(got.stderr, "the rows of the data source rows.py:held are those of a plan") {
			t.Errorf("%s: %s", name, got.text())
		}
	}
}

func TestEvalRefusals(t *testing.T) {
	t.Parallel()
	dir := evalFolder(t)
	write(t, filepath.Join(dir, "none.toml"), "[sampling]\nmax_tokens = 4\n")
	write(t, filepath.Join(dir, "bad.toml"), "[eval.suites.sums]\nmetric = \"mean\"\nsamples = 2\ntemperature = 0\n[eval.suites.more]\ndata = \"test.jsonl\"\nmetrics = [\"pass@3\"]\n")
	write(t, filepath.Join(dir, "lost.toml"), "[eval.suites.sums]\ndata = \"lost.jsonl\"\nreward = { expression = \"1.0\" }\n")
	write(t, filepath.Join(dir, "judge", "config.json"), `{"architectures": ["Qwen3ForSequenceClassification"]}`)
	answering, _ := worker(t, `{"event": "error", "code": 65, "reason": "BASELINE_INVALID", "message": "base.jsonl has no completion for row 3", "fix": "write it from the same data"}`, "65")
	state := left(t)
	var table strings.Builder
	for _, args := range []string{
		"--model DIR/model", "--suite DIR/suites.toml --model unknown", "--suite DIR/suites.toml --model snap-none", "--suite DIR/absent.toml --model DIR/model", "--suite DIR/none.toml --model DIR/model",
		"--suite DIR/bad.toml --model DIR/model", "--suite DIR/lost.toml --model DIR/model", "--suite DIR/suites.toml --model DIR/model --only nothing",
		"--suite DIR/suites.toml --model DIR/judge", "--suite DIR/suites.toml --model DIR/model --set eval.suites.sums.samples=0",
		"--suite DIR/suites.toml --model DIR/model --output DIR/suites.toml", "--suite DIR/suites.toml --model DIR/model",
	} {
		full := []string{"eval", "--worker", answering, "--state-dir", state, "--output", filepath.Join(dir, "out")}
		got := call{}.run(t, append(full, strings.Fields(strings.ReplaceAll(args, "DIR", dir))...)...)
		fmt.Fprintf(&table, "eval %s\n%s\n", args, strings.ReplaceAll(strings.ReplaceAll(got.text(), dir, "DIR"), state, "STATE"))
	}
	golden(t, "testdata/command/eval-refused.txt", table.String())
}

func TestCompareEvaluations(t *testing.T) {
	t.Parallel()
	dir := evalFolder(t)
	answering, _ := worker(t, evalEnd, "0")
	evaluate := func(folder, data string, words ...string) {
		out := filepath.Join(dir, folder)
		scoresOf(t, out, "sums", data, words...)
		got := call{}.run(t, "eval", "--worker", answering, "--model", filepath.Join(dir, "model"), "--suite", filepath.Join(dir, "suites.toml"), "--output", out, "--only", "sums")
		if got.code != 0 {
			t.Fatal(got.text())
		}
	}
	evaluate("a", "blake3-aa", "ab", "ab", "ab", "ab", "ab", "ab", "ab", "AB")
	evaluate("b", "blake3-aa", "AB", "AB", "AB", "AB", "AB", "AB", "AB", "AB")
	evaluate("c", "blake3-cc", "AB")
	compare := func(args ...string) string {
		for i, arg := range args {
			args[i] = strings.ReplaceAll(arg, "DIR", dir)
		}
		return strings.ReplaceAll(call{}.run(t, append([]string{"compare"}, args...)...).text(), dir, "DIR")
	}
	golden(t, "testdata/command/compare-eval.text", compare("DIR/a", "DIR/b"))
	golden(t, "testdata/command/compare-eval.json", compare("DIR/a", "DIR/b", "--format", "json"))
	if err := os.MkdirAll(filepath.Join(dir, "empty"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "old", "results.json"), `{"format": 0}`)
	write(t, filepath.Join(dir, "other", "results.json"), `{"format": 2, "suites": []}`)
	// folders that have the names of runs
	if got := (call{}).run(t, "compare", "--state-dir", left(t), filepath.Join(dir, "empty"), filepath.Join(dir, "model")).text(); strings.Contains(got, "results.json") {
		t.Errorf("the folders were compared: %s", got)
	}
	table := ""
	scoresOf(t, filepath.Join(dir, "begun"), "sums", "blake3-aa", "AB")
	for _, args := range []string{"DIR/a DIR/c", "DIR/a DIR/empty", "DIR/a DIR/begun", "DIR/empty DIR/begun", "DIR/a DIR/old", "DIR/a DIR/other", "DIR/a DIR/b DIR/c"} {
		table += "compare " + args + "\n" + compare(strings.Fields(args)...) + "\n"
	}
	golden(t, "testdata/command/compare-eval-refused.txt", table)
}
