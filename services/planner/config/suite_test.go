package config

import (
	"fmt"
	"strings"
	"testing"
)

func TestSuites(t *testing.T) {
	t.Parallel()
	const data = "data = \"a.jsonl\"\n"
	for _, c := range []struct{ text, want string }{
		{"[eval.suites.sums]\n" + data + "metrics = [\"mean\", \"pass@4\"]\nsamples = 4\n", ""},
		{"[eval.suites.chat]\n" + data + "metrics = [\"win_rate\"]\nbaseline = \"base/chat.parquet\"\nreward = { plugin = \"judge.py:wins\" }\n", ""},
		{"[eval.suites.games]\n" + data + "environment = { kind = \"python\", path = \"guess.py:Guess\" }\n", ""},
		{
			"[eval.suites.sums]\n" + data + "metrics = [\"accuracy\"]\n",
			"run.toml:22 BAD_VALUE eval.suites.sums.metrics `eval.suites.sums.metrics`: the metric \"accuracy\" is unknown; write `mean`, `pass@K`, `best@K`, or `win_rate`",
		},
		{
			"[eval.suites.sums]\n" + data + "metrics = [\"pass@8\"]\nsamples = 4\n",
			"run.toml:22 BAD_VALUE eval.suites.sums.metrics `eval.suites.sums.metrics`: pass@8 needs at least 8 samples of a row, and there are 4; write `samples = 8`",
		},
		{
			"[eval.suites.sums]\n" + data + "metrics = [\"win_rate\"]\n",
			"run.toml:22 BAD_VALUE eval.suites.sums.metrics `eval.suites.sums.metrics`: win_rate needs completions to compare with; write `baseline = \"FILE.parquet\"`",
		},
		{
			"[eval.suites.sums]\n" + data + "baseline = \"a.parquet\"\n",
			"run.toml:22 CONFLICT eval.suites.sums.baseline `eval.suites.sums.baseline` has no effect without the metric `win_rate`; write `metrics = [\"win_rate\"]`, or remove it",
		},
		{
			"[eval.suites.sums]\n" + data + "baseline = \"a.txt\"\nmetrics = [\"win_rate\"]\n",
			"run.toml:22 BAD_VALUE eval.suites.sums.baseline `eval.suites.sums.baseline` must end in .parquet or .jsonl, got \"a.txt\"; write `baseline = \"base/chat.parquet\"`",
		},
		{
			"[eval.suites.sums]\n" + data + "samples = 4\ntemperature = 0.0\n",
			"run.toml:23 CONFLICT eval.suites.sums.temperature `eval.suites.sums.temperature` is 0, which gives equal samples of a row; write `temperature = 1.0`, or `samples = 1`",
		},
		{
			"[eval.suites.sums]\n" + data + "reward = { plugin = \"a.py:b\", expression = \"1.0\" }\n",
			"run.toml:22 CONFLICT eval.suites.sums.reward `[eval.suites.sums.reward]` takes exactly one of `plugin`, `expression`, `model`, and `composite`; write `reward = { plugin = \"reward.py:function\" }` only",
		},
		{
			"[eval.suites.games]\n" + data + "environment = { kind = \"python\", path = \"guess.py:Guess\" }\nreward = { expression = \"1.0\" }\n",
			"run.toml:23 CONFLICT eval.suites.games.reward `eval.suites.games.reward` has no effect: the environment scores its episodes; remove it",
		},
		{
			"[eval.suites.sums]\ndata = \"rows.py:held\"\n",
			"run.toml:21 CONFLICT eval.suites.sums.data `eval.suites.sums.data` is a data source, whose rows a suite can't read; write the rows to a JSON Lines file and name that",
		},
		{
			"[eval.suites.sums]\nsamples = 0\n" + data,
			"run.toml:21 OUT_OF_RANGE eval.suites.sums.samples `eval.suites.sums.samples` must be between 1 and 1024, got 0; write a number between 1 and 1024; the default is 1",
		},
		{
			"[eval.suites.Sums]\n" + data,
			"run.toml:20 BAD_VALUE eval.suites.Sums [eval.suites.Sums]: a name has lower-case letters, digits, and underscores, and starts with a letter; rename the table",
		},
		{
			"[eval.suites.sums]\nmetrics = [\"mean\"]\n",
			"run.toml:20 MISSING_KEY eval.suites.sums.data [eval.suites.sums] has no rows; write `data = \"heldout.jsonl\"`",
		},
		{
			"[eval.suites.sums]\n" + data + "sample = 4\n",
			"run.toml:22 UNKNOWN_KEY eval.suites.sums.sample unknown key `sample` in [eval.suites.sums]; did you mean `samples`?",
		},
		{"[eval.suites.sums]\nkind = \"inspect_ai\"\ntasks = [\"sums.py@sums\"]\nargs = { level = 2 }\nsamples = 2\nlimit = 4\n", ""},
		{"[eval.suites.sums]\nkind = \"lm_eval\"\ntasks = [\"sums.yaml\", \"copa\"]\nnum_fewshot = 2\n", ""},
		{
			"[eval.suites.sums]\nkind = \"inspect\"\ntasks = [\"sums.py\"]\n",
			"run.toml:21 BAD_VALUE eval.suites.sums.kind `eval.suites.sums.kind` must be \"rows\", \"inspect_ai\" or \"lm_eval\", got \"inspect\"; did you mean \"inspect_ai\"?",
		},
		{
			"[eval.suites.sums]\nkind = \"lm_eval\"\n",
			"run.toml:20 MISSING_KEY eval.suites.sums.tasks [eval.suites.sums] has no tasks; write `tasks = [\"sums.yaml\"]`",
		},
		{
			"[eval.suites.sums]\nkind = \"lm_eval\"\ntasks = [\"copa\"]\nargs = { a = 1 }\nsamples = 2\n" + data,
			"run.toml:23 CONFLICT eval.suites.sums.args `eval.suites.sums.args` is for `kind = \"inspect_ai\"`: tasks of lm_eval take no arguments; remove it\n" +
				"run.toml:24 CONFLICT eval.suites.sums.samples `eval.suites.sums.samples` must be 1: lm_eval samples each question once; remove it, or write `repeats` into the task\n" +
				"run.toml:25 CONFLICT eval.suites.sums.data `eval.suites.sums.data` has no effect: the tasks of lm_eval have their own data and metrics; remove it",
		},
		{
			"[eval.suites.sums]\nkind = \"inspect_ai\"\ntasks = [\"sums.py\"]\nnum_fewshot = 2\nreward = { expression = \"1.0\" }\n",
			"run.toml:23 CONFLICT eval.suites.sums.num_fewshot `eval.suites.sums.num_fewshot` is for `kind = \"lm_eval\"`; remove it, or give the task an argument in `args`\n" +
				"run.toml:24 CONFLICT eval.suites.sums.reward `eval.suites.sums.reward` has no effect: the tasks of inspect_ai have their own data and metrics; remove it",
		},
		{
			"[eval.suites.sums]\ntasks = [\"sums.py\"]\n" + data,
			"run.toml:21 CONFLICT eval.suites.sums.tasks `eval.suites.sums.tasks` has no effect without a library; write `kind = \"inspect_ai\"` or `kind = \"lm_eval\"`, or remove it",
		},
		{"[[eval.suites]]\nname = \"sums\"\n", "run.toml:20 SYNTAX  a configuration has no arrays of tables; write one table: [suites]\n" +
			"run.toml:21 WRONG_TYPE eval.suites.name [eval.suites] contains tables with names that you choose, not the key `name`; write [eval.suites.name]"},
	} {
		var got []string
		for _, p := range read(t, good+"\n"+c.text).Sorted() {
			got = append(got, fmt.Sprintf("%s:%d %s %s %s; %s", p.GetFile(), p.GetLine(), p.GetReason(), p.GetField(), p.GetMessage(), p.GetFix()))
		}
		if text := strings.Join(got, "\n"); text != c.want {
			t.Errorf("%s\n got %s\nwant %s", c.text, text, c.want)
		}
	}
}

// What a run evaluates must be possible in the run; the rest of a suite is for `rollout eval`.
func TestSuitesOfARun(t *testing.T) {
	t.Parallel()
	const sums = "[eval.suites.sums]\ndata = \"a.jsonl\"\nsamples = 4\nmetrics = [\"mean\", \"pass@4\"]\n"
	gate := func(metric string) string {
		return sums + "[gates.good]\nwhen = \"" + metric + " >= 0.8\"\naction = \"stop\"\n"
	}
	const reads = "run.toml:25 CONFLICT gates.good.when `gates.good.when` reads "
	for _, c := range []struct{ text, set, want string }{
		{sums, "", ""},
		{sums, "eval.every_steps=2", ""},
		{gate("eval/sums/pass@4"), "eval.every_steps=2", ""},
		{gate("eval/sums/mean_stderr"), "eval.every_steps=2", ""},
		{gate("eval/sums/failed"), "eval.every_steps=2", ""},
		{gate("eval/sums/accuracy"), "eval.every_steps=2", ""}, // a number of the reward
		{gate("eval/accuracy"), "eval.every_steps=2|data.eval=\"b.jsonl\"", ""},
		{gate("eval/reward"), "eval.every_steps=2|data.eval=\"b.jsonl\"", ""},
		{gate("eval/sums/pass@2"), "eval.every_steps=2", reads + "`eval/sums/pass@2`, but the suite `sums` has no metric `pass@2`; add \"pass@2\" to `metrics` in [eval.suites.sums]"},
		{gate("eval/sums/pas@4"), "eval.every_steps=2", reads + "`eval/sums/pas@4`, but the suite `sums` has no metric `pas@4`; did you mean `eval/sums/pass@4`?"},
		{gate("eval/sum/mean"), "eval.every_steps=2", reads + "`eval/sum/mean`, but the run has no suite `sum`; did you mean `eval/sums/mean`?"},
		{gate("eval/words/mean"), "eval.every_steps=2", reads + "`eval/words/mean`, but the run has no suite `words`; add a table [eval.suites.words]"},
		{gate("eval/sums"), "eval.every_steps=2", reads + "`eval/sums`, but `sums` is a suite, which has several metrics; write `eval/sums/mean`"},
		{gate("eval/sums/mean"), "", reads + "`eval/sums/mean`, but the run has no evaluations; write `every_steps = 10` in [eval], and `eval` in [data]"},
		{gate("eval/reward"), "eval.every_steps=2", reads + "`eval/reward`, but the run has no held-out rows; write `eval` in [data], or a metric of a suite, `eval/SUITE/METRIC`"},
		{
			gate("eval/sums/good"), "eval.every_steps=2|eval.suites.sums.reward={expression=\"1.0\"}",
			reads + "`eval/sums/good`, but the suite `sums` has no metric `good`; its metrics are `mean` and `pass@4`",
		},
		{
			sums + "max_tokens = 4096\n", "eval.every_steps=2|engine.max_model_len=64|sampling.max_tokens=8",
			"run.toml:24 CONFLICT eval.suites.sums.max_tokens `eval.suites.sums.max_tokens` must be below `engine.max_model_len`; lower it, or raise `max_model_len` in [engine] from 64",
		},
		{
			sums + "environment = { kind = \"python\", path = \"guess.py:Guess\" }\n", "eval.every_steps=2",
			"run.toml:24 CONFLICT eval.suites.sums.environment `eval.suites.sums.environment` is for `rollout eval` only: " +
				"evaluations of a run take place in its own [environment]; move the suite to another file, for `rollout eval --suite FILE`",
		},
		{
			"[eval.suites.sums]\nkind = \"inspect_ai\"\ntasks = [\"sums.py\"]\n", "eval.every_steps=2",
			"run.toml:21 CONFLICT eval.suites.sums.kind `eval.suites.sums.kind` is for `rollout eval` only; move the suite to another file, for `rollout eval --suite FILE`",
		},
		{"[eval.suites.sums]\nkind = \"inspect_ai\"\ntasks = [\"sums.py\"]\n", "", ""},
		{
			"[eval.suites.chat]\ndata = \"a.jsonl\"\nmetrics = [\"win_rate\"]\nbaseline = \"base/chat.parquet\"\n" + gate("eval/chat/win_rate"),
			"eval.every_steps=2", "",
		},
		{
			sums + "reward = { model = { path = \"judge\" } }\n", "eval.every_steps=2",
			"run.toml:24 CONFLICT eval.suites.sums.reward `eval.suites.sums.reward` has a reward model, which evaluations of a run can have in [reward] only; " +
				"use the model in [reward], or move the suite to another file, for `rollout eval --suite FILE`",
		},
	} {
		var set, got []string
		if c.set != "" {
			set = strings.Split(c.set, "|")
		}
		for _, p := range read(t, good+"\n"+c.text, set...).Sorted() {
			got = append(got, fmt.Sprintf("%s:%d %s %s %s; %s", p.GetFile(), p.GetLine(), p.GetReason(), p.GetField(), p.GetMessage(), p.GetFix()))
		}
		if text := strings.Join(got, "\n"); text != c.want {
			t.Errorf("%s\n%s\n got %s\nwant %s", c.text, c.set, text, c.want)
		}
	}
}
