package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
		lines = append(lines, fmt.Sprintf(`{"row":%d,"scores":[%s],"parts":{"length":[%d,2]},"prompt":"<%d>","completions":["yes","no"]}`, row, strings.Join(scores, ","), row, row))
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
	write(t, filepath.Join(dir, "other", "results.json"), `{"format": 1, "suites": []}`)
	table := ""
	for _, args := range []string{"DIR/a DIR/c", "DIR/a DIR/empty", "DIR/a DIR/old", "DIR/a DIR/other", "DIR/a DIR/b DIR/c"} {
		table += "compare " + args + "\n" + compare(strings.Fields(args)...) + "\n"
	}
	golden(t, "testdata/command/compare-eval-refused.txt", table)
}
