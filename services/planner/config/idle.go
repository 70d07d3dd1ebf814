package config

import (
	"fmt"
	"strings"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// idleKey has keys without an effect while another key has a certain value. `*` is the name of the
// algorithm.
type idleKey struct {
	keys  []string
	where string // the other key
	is    string // its value there, as text
	not   string // if `is` is empty: the value that it does not have there, as text
	why   string
}

var idleKeys = []idleKey{
	{
		[]string{
			"algorithm.*.importance_correction", "algorithm.*.importance_cap", "algorithm.*.importance_floor", "algorithm.*.importance_level", "algorithm.*.old_policy",
			"algorithm.*.importance_sample_mask", "algorithm.*.importance_sample_cap", "algorithm.*.importance_sample_floor",
		},
		"deterministic", "true", "", "the engine computes the same probabilities as the learner",
	},
	{
		[]string{"algorithm.*.importance_correction", "algorithm.*.importance_cap", "algorithm.*.importance_floor", "algorithm.*.importance_level"},
		"algorithm.*.old_policy", "engine", "", "the ratio itself is that to the policy that sampled",
	},
	{
		[]string{"algorithm.*.importance_sample_cap", "algorithm.*.importance_sample_floor"},
		"algorithm.*.importance_sample_mask", "none", "", "no sample is left out",
	},
	{[]string{"algorithm.*.overlong_penalty"}, "algorithm.*.overlong_share", "0", "", "no completion is penalized for its length"},
	{[]string{"algorithm.*.critic_learning_rate"}, "algorithm.*.critic", "head", "", "the critic is a head of the policy and has its learning rate"},
	{[]string{"sampling.refill_rounds", "sampling.refill_shortfall"}, "algorithm.*.dynamic_sampling", "false", "", "no group is replaced"},
	{[]string{"algorithm.*.importance_cap"}, "algorithm.*.teacher_top_k", "", "0", "the divergence of the teacher's tokens has no importance weight"},
}

// applies reports whether the keys have no effect with this value of the other key, "" without it.
func (k idleKey) applies(value string) bool {
	if k.is != "" {
		return value == k.is
	}
	return value != "" && value != k.not
}

// idle reports keys that the text sets and that have no effect.
func (r *checker) idle() {
	name := algorithm.Name(r.Config)
	if name == "" {
		return
	}
	reported := r.idleMultistep()
	for _, one := range idleKeys {
		where := strings.Replace(one.where, "*", name, 1)
		if !r.Readable(where) || !one.applies(r.text(where)) {
			continue
		}
		for _, key := range one.keys {
			key = strings.Replace(key, "*", name, 1)
			if r.Wrote(key) && r.Readable(key) && !reported[key] {
				r.Problems.At(r.Place(key), problem.Conflict, key,
					fmt.Sprintf("`%s` has no effect where `%s` is %s: %s", key, where, r.text(where), one.why), "remove it, or change `"+where+"`")
			}
		}
	}
}

// text is the value at a path, "" without such a key.
func (r *checker) text(path string) string {
	_, value, ok := r.lookup(path)
	if !ok {
		return ""
	}
	return value.String()
}
