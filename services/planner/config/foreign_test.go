package config

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
)

// known reports whether a path of foreign.toml is one of the contract, also if only some algorithms
// have it.
func known(path string) bool {
	if !strings.Contains(path, "algorithm.*") {
		return keyAt(path) != nil
	}
	for _, table := range oneofTables("algorithm") {
		name := strings.TrimSuffix(strings.TrimPrefix(table, "[algorithm."), "]")
		if keyAt(strings.Replace(path, "algorithm.*", "algorithm."+name, 1)) != nil {
			return true
		}
	}
	return false
}

var (
	pathInNote = regexp.MustCompile("`([a-z_]+(?:\\.[a-z_*]+)+)`|\\[([a-z_]+(?:\\.[a-zA-Z_*]+)*)\\]")
	keyInNote  = regexp.MustCompile("`([a-z_0-9]+)(?: = [^`]*)?`")
)

// TestEveryTranslationNamesKnownKeys checks the keys of foreign.toml, and the keys and tables in
// its notes.
func TestEveryTranslationNamesKnownKeys(t *testing.T) {
	t.Parallel()
	names := map[string]bool{}
	walk(root(), "", func(path string, k key) { names[leafOf(path)] = true })
	entries := translations()
	if len(entries) < 150 {
		t.Errorf("only %d names", len(entries))
	}
	for name, entry := range foreignSections()["tables"] {
		entry.name = "[" + name + "]"
		entries = append(entries, entry)
	}
	for _, entry := range entries {
		for _, path := range []string{entry.Key, entry.Or} {
			if path != "" && !known(path) {
				t.Errorf("%s: the key %s does not exist", entry.name, path)
			}
		}
		if entry.Key == "" && entry.Note == "" {
			t.Errorf("%s: neither key nor note", entry.name)
		}
		for _, match := range pathInNote.FindAllStringSubmatch(entry.Note, -1) {
			if path := strings.TrimSuffix(match[1]+match[2], ".*"); path != "algorithm" && !known(path) && !known(strings.Replace(path, ".NAME", ".NAME.weight", 1)) {
				t.Errorf("%s: the note names %s, which does not exist", entry.name, path)
			}
		}
		for _, match := range keyInNote.FindAllStringSubmatch(entry.Note, -1) {
			if !names[match[1]] {
				t.Errorf("%s: the note names the key %s, which does not exist", entry.name, match[1])
			}
		}
	}
}

// fixes returns the suggestions for a configuration, one a line.
func suggestions(r *Reading) string {
	var b strings.Builder
	for _, p := range r.Sorted() {
		fmt.Fprintf(&b, "%s: %s\n", p.GetField(), p.GetFix())
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func TestNamesOfOtherTrainersGetOneSuggestion(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ algorithm, set, want string }{
		{"grpo", "train.num_train_epochs=3", "train.num_train_epochs: write `epochs = 3`"},
		{"grpo", "num_generations=16", "num_generations: write `group_size = 16` in [sampling]"},
		{"grpo", "sampling.max_completion_length=512", "sampling.max_completion_length: write `max_tokens = 512`"},
		{"grpo", "train.gradient_accumulation_steps=8",
			"train.gradient_accumulation_steps: remove it: micro-batches follow from `train.groups_per_step` and `train.tokens_per_microbatch`"},
		{"grpo", "train.lr_scheduler_type=\"cosine\"",
			"train.lr_scheduler_type: write `schedule` in [train]: \"constant\", \"linear\", or \"cosine\"; `warmup_steps` is the warm-up"},
		{"grpo", "train.bf16=true", "train.bf16: write `dtype = \"bfloat16\"` in [model]"},
		{"grpo", "train.use_vllm=true", "train.use_vllm: remove it: the workers of [engine] sample, and `engine.kind` selects their engine"},
		{"grpo", "vllm_gpu_memory_utilization=0.3", "vllm_gpu_memory_utilization: remove it: the workers of [engine] sample, and `engine.kind` selects their engine"},
		{"grpo", "engine.tensor_parallel_size=2", "engine.tensor_parallel_size: remove it: an engine runs on one device; more inference workers are `workers` in [engine]"},
		{"grpo", "engine.enable_sleep_mode=true", "engine.enable_sleep_mode: remove it: engines do not release an accelerator's memory between steps"},
		{"grpo", "weights.way=\"nccl\"",
			"weights.way: remove it: engines with `ipc` or `nccl` need GPUs, on which only the engine `transformers` runs; on one host weights are in shared memory"},
		{"grpo", "report_to=\"wandb\"", "report_to: a tracker is a table: [sinks.wandb], [sinks.tensorboard], or [sinks.mlflow]"},
		{"grpo", "beta=0.04", "beta: write `kl_coefficient = 0.04` in [algorithm.grpo]"},
		{"grpo", "algorithm.grpo.beta=0.04", "algorithm.grpo.beta: write `kl_coefficient = 0.04`"},
		{"dpo", "train.beta=0.1", "train.beta: write `beta = 0.1` in [algorithm.dpo]"},
		{"sft", "train.beta=0.1", "train.beta: remove it: [algorithm.sft] has no such setting"},
		{"dapo", "train.epsilon_high=0.3", "train.epsilon_high: write `clip_high = 0.3` in [algorithm.dapo]"},
		{"grpo", "train.epsilon=0.2",
			"train.epsilon: write a number above 0 and at most 0.01; the default is 1e-8; for the `epsilon` of TRL, write the value as `clip_low` in [algorithm.grpo], and also as `clip_high` unless epsilon_high is set"},
		{"grpo", "epsilon=0.2", "epsilon: write the value as `clip_low` in [algorithm.grpo], and also as `clip_high` unless epsilon_high is set"},
		{"grpo", "train.steps_per_generation=8", "train.steps_per_generation: write `minibatches` in [algorithm.grpo], the updates per generation: " +
			"steps_per_generation divided by gradient_accumulation_steps"},
		{"grpo", "lora={r=8}", "lora.r: write `rank = 8`"},
		{"grpo", "lora={rank=16, use_rslora=true}", "lora.use_rslora: remove it, and multiply `alpha` in [lora] by the square root of `rank`: `alpha` divided by `rank` scales the adapters"},
		{"grpo", "model.trust_remote_code=true", "model.trust_remote_code: remove it: code in the folder of a model is never run, so the architecture must be one of the transformers library"},
		{"grpo", "train.push_to_hub=true", "train.push_to_hub: remove it: `rollout export push RUN REPO` pushes the weights when the run has ended"},
		{"ppo", "epochs=3", "epochs: write `epochs = 3` in [train]"},
		{"ppo", "train.num_ppo_epochs=3", "train.num_ppo_epochs: write `epochs = 3` in [algorithm.ppo]"},
		{"grpo", "rollout.n=5", "rollout.n: write `group_size = 5` in [sampling]"},
		{"grpo", "data.train_files=\"a.jsonl\"", "data.train_files: write `train = \"a.jsonl\"`"},
		{"grpo", "trainer.total_epochs=15", "trainer.total_epochs: write `epochs = 15` in [train]"},
		{"grpo", "trainer.unheard_of=15", "trainer.unheard_of: remove it: rollout has no such setting"},
		{"grpo", "actor_rollout_ref={actor={optim={lr=1e-6}, ppo_epochs=2}, rollout={n=5}, ref={fsdp_config={param_offload=true}}}",
			"actor_rollout_ref.actor.optim.lr: write `learning_rate = 1e-6` in [train]\n" +
				"actor_rollout_ref.actor.ppo_epochs: write `epochs = 2` in [algorithm.grpo]\n" +
				"actor_rollout_ref.rollout.n: write `group_size = 5` in [sampling]\n" +
				"actor_rollout_ref.ref.fsdp_config.param_offload: remove it: the reference is the initial model, and it is loaded if `kl_coefficient` is above 0"},
		{"grpo", "algorithm.kl_ctrl.kl_coef=0.001", "algorithm.kl_ctrl.kl_coef: write `kl_coefficient = 0.001` in [algorithm.grpo]"},
		{"ppo", "critic.optim.lr=1e-5", "critic.optim.lr: write `critic_learning_rate = 1e-5` in [algorithm.ppo]"},
		{"grpo", "--n_samples_per_prompt=8", "--n_samples_per_prompt: write `group_size = 8` in [sampling]"},
		{"grpo", "init-kl-coef=0.01", "init-kl-coef: write `kl_coefficient = 0.01` in [algorithm.grpo]"},
		{"sft", "max_epochs=2", "max_epochs: write `epochs = 2` in [train]"},
		{"grpo", "train.micro_train_batch_size=4",
			"train.micro_train_batch_size: write `tokens_per_microbatch` in [train]: the tokens of one forward and backward pass"},
		{"grpo", "train.max_steps=\"many\"", "train.max_steps: its name is `steps`"},
		{"grpo", "sampler={temperature=0.7}", "sampler: write [sampling]"},
		{"grpo", "optimizer={lr=1e-6}", "optimizer: write [train]"},
		{"grpo", "train.temperature=0.7", "train.temperature: `temperature` belongs in [sampling]"},
		{"grpo", "train.zzz=1", "train.zzz: remove it; docs/reference/config.md lists the 21 keys of [train]"},
	} {
		if got := suggestions(read(t, as(c.algorithm), c.set)); got != c.want {
			t.Errorf("%s, %s:\n got %s\nwant %s", c.algorithm, c.set, got, c.want)
		}
	}
}

// TestAConfigurationOfVerlGetsASuggestionPerKey: a required key that has its name in verl is not
// reported as missing.
func TestAConfigurationOfVerlGetsASuggestionPerKey(t *testing.T) {
	t.Parallel()
	got := suggestions(read(t, `[algorithm]
adv_estimator = "grpo"
[data]
train_files = "train.jsonl"
train_batch_size = 16
[actor_rollout_ref.model]
path = "model"
[trainer]
experiment_name = "gsm8k"
total_epochs = 15
`))
	want := "algorithm.adv_estimator: the algorithm is a table: \"grpo\" is [algorithm.grpo], \"gae\" is [algorithm.ppo], \"rloo\" is [algorithm.rloo], " +
		"\"reinforce_plus_plus\" is [algorithm.reinforce_pp]\n" +
		"data.train_files: write `train = \"train.jsonl\"`\n" +
		"data.train_batch_size: write `groups_per_step = 16` in [train]\n" +
		"actor_rollout_ref.model.path: write `path = \"model\"` in [model]\n" +
		"trainer.experiment_name: write `name = \"gsm8k\"` at the top, before the first table\n" +
		"trainer.total_epochs: write `epochs = 15` in [train]"
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestARunHasOneLength(t *testing.T) {
	t.Parallel()
	without := strings.Replace(good, "steps = 4\n", "", 1)
	for _, c := range []struct {
		name, text string
		set        []string
		want       string
	}{
		{"steps", good, nil, ""},
		{"epochs", without, []string{"train.epochs=2"}, ""},
		{"a part of an epoch", without, []string{"train.epochs=0.5", "train.warmup_steps=100"}, ""},
		{"neither", without, nil, "MISSING_KEY train.steps: [train] sets neither `steps` nor `epochs`: write `steps = 40` or `epochs = 1`"},
		{"both", good + "epochs = 2\n", nil, "CONFLICT train.epochs: [train] takes only one of `steps` and `epochs`: remove one of them"},
		{"both as overrides", without, []string{"train.steps=4", "train.epochs=2"}, "CONFLICT train.epochs: [train] takes only one of `steps` and `epochs`: remove one of them"},
		{"an override of the other key", good, []string{"train.epochs=2"}, ""},
		{"no pass", without, []string{"train.epochs=0"},
			"OUT_OF_RANGE train.epochs: `train.epochs` must be above 0 and at most 100000, got 0: write a number above 0 and at most 100000, such as `epochs = 1`"},
		{"no table", strings.Replace(without, "[train]\n", "", 1), nil, "MISSING_KEY train: the table [train] is missing: add [train] with `steps = 40`"},
	} {
		r := read(t, c.text, c.set...)
		var got []string
		for _, p := range r.Sorted() {
			got = append(got, fmt.Sprintf("%s %s: %s: %s", p.GetReason(), p.GetField(), p.GetMessage(), p.GetFix()))
		}
		if strings.Join(got, "\n") != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, strings.Join(got, "\n     "), c.want)
		}
		if train := r.Config.GetTrain(); c.want == "" && (train.Steps == nil) == (train.Epochs == nil) {
			t.Errorf("%s: %v", c.name, train)
		}
	}
}
