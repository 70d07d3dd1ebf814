package condition

import "testing"

func TestParse(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{ // the normal form, or the mistake and its fix
		"eval/reward >= 0.8": "eval/reward >= 0.8",
		"  mismatch/kl>0.1 ": "mismatch/kl > 0.1",
		"loss < 1e-3":        "loss < 0.001",
		"refused != 0":       "refused != 0",
		"no improvement of eval/reward in 3 evaluations":  "no improvement of eval/reward in 3 evaluations",
		"no improvement of loss in 1 step by 0.01":        "no improvement of loss in 1 steps by 0.01",
		"eval/reward => 0.8":                              "`=>` is not an operator; write `eval/reward >= 0.8`",
		"eval/reward=0.8":                                 "`=` is not an operator; write `eval/reward == 0.8`",
		"eval/reward >= 80%":                              "\"80%\" is not a finite number; write a number such as `0.8`",
		"loss < nan":                                      "\"nan\" is not a finite number; write a number such as `0.8`",
		"eval/reward":                                     "\"eval/reward\" is not a condition; " + forms,
		"a >= 1 and b >= 2":                               "\"a >= 1 and b >= 2\" is not a condition; " + forms,
		"/x > 1":                                          "\"/x\" is not the name of a metric; write a name such as `eval/reward` or `mismatch/kl`",
		"no gain of loss":                                 "\"no gain of loss\" is not a condition; write `no improvement of METRIC in 3 evaluations`, or `in 50 steps`",
		"no improvement of loss in 0 steps":               "\"0\" is not a positive integer; write `no improvement of loss in 3 steps`",
		"no improvement of loss in 5 steps by -1":         "an improvement by -1 is negative; write the smallest change that counts, such as `by 0.01`",
		"no improvement of eval/loss in 3 steps":          "`eval/loss` has one value per evaluation, not per step; write `no improvement of eval/loss in 3 evaluations`",
		"no improvement of reward/mean in 10 evaluations": "`reward/mean` has one value per step, not per evaluation; write `no improvement of reward/mean in 10 steps`",
	} {
		c, err := Parse(text)
		got := c.String()
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%q: got %s, want %s", text, got, want)
		}
	}
}

func TestCheckMetric(t *testing.T) {
	t.Parallel()
	for metric, want := range map[string]string{
		"mismatch/kl": "", "reward/brevity": "", "eval/accuracy": "",
		"mismatch/lk": "no run has a metric `mismatch/lk`; did you mean `mismatch/kl`?",
		"eval_reward": "no run has a metric `eval_reward`; did you mean `eval/reward`?",
	} {
		got := ""
		if err := CheckMetric(metric); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: got %q, want %q", metric, got, want)
		}
	}
}

func TestBetter(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		metric          string
		value, best, by float64
		want            bool
	}{
		{"eval/reward", 0.5, 0.4, 0, true},
		{"eval/reward", 0.4, 0.4, 0, false},
		{"eval/reward", 0.45, 0.4, 0.1, false},
		{"eval/loss", 0.3, 0.4, 0, true},
		{"mismatch/kl", 0.5, 0.4, 0, false},
	} {
		if got := Better(c.metric, c.value, c.best, c.by); got != c.want {
			t.Errorf("%+v: got %v", c, got)
		}
	}
}
