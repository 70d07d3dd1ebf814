package health_test

import (
	"maps"
	"math"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/refusal"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"github.com/rollout-rl/rollout/services/controller/health"
)

// defaults are the default thresholds; the planner fills them in.
func defaults() *configv1.HealthConfig {
	return &configv1.HealthConfig{
		OnCollapse: proto.String("warn"), Steps: proto.Uint32(5), Window: proto.Uint32(20), EntropyShare: proto.Float64(0.1),
		RewardDeviations: proto.Float64(4), RewardDrop: proto.Float64(0.5), RewardLimit: proto.Float64(1e6), GradNormFactor: proto.Float64(10),
		KlReference: proto.Float64(5), KlEngine: proto.Float64(1), ClippedShare: proto.Float64(0.95), LossFactor: proto.Float64(2),
	}
}

func grpo() *configv1.RunConfig {
	return &configv1.RunConfig{
		Health: defaults(), Train: &configv1.TrainConfig{MaxGradNorm: proto.Float64(1)},
		Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Grpo{Grpo: &configv1.GrpoConfig{
			Loss: &configv1.PolicyLossConfig{KlCoefficient: proto.Float64(0), EntropyCoefficient: proto.Float64(0)},
		}}},
	}
}

func sft() *configv1.RunConfig {
	config := grpo()
	config.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Sft{Sft: &configv1.SftConfig{}}}
	return config
}

func monitor(t *testing.T, config *configv1.RunConfig) *health.Monitor {
	t.Helper()
	m, err := health.New(config, nil)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// usual are the metrics of a step of a run that is well: binary rewards of 256 samples.
func usual(step uint64) map[string]float64 {
	wave := math.Sin(float64(step)) // noise that does not change from test to test
	return map[string]float64{
		"loss": 0.01 * wave, "reward/mean": 0.3 + 0.03*wave, "reward/std": 0.46, "samples": 256, "entropy": 1.8 + 0.05*wave,
		"grad_norm": 0.4 + 0.2*wave, "mismatch/kl": 1e-5, "kl/reference": 0.02, "clip_fraction": 0.01, "learning_rate": 1e-6,
	}
}

// with are the usual metrics with others in their place.
func with(step uint64, other map[string]float64) map[string]float64 {
	metrics := usual(step)
	maps.Copy(metrics, other)
	return metrics
}

// run observes the steps after the usual ones, and returns what was found.
func run(m *health.Monitor, before, after uint64, other func(step uint64) map[string]float64) (found []health.Finding) {
	for step := uint64(1); step <= before+after; step++ {
		metrics := usual(step)
		if step > before {
			metrics = with(step, other(step))
		}
		found = append(found, m.Observe(step, metrics)...)
	}
	return found
}

func TestEachCollapseIsFoundOnceAfterItsSteps(t *testing.T) {
	t.Parallel()
	constant := func(metrics map[string]float64) func(uint64) map[string]float64 {
		return func(uint64) map[string]float64 { return metrics }
	}
	async := grpo()
	async.Mode = proto.String("async")
	for name, c := range map[string]struct {
		config *configv1.RunConfig
		other  func(step uint64) map[string]float64
		want   string
		steps  uint64 // until it is found
		says   []string
	}{
		"entropy": {grpo(), constant(map[string]float64{"entropy": 0.1}), refusal.EntropyCollapse, 5,
			[]string{"0.1 nats per token", "0.1 times the 1.84", "the reward has not improved", "`entropy_coefficient = 0.001` in [algorithm.grpo]", "in each of the last 5 steps"}},
		"reward": {grpo(), constant(map[string]float64{"reward/mean": 0.02}), refusal.RewardCollapse, 5,
			[]string{"a mean of 0.02", "after a best mean of 0.3", "`kl_coefficient = 0.01` in [algorithm.grpo]"}},
		"gradient": {grpo(), constant(map[string]float64{"grad_norm": 900}), refusal.GradientExplosion, 5,
			[]string{"a norm of 900", "10 times the median 0.4", "`train.max_grad_norm` = 1"}},
		"refused gradients": {grpo(), constant(map[string]float64{"refused": 1}), refusal.GradientsRefused, 5, []string{"folder `refused`"}},
		"KL": {grpo(), constant(map[string]float64{"kl/reference": 9}), refusal.KLExplosion, 5,
			[]string{"9 nats per token", "higher `kl_coefficient` in [algorithm.grpo]"}},
		"engine":        {grpo(), constant(map[string]float64{"mismatch/kl": 2}), refusal.EngineMismatch, 5, []string{"another data type"}},
		"engine, async": {async, constant(map[string]float64{"mismatch/kl": 2}), refusal.EngineMismatch, 5, []string{"`staleness.max_steps`"}},
		"ratio":         {grpo(), constant(map[string]float64{"clip_fraction": 0.99}), refusal.RatioExplosion, 5, []string{"clip_fraction is 0.99"}},
		"importance":    {grpo(), constant(map[string]float64{"importance/bounded": 0.97}), refusal.RatioExplosion, 5, []string{"importance/bounded is 0.97"}},
		"reward magnitude": {grpo(), constant(map[string]float64{"reward/mean": -1e300}), refusal.RewardOutOfRange, 1,
			[]string{"reward/mean is -1e+300", "`health.reward_limit` = 1e+06", "bound the reward"}},
		"reward deviation": {grpo(), constant(map[string]float64{"reward/std": 1e7}), refusal.RewardOutOfRange, 1, []string{"reward/std is 1e+07"}},
		"not a number":     {grpo(), constant(map[string]float64{"loss": math.NaN()}), refusal.NonFiniteMetric, 1, []string{"loss is NaN"}},
		"infinite":         {sft(), constant(map[string]float64{"grad_norm": math.Inf(1)}), refusal.NonFiniteMetric, 1, []string{"grad_norm is +Inf"}},
		"loss":             {sft(), constant(map[string]float64{"loss": 3}), refusal.LossExplosion, 5, []string{"the loss exploded: 3", "`train.warmup_steps`"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const before = 30
			found := run(monitor(t, c.config), before, 8, c.other)
			first := found[:min(1, len(found))]
			for _, f := range found {
				follows := c.want == refusal.NonFiniteMetric || c.want == refusal.RewardOutOfRange && f.Reason == refusal.RewardCollapse
				if f.Reason != c.want && !follows {
					t.Errorf("found %s too: %s", f.Reason, f.What)
				}
			}
			if len(first) != 1 || first[0].Reason != c.want || first[0].Step != before+c.steps || first[0].Since != before+1 || first[0].Repeated {
				t.Fatalf("found %+v", found)
			}
			for _, text := range append(c.says, "Likely cause: ", "Fix: ") {
				if !strings.Contains(first[0].Message(), text) {
					t.Errorf("the message lacks %q: %s", text, first[0].Message())
				}
			}
		})
	}
}

// learning_rate = 1 destroys the policy with its first update, before any window is full.
func TestAPolicyDestroyedByTheFirstUpdateIsFound(t *testing.T) {
	t.Parallel()
	found := run(monitor(t, grpo()), 1, 6, func(uint64) map[string]float64 {
		return map[string]float64{"reward/mean": 0, "reward/std": 0, "entropy": 0.001, "grad_norm": 0, "learning_rate": 1}
	})
	var reasons []string
	for _, f := range found {
		reasons = append(reasons, f.Reason)
		if f.Step != 6 || !strings.Contains(f.Message(), "the learning rate is too high (1 at this step)") {
			t.Errorf("at step %d: %s", f.Step, f.Message())
		}
	}
	if !reflect.DeepEqual(reasons, []string{refusal.EntropyCollapse, refusal.RewardCollapse}) {
		t.Errorf("found %q", reasons)
	}
}

// A run with a low reward has steps without a gradient before and after learning_rate = 1 destroys
// its policy. The rewards say nothing then, but the entropy does, which such steps report too.
func TestADestroyedPolicyIsFoundInStepsWithoutAGradient(t *testing.T) {
	t.Parallel()
	m := monitor(t, grpo())
	var found []health.Finding
	for step, entropy := range []float64{2.2, 2.1, 1.9, 3e-4, 0, 0, 0, 0, 0, 0} {
		reward := max(0, 0.02-0.01*float64(step))
		found = append(found, m.Observe(uint64(step+1), map[string]float64{
			"loss": 0, "grad_norm": 0, "reward/mean": reward, "reward/std": math.Sqrt(reward * (1 - reward)), "samples": 64, "entropy": entropy,
			"zero_advantage_groups": 1, "learning_rate": 1,
		})...)
	}
	if len(found) != 1 || found[0].Reason != refusal.EntropyCollapse || found[0].Since != 4 || found[0].Step != 8 {
		t.Errorf("found %+v", found)
	}
}

func TestAHealthyRunHasNoFindings(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		config *configv1.RunConfig
		other  func(step uint64) map[string]float64
	}{
		"steady": {grpo(), func(uint64) map[string]float64 { return nil }},
		"learns to answer with certainty": {grpo(), func(step uint64) map[string]float64 {
			progress := min(1, float64(step)/100)
			return map[string]float64{"reward/mean": 0.3 + 0.68*progress, "reward/std": 0.46 - 0.32*progress, "entropy": 1.8 * math.Exp(-5*progress)}
		}},
		"single spikes": {grpo(), func(step uint64) map[string]float64 {
			if step%5 == 0 { // the streak ends each time
				return nil
			}
			return map[string]float64{"grad_norm": 200, "kl/reference": 40, "reward/mean": 0}
		}},
		"small gradients that grow stay below the clip": {grpo(), func(step uint64) map[string]float64 {
			if step < 40 {
				return map[string]float64{"grad_norm": 1e-4}
			}
			return map[string]float64{"grad_norm": 0.9}
		}},
		"groups without a gradient": {grpo(), func(step uint64) map[string]float64 {
			return map[string]float64{"grad_norm": float64(step%2) * 0.5}
		}},
		"negative rewards that fluctuate": {grpo(), func(step uint64) map[string]float64 {
			return map[string]float64{"reward/mean": -5 + 0.5*math.Sin(float64(step)), "reward/std": 3}
		}},
		"all rewards are 0": {grpo(), func(uint64) map[string]float64 { return map[string]float64{"reward/mean": 0, "reward/std": 0} }},
		// Without rewards the entropy says nothing: the model should become certain of its data.
		"supervised": {sft(), func(step uint64) map[string]float64 {
			decay := math.Exp(-float64(step) / 20)
			return map[string]float64{"loss": 2.3 * decay, "entropy": 2 * decay, "reward/mean": 0, "mismatch/kl": 20, "clip_fraction": 1}
		}},
		"overfitted, with a noisy loss": {sft(), func(step uint64) map[string]float64 {
			return map[string]float64{"loss": 0.01 + 0.2*math.Abs(math.Sin(float64(step)))}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := monitor(t, c.config)
			for step := uint64(1); step <= 300; step++ {
				for _, f := range m.Observe(step, with(step, c.other(step))) {
					t.Fatalf("step %d: %s: %s", step, f.Reason, f.Message())
				}
			}
		})
	}
}

// A collapse that lasts is reported again after ten times as many steps, as repeated.
func TestALastingCollapseIsReportedAgain(t *testing.T) {
	t.Parallel()
	found := run(monitor(t, grpo()), 10, 60, func(uint64) map[string]float64 { return map[string]float64{"kl/reference": 9} })
	if len(found) != 2 || found[0].Step != 15 || found[0].Repeated || found[1].Step != 60 || !found[1].Repeated || found[1].Since != 11 {
		t.Fatalf("found %+v", found)
	}
}

// The state survives a restart after any step, and steps that a recovery makes again do not count.
func TestARestoredMonitorFindsTheSame(t *testing.T) {
	t.Parallel()
	metrics := func(step uint64) map[string]float64 {
		if step > 25 {
			return with(step, map[string]float64{"reward/mean": 0.01, "entropy": 0.05, "grad_norm": 500})
		}
		return usual(step)
	}
	one := monitor(t, grpo())
	var want []health.Finding
	for step := uint64(1); step <= 40; step++ {
		want = append(want, one.Observe(step, metrics(step))...)
	}
	restored := monitor(t, grpo())
	var got []health.Finding
	for step := uint64(1); step <= 40; step++ {
		got = append(got, restored.Observe(step, metrics(step))...)
		var err error
		if restored, err = health.New(grpo(), restored.State()); err != nil {
			t.Fatal(err)
		}
		for again := max(1, step-3); again <= step; again++ {
			got = append(got, restored.Observe(again, metrics(again))...)
		}
	}
	if len(want) < 3 || !reflect.DeepEqual(got, want) {
		t.Fatalf("found %+v, want %+v", got, want)
	}
	if string(one.State()) != string(restored.State()) {
		t.Errorf("the states differ:\n%s\n%s", one.State(), restored.State())
	}
}

func TestAHaltBelongsToItsIncarnation(t *testing.T) {
	t.Parallel()
	m := monitor(t, grpo())
	if m.Halted(0) != nil || m.Halted(1) != nil {
		t.Fatal("halted before a finding")
	}
	m.Halt(health.Finding{Reason: refusal.NonFiniteMetric, Step: 3, Value: math.NaN()}, 1)
	restored, err := health.New(grpo(), m.State())
	if err != nil || restored.Halted(1).Reason != refusal.NonFiniteMetric || restored.Halted(2) != nil {
		t.Fatalf("halted %v, %v", restored.Halted(1), err)
	}
}

func TestChecksAreOffAtZeroAndWithoutAConfig(t *testing.T) {
	t.Parallel()
	off := grpo()
	off.Health = &configv1.HealthConfig{OnCollapse: proto.String("stop"), Steps: proto.Uint32(1), Window: proto.Uint32(2)}
	without := grpo()
	without.Health = nil
	for _, config := range []*configv1.RunConfig{off, without} {
		found := run(monitor(t, config), 10, 20, func(uint64) map[string]float64 {
			return map[string]float64{"entropy": 0, "reward/mean": -1e9, "grad_norm": 1e9, "kl/reference": 99, "mismatch/kl": 99, "clip_fraction": 1}
		})
		if len(found) > 0 {
			t.Errorf("found %+v", found)
		}
	}
	if _, err := health.New(grpo(), []byte("{")); err == nil {
		t.Error("a broken state was read")
	}
}
