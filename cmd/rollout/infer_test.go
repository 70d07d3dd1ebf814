package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
)

const batchConfig = `name = "sums"
model.path = "models/tiny"
data.train = "train.jsonl"
data.eval = "test.jsonl"
data.prompt_field = "question"
sampling.group_size = 8
sampling.temperature = 0.5
reward.plugin = "reward.py:score"
algorithm.grpo = {}
train.steps = 1
train.groups_per_step = 1
engine.threads = 2
`

const batchEnd = `{"event": "begin", "rows": 120, "samples": 2, "kept": 40}
{"event": "progress", "rows": 80, "of": 120, "samples": 80, "tokens": 400, "seconds": 2}
{"event": "end", "output": "/out/answers.parquet", "rows": 120, "samples": 240, "tokens": 1234, "statuses": {"COMPLETED": 200, "TRUNCATED": 37, "INFRA_FAILED": 3}, "failures": {"REWARD_TIMEOUT": 3}, "mean_score": 0.625, "model_digest": "blake3-ef"}`

// batchFolder has a configuration and a dataset.
func batchFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "sums.toml"), batchConfig)
	write(t, filepath.Join(dir, "test.jsonl"), "{\"question\": \"1+1=\"}\n")
	write(t, filepath.Join(dir, "models", "tiny", "config.json"), "{}") // without it, models/tiny is a name on the hub
	return dir
}

func TestInferBatchPassesFlagsToTheWorker(t *testing.T) {
	t.Parallel()
	dir := batchFolder(t)
	answering, kept := worker(t, "a library prints\n"+batchEnd, "0")
	run := func(args ...string) (result, map[string]any) {
		got := call{}.run(t, append([]string{"infer", "batch", "--worker", answering, "--output", filepath.Join(dir, "answers.parquet")}, args...)...)
		var spec map[string]any
		if err := json.Unmarshal([]byte(read(t, kept)), &spec); err != nil {
			t.Fatal(err)
		}
		return got, spec
	}
	got, spec := run("--config", filepath.Join(dir, "sums.toml"), "--samples", "2", "--seed", "7", "--stop", ";", "--limit", "120", "--set", "sampling.top_p=0.9")
	golden(t, "testdata/command/infer-batch.text", got.text())
	config := spec["config"].(map[string]any)
	sampling := config["sampling"].(map[string]any)
	for name, pair := range map[string][2]any{
		"data": {spec["data"], filepath.Join(dir, "test.jsonl")}, "model": {spec["model"], filepath.Join(dir, "models/tiny")},
		"base_dir": {spec["base_dir"], dir}, "limit": {spec["limit"], 120.0}, "threads": {spec["threads"], 2.0},
		"samples": {sampling["group_size"], 2.0}, "temperature": {sampling["temperature"], 0.5}, "top_p": {sampling["top_p"], 0.9},
		"stop": {sampling["stop"].([]any)[0], ";"}, "seed": {config["seed"], "7"}, "reward": {config["reward"].(map[string]any)["plugin"], "reward.py:score"},
		"prompt": {config["data"].(map[string]any)["prompt_field"], "question"},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s is %v, want %v", name, pair[0], pair[1])
		}
	}
	got, spec = run("--config", filepath.Join(dir, "sums.toml"), "--model", "other", "--no-reward", "--format", "json")
	golden(t, "testdata/command/infer-batch.json", got.text())
	config = spec["config"].(map[string]any)
	if here, _ := filepath.Abs("other"); spec["model"] != here || config["reward"] != nil || config["sampling"].(map[string]any)["group_size"] != 1.0 {
		t.Errorf("%v", spec)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".infer-*")); left != nil {
		t.Errorf("left are %v", left)
	}
}

// The worker runs in the environment of the engine, unless a flag names a command.
func TestInferBatchUsesTheEnvironmentOfTheEngine(t *testing.T) {
	t.Parallel()
	dir := batchFolder(t)
	said := filepath.Join(dir, "said")
	write(t, filepath.Join(dir, "engine/python"), "#!/bin/sh\necho \"$1 $2 $3 $4 $5\" > "+said+"\ncat <<'END'\n"+batchEnd+"\nEND\n")
	if err := os.Chmod(filepath.Join(dir, "engine/python"), 0o700); err != nil {
		t.Fatal(err)
	}
	args := []string{"infer", "batch", "--output", filepath.Join(dir, "a.jsonl"), "--config", filepath.Join(dir, "sums.toml"), "--set", `engine.python="engine/python"`}
	if got := (call{}).run(t, args...); got.code != 0 || read(t, said) != "-P -m rollout_workers infer --spec\n" {
		t.Error(got.text())
	}
	if err := os.Remove(said); err != nil {
		t.Fatal(err)
	}
	answering, _ := worker(t, batchEnd, "0")
	got := call{}.run(t, append(args, "--overwrite", "--worker", answering)...)
	if _, err := os.Stat(said); got.code != 0 || err == nil {
		t.Error(got.text())
	}
}

// The folder of a killed command, which may contain the weights of a snapshot, is removed by the
// next command.
func TestInferBatchRemovesTheFolderOfAKilledCommand(t *testing.T) {
	t.Parallel()
	dir := batchFolder(t)
	killed := filepath.Join(dir, ".infer-123")
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(killed, "lock"), host)
	write(t, filepath.Join(killed, "weights/model.safetensors"), "large")
	answering, _ := worker(t, batchEnd, "0")
	got := call{}.run(t, "infer", "batch", "--worker", answering, "--output", filepath.Join(dir, "a.jsonl"), "--config", filepath.Join(dir, "sums.toml"))
	if left, _ := filepath.Glob(filepath.Join(dir, ".infer-*")); got.code != 0 || left != nil {
		t.Errorf("left are %v\n%s", left, got.text())
	}
}

// A reward model has no trained language-model head, so it cannot generate.
func TestInferBatchRefusesAModelThatScores(t *testing.T) {
	t.Parallel()
	dir := batchFolder(t)
	write(t, filepath.Join(dir, "scorer/config.json"), `{"architectures": ["Qwen3ForSequenceClassification"]}`)
	answering, kept := worker(t, batchEnd, "0")
	got := call{}.run(t, "infer", "batch", "--worker", answering, "--output", filepath.Join(dir, "a.jsonl"), "--model", filepath.Join(dir, "scorer"),
		"--data", filepath.Join(dir, "test.jsonl"))
	if _, err := os.Stat(kept); err == nil || got.code != 65 || !strings.Contains(got.stderr, "is a reward model: it scores completions and cannot generate them") {
		t.Error(got.text())
	}
}

// The weights of a run are those of its newest snapshot, and its configuration is the run's.
func TestInferBatchOfARun(t *testing.T) {
	t.Parallel()
	dir, state := batchFolder(t), stored(t)
	answering, kept := worker(t, batchEnd, "0")
	run := func(args ...string) result {
		return call{}.run(t, append([]string{"infer", "batch", "--worker", answering, "--state-dir", state, "--output", filepath.Join(dir, "a.jsonl"),
			"--data", filepath.Join(dir, "test.jsonl")}, args...)...)
	}
	for name, digest := range map[string]string{"--run=addition-grpo": "newest", "--snapshot=snap-earl": "older"} {
		if got := run(name); got.code != 0 {
			t.Fatalf("%s: %s", digest, got.text())
		}
		spec := read(t, kept)
		for _, wanted := range []string{`/weights"`, `"weights_digest":"` + snapshot().GetWeightsDigest(), `"base_dir":"/home/me/addition"`} {
			if !strings.Contains(spec, wanted) {
				t.Errorf("%s: %s is not in %s", name, wanted, spec)
			}
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".infer-*")); left != nil {
		t.Errorf("left are %v", left)
	}
}

// The scores of a run are those of its evaluations, so its reward has to be the one in its plan.
func TestInferBatchComparesTheRewardWithThePlan(t *testing.T) {
	t.Parallel()
	dir := batchFolder(t)
	reward := filepath.Join(dir, "reward.py")
	write(t, reward, "planned")
	digest, _, err := input.DigestFile(reward)
	if err != nil {
		t.Fatal(err)
	}
	run := (&fake{}).run(runv1.RunState_RUN_STATE_SUCCEEDED, 3)
	run.BaseDir = dir
	run.Plan.Inputs = append(run.Plan.Inputs, &planv1.Input{Role: planv1.InputRole_INPUT_ROLE_REWARD, Path: "reward.py", Digest: digest})
	state := storedRun(t, run)
	answering, kept := worker(t, batchEnd, "0")
	const refused = "reward.py has changed since the run was planned: its digest is blake3-"
	for _, c := range []struct {
		name, reward string
		args         []string
		code         int
		want         string
	}{
		{"unchanged", "planned", nil, 0, "as in the evaluations of"},
		{"changed", "edited", nil, 65, refused},
		{"changed and accepted", "edited", []string{"--accept-changes"}, 0, refused},
		{"another reward", "edited", []string{"--reward", reward + ":f"}, 0, "as in the evaluations of"},
		{"no reward", "edited", []string{"--no-reward"}, 0, "as in the evaluations of"},
	} {
		write(t, reward, c.reward)
		_ = os.Remove(kept)
		got := call{}.run(t, append([]string{"infer", "batch", "--worker", answering, "--state-dir", state, "--output", filepath.Join(dir, "a.jsonl"),
			"--data", filepath.Join(dir, "test.jsonl"), "--run", "addition-grpo"}, c.args...)...)
		_, started := os.Stat(kept)
		if got.code != c.code || !strings.Contains(got.stderr, c.want) || (started == nil) != (c.code == 0) {
			t.Errorf("%s: %s", c.name, got.text())
		}
	}
}

// A run is sampled as in its evaluations, not as in training; flags override that. The settings are
// printed.
func TestInferBatchSamplesLikeTheEvaluations(t *testing.T) {
	t.Parallel()
	dir, state := batchFolder(t), stored(t)
	answering, kept := worker(t, batchEnd, "0")
	for _, c := range []struct {
		args, printed string
		temperature   float64
	}{
		{"", "sampling  1 per row, temperature 0.250, at most 128 tokens, seed 7; as in the evaluations of " + runID, 0.25},
		{"--temperature 0.75 --top-k 5 -n 2 --stop ;", `sampling  2 per row, temperature 0.750, top_k 5, at most 128 tokens, stop ";", seed 7; as in`, 0.75},
		{"--config DIR/sums.toml --temperature 0", "sampling  1 per row, temperature 0 (greedy), at most 128 tokens, seed 0\n", 0},
	} {
		got := call{}.run(t, append([]string{"infer", "batch", "--worker", answering, "--state-dir", state, "--output", filepath.Join(dir, "a.jsonl"),
			"--data", filepath.Join(dir, "test.jsonl"), "--run", "addition-grpo"}, strings.Fields(strings.ReplaceAll(c.args, "DIR", dir))...)...)
		if got.code != 0 || !strings.Contains(got.stderr, c.printed) {
			t.Errorf("%s: %q is missing in\n%s", c.args, c.printed, got.text())
		}
		var spec struct {
			Config struct{ Sampling struct{ Temperature float64 } }
		}
		if err := json.Unmarshal([]byte(read(t, kept)), &spec); err != nil || spec.Config.Sampling.Temperature != c.temperature {
			t.Errorf("%s: %v, temperature %v, want %v", c.args, err, spec.Config.Sampling.Temperature, c.temperature)
		}
	}
}

func TestInferBatchRefuses(t *testing.T) {
	t.Parallel()
	dir := batchFolder(t)
	write(t, filepath.Join(dir, "there.jsonl"), "")
	ending := func(line, code string) string { command, _ := worker(t, line, code); return command }
	data, out := " --data DIR/test.jsonl", " --output DIR/new.jsonl"
	var table strings.Builder
	for _, c := range []struct{ name, args, worker string }{
		{"no output", "--model m" + data, ""},
		{"another kind of output", "--model m --output x.csv" + data, ""},
		{"an output that is there", "--model m --output DIR/there.jsonl" + data, ""},
		{"a folder that is not there", "--model m --output DIR/none/x.jsonl" + data, ""},
		{"nothing that answers", out + data, ""},
		{"two models", "--model m --run r" + out + data, ""},
		{"no dataset named", "--model m" + out, ""},
		{"no dataset there", "--model m --data DIR/none.jsonl" + out, ""},
		{"no configuration there", "--config DIR/none.toml" + out, ""},
		{"a wrong configuration", "--config DIR/sums.toml --set sampling.temprature=1" + out, ""},
		{"no snapshot's id", "--snapshot addition-grpo" + out + data, ""},
		{"no state folder", "--run addition-grpo --state-dir DIR/none" + out + data, ""},
		{"too hot", "--model m --temperature 11" + out + data, ""},
		{"no nucleus", "--model m --top-p 0" + out + data, ""},
		{"no samples", "--model m --samples 0" + out + data, ""},
		{"no room", "--model m --max-tokens 4096" + out + data, ""},
		{"no function", "--model m --reward reward.py" + out + data, ""},
		{"a reward and none", "--model m --reward reward.py:f --no-reward" + out + data, ""},
		{"no worker", "--model m" + out + data, "/no/such/worker"},
		{"what the worker refuses", "--model m" + out + data, ending(`{"event":"error","code":65,"reason":"INPUTS_CHANGED","message":"the seed was 1, is 2","fix":"start again with --restart"}`, "65")},
		{"an interruption", "--model m" + out + data, ending(`{"event":"interrupted","rows":40,"of":120}`, "130")},
		{"a crash", "--model m" + out + data, ending(`{"event":"begin","rows":120}`, "1")},
	} {
		args := strings.Fields(strings.ReplaceAll("infer batch "+c.args, "DIR", dir))
		if c.worker != "" {
			args = append(args, "--worker", c.worker)
		}
		got := call{}.run(t, args...)
		if got.code == 0 {
			t.Errorf("%s: nothing was refused", c.name)
		}
		table.WriteString("=== " + c.name + "\n" + strings.ReplaceAll(got.text(), dir, "DIR"))
		if _, err := os.Stat(filepath.Join(dir, "new.jsonl")); err == nil {
			t.Errorf("%s: something was written", c.name)
		}
	}
	here, _ := os.Getwd()
	golden(t, "testdata/command/infer-batch-refused.txt", strings.ReplaceAll(table.String(), here, "HERE"))
}
