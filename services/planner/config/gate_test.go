package config

import (
	"fmt"
	"strings"
	"testing"
)

const evaluated = "data.eval=\"eval.jsonl\"|eval.every_steps=2"

func TestGates(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ text, set, want string }{
		{"[gates.good]\nwhen = \"eval/accuracy >= 0.8\"\naction = \"stop\"\n", evaluated, ""},
		{"[gates.good]\nwhen = \"no improvement of reward/mean in 50 steps\"\naction = \"promote\"\n[snapshot]\nbest = \"loss\"\nkeep_best = 2\n", "", ""},
		{
			"[gates.good]\nwhen = \"mismatch/lk > 0.1\"\naction = \"stop\"\n", "",
			"run.toml:21 BAD_VALUE gates.good.when `gates.good.when`: no run has a metric `mismatch/lk`; did you mean `mismatch/kl`?",
		},
		{
			"[gates.good]\nwhen = \"loss => 0.1\"\naction = \"stop\"\n", "",
			"run.toml:21 BAD_VALUE gates.good.when `gates.good.when`: `=>` is not an operator; write `loss >= 0.1`",
		},
		{
			"[gates.good]\nwhen = \"loss > 0.1\"\naction = \"halt\"\n", "",
			"run.toml:22 BAD_VALUE gates.good.action `gates.good.action` must be \"stop\", \"pause\", \"promote\" or \"restore_best\", got \"halt\"; write \"stop\", \"pause\", \"promote\" or \"restore_best\"",
		},
		{
			"[gates.good]\naction = \"stop\"\n", "",
			"run.toml:20 MISSING_KEY gates.good.when `when` is missing in [gates.good]; write `when = \"eval/reward >= 0.8\"`",
		},
		{
			"[gates.good]\nwhen = \"eval/reward >= 0.8\"\naction = \"stop\"\n", "",
			"run.toml:21 CONFLICT gates.good.when `gates.good.when` reads `eval/reward`, but the run has no evaluations; write `every_steps = 10` in [eval], and `eval` in [data]",
		},
		{
			"[gates.good]\nwhen = \"eval/loss < 0.8\"\naction = \"stop\"\n", evaluated,
			"run.toml:21 CONFLICT gates.good.when `gates.good.when` reads `eval/loss`, but evaluations of this run measure rewards; write `eval/reward`",
		},
		{
			"[gates.good]\nwhen = \"eval/reward > 0.8\"\naction = \"promote\"\n", evaluated + "|engine.workers=2|eval.workers=1",
			"run.toml:22 CONFLICT gates.good.action `gates.good.action` takes a snapshot after an evaluation, but with `eval.workers` the learner has made further steps by then; " +
				"remove `workers` from [eval], or use the actions `stop` and `pause`",
		},
		{
			"[snapshot]\nbest = \"accuracy\"\n", "",
			"run.toml:21 BAD_VALUE snapshot.best `snapshot.best`: no run has a metric `accuracy`; `rollout report RUN` shows the metrics of a run; " +
				"those of a reward are `reward/NAME`, and those of evaluations `eval/NAME`",
		},
		{"[gates.good]\nwhen = \"no improvement of reward/mean in 5 steps\"\naction = \"restore_best\"\n[snapshot]\nbest = \"reward/mean\"\n", "", ""},
		{
			"[gates.good]\nwhen = \"loss > 0.8\"\naction = \"restore_best\"\n", "",
			"run.toml:22 CONFLICT gates.good.action `gates.good.action` restores the best snapshot, but the run keeps none; " +
				"write `best = \"eval/reward\"` in [snapshot], or another metric that tells which weights are best",
		},
		{
			"[snapshot]\nkeep_best = 3\n", "",
			"run.toml:21 CONFLICT snapshot.keep_best `snapshot.keep_best` has no effect without `snapshot.best`; write `best = \"eval/reward\"` in [snapshot], or remove it",
		},
	} {
		var set []string
		if c.set != "" {
			set = strings.Split(c.set, "|")
		}
		var got []string
		for _, p := range read(t, good+"\n"+c.text, set...).Sorted() {
			got = append(got, fmt.Sprintf("%s:%d %s %s %s; %s", p.GetFile(), p.GetLine(), p.GetReason(), p.GetField(), p.GetMessage(), p.GetFix()))
		}
		if text := strings.Join(got, "\n"); text != c.want {
			t.Errorf("%s\n got %s\nwant %s", c.text, text, c.want)
		}
	}
}
