package main

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/lock"
)

// rewrite changes a plan and its id, as another version of rollout might.
func rewrite(t *testing.T, data []byte, change func(*planv1.Plan)) []byte {
	t.Helper()
	plan := &planv1.Plan{}
	if err := protojson.Unmarshal(data, plan); err != nil {
		t.Fatal(err)
	}
	change(plan)
	data, err := lock.Write(plan)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func replace(t *testing.T, data []byte, before, after string) []byte {
	t.Helper()
	if !bytes.Contains(data, []byte(before)) {
		t.Fatalf("the plan has no %q:\n%s", before, data)
	}
	return bytes.Replace(data, []byte(before), []byte(after), 1)
}

// TestPlanProblems compares the output of `run --plan` for damaged plans, and for plans whose
// inputs changed, with golden files.
func TestPlanProblems(t *testing.T) {
	t.Parallel()
	plane := realPlanner(t)
	cases := map[string]func(t *testing.T, dir string, data []byte) []byte{
		"cut-off": func(_ *testing.T, _ string, data []byte) []byte { return data[:200] },
		"not-json": func(*testing.T, string, []byte) []byte {
			return []byte("name = \"addition\"\n")
		},
		"not-a-plan": func(*testing.T, string, []byte) []byte { return []byte("{\"name\": \"addition\"}\n") },
		"other-format": func(t *testing.T, _ string, data []byte) []byte {
			return replace(t, data, `"format": 2`, `"format": 1`)
		},
		"unknown-field": func(t *testing.T, _ string, data []byte) []byte {
			return replace(t, data, `"format": 2,`, "\"format\": 2,\n  \"frobnicate\": true,")
		},
		"edited": func(t *testing.T, _ string, data []byte) []byte {
			return replace(t, data, `"groups_per_step": 4`, `"groups_per_step": 8`)
		},
		"wrong-id": func(t *testing.T, _ string, data []byte) []byte {
			return replace(t, data, `"plan_id": "blake3-`, `"plan_id": "sha256-`)
		},
		"inputs-changed": func(t *testing.T, dir string, data []byte) []byte {
			write(t, filepath.Join(dir, "train.jsonl"), read(t, filepath.Join(dir, "train.jsonl"))+`{"prompt": "5+5=", "answer": "10"}`+"\n")
			write(t, filepath.Join(dir, "reward.py"), read(t, filepath.Join(dir, "reward.py"))+"\n")
			if err := os.Remove(filepath.Join(dir, "eval.jsonl")); err != nil {
				t.Fatal(err)
			}
			return data
		},
		"inputs-missing": func(t *testing.T, dir string, data []byte) []byte {
			if err := os.RemoveAll(filepath.Join(dir, "model")); err != nil {
				t.Fatal(err)
			}
			return data
		},
		"packages-changed": func(t *testing.T, _ string, data []byte) []byte {
			return rewrite(t, data, func(plan *planv1.Plan) {
				plan.Packages["torch"] = "0.0.1"
				plan.Packages["unobtainium"] = "1.0"
			})
		},
	}
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := project(t)
			path := filepath.Join(dir, "plan.lock")
			if got := execute(t, plane, "plan", "--config", filepath.Join(dir, "run.toml")); got.code != 0 {
				t.Fatalf("plan: %s", got.text())
			}
			write(t, path, string(cases[name](t, dir, []byte(read(t, path)))))
			got := execute(t, plane, "run", "--plan", path)
			if got.code == 0 {
				t.Error("the plan was accepted")
			}
			golden(t, "testdata/plan/"+name+".txt", anonymous(got.text(), dir))
		})
	}
}

// TestPlanIsCanonical plans twice, from two folders: both plans have the same bytes, are sorted,
// and end with one newline.
func TestPlanIsCanonical(t *testing.T) {
	t.Parallel()
	plane := realPlanner(t)
	var plans []string
	for range 2 {
		dir := project(t)
		if got := execute(t, plane, "plan", "--config", filepath.Join(dir, "run.toml")); got.code != 0 {
			t.Fatalf("plan: %s", got.text())
		}
		plans = append(plans, read(t, filepath.Join(dir, "plan.lock")))
	}
	if plans[0] != plans[1] {
		t.Errorf("the same inputs gave\n%s\nand\n%s", plans[0], plans[1])
	}
	var value map[string]any
	if err := json.Unmarshal([]byte(plans[0]), &value); err != nil {
		t.Fatal(err)
	}
	sorted, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSuffix(plans[0], "\n"); got != string(sorted) {
		t.Errorf("the plan is not sorted and indented by two:\n%s", got)
	}
}

// TestPlanOK compares the output for a plan without problems with golden files.
func TestPlanOK(t *testing.T) {
	t.Parallel()
	dir := project(t)
	plane := realPlanner(t)
	config := filepath.Join(dir, "run.toml")
	golden(t, "testdata/plan/ok.txt", anonymous(execute(t, plane, "plan", "--config", config).text(), dir))
	golden(t, "testdata/plan/valid.txt", anonymous(execute(t, plane, "validate", "--server", "here", "--config", config).text(), dir))
	golden(t, "testdata/plan/valid.json", anonymous(execute(t, plane, "validate", "--server", "here", "--config", config, "--format", "json").text(), dir))
	golden(t, "testdata/plan/set.txt", anonymous(execute(t, plane, "validate", "--server", "here", "--config", config,
		"--set", "train.steps=0", "--set", "mode=asink", "--set", "model.dtype=bfloat16", "--set", "steps", "--set", "engine.wrkers=2").text(), dir))
	other := t.TempDir()
	elsewhere := execute(t, plane, "plan", "--config", config, "-o", filepath.Join(other, "p.lock")).text()
	golden(t, "testdata/plan/elsewhere.txt", anonymous(strings.ReplaceAll(elsewhere, other, "$OTHER"), dir))
	golden(t, "testdata/plan/unwritable.txt", anonymous(execute(t, plane, "plan", "--config", config, "-o", filepath.Join(dir, "nowhere", "p.lock")).text(), dir))
	golden(t, "testdata/plan/no-config.txt", anonymous(execute(t, plane, "plan", "--config", filepath.Join(dir, "gone.toml")).text(), dir))
}

func TestThePredictedMemory(t *testing.T) {
	t.Parallel()
	dir := project(t)
	plane := realPlanner(t)
	config := filepath.Join(dir, "run.toml")
	explain := func(name string, args ...string) {
		t.Helper()
		golden(t, "testdata/plan/memory-"+name, anonymous(execute(t, plane, append([]string{"plan", "--config", config}, args...)...).text(), dir))
	}
	explain("unknown.txt", "--explain-memory")
	write(t, filepath.Join(dir, "model", "config.json"), `{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 64, "vocab_size": 54,
		"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}`)
	explain("cpu.txt", "--explain-memory")
	explain("cpu.json", "--explain-memory", "--format", "json")
	explain("gpus.txt", "--gpus", "2x80GB", "--set", "train.ranks=2", "--set", `train.optimizer="adamw"`, "--set", `model.dtype="bfloat16"`)
	explain("small.txt", "--gpus", "0", "--memory", "0.01kB")
	explain("bad-gpus.txt", "--gpus", "8 of 80GB")
	explain("bad-memory.txt", "--memory", "much")
	explain("problems.txt", "--explain-memory", "--set", "sampling.max_tokens=100")
	if _, err := os.Stat(filepath.Join(dir, "plan.lock")); err == nil {
		t.Error("a plan was written")
	}
}
