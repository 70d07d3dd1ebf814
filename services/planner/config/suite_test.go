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
