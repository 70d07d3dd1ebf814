package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/nearest"
	"github.com/rollout-rl/rollout/services/planner/document"
	"github.com/rollout-rl/rollout/services/planner/problem"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// aliases are the names of keys in other trainers. `algorithm.*` is the chosen algorithm.
var aliases = map[string]string{
	"advantage_norm":        "algorithm.*.normalization",
	"batch_size":            "train.groups_per_step",
	"beta":                  "algorithm.*.kl_coefficient",
	"checkpoint_every":      "snapshot.every_steps",
	"clip_range":            "algorithm.*.clip_low",
	"cliprange_value":       "algorithm.*.value_clip",
	"dataset":               "data.train",
	"delta":                 "algorithm.*.dual_clip",
	"ent_coef":              "algorithm.*.entropy_coefficient",
	"entropy_coeff":         "algorithm.*.entropy_coefficient",
	"epsilon":               "algorithm.*.clip_low",
	"epsilon_high":          "algorithm.*.clip_high",
	"eval_steps":            "eval.every_steps",
	"gradient_clip":         "train.max_grad_norm",
	"kl_coef":               "algorithm.*.kl_coefficient",
	"lam":                   "algorithm.*.gae_lambda",
	"loss_agg_mode":         "algorithm.*.reduction",
	"loss_type":             "algorithm.*.reduction",
	"lr":                    "train.learning_rate",
	"lr_scheduler":          "train.schedule",
	"max_completion_length": "sampling.max_tokens",
	"max_length":            "engine.max_model_len",
	"max_new_tokens":        "sampling.max_tokens",
	"max_steps":             "train.steps",
	"model_name_or_path":    "model.path",
	"n":                     "sampling.group_size",
	"num_generations":       "sampling.group_size",
	"num_iterations":        "algorithm.*.epochs",
	"ppo_epochs":            "algorithm.*.epochs",
	"prompts_per_step":      "train.groups_per_step",
	"save_steps":            "snapshot.every_steps",
	"scale_rewards":         "algorithm.*.normalization",
	"teacher_model":         "algorithm.*.teacher",
	"vf_coef":               "algorithm.*.value_coefficient",
	"warmup":                "train.warmup_steps",
}

func (r *binder) unknown(e *document.Entry, message protoreflect.MessageDescriptor, at string) {
	path := join(at, e.Key)
	if e.Value.Kind == document.Table {
		r.unknownTable(e, message, at)
		return
	}
	where := "at the top level"
	if at != "" {
		where = "in [" + at + "]"
	}
	r.Problems.At(e.Span, problem.UnknownKey, path, fmt.Sprintf("unknown key `%s` %s", e.Key, where), fixUnknown(e.Key, message, at, r.algorithm()))
	if near := nearest.To(e.Key, fieldNames(message, false)); near != "" {
		r.broken[join(at, near)] = true // it was probably meant: no rule is checked for its default
	}
}

func (r *binder) unknownTable(e *document.Entry, message protoreflect.MessageDescriptor, at string) {
	path := join(at, e.Key)
	names := fieldNames(message, true)
	what := fmt.Sprintf("unknown table [%s]", path)
	if at == "algorithm" {
		what = fmt.Sprintf("unknown algorithm `%s`", e.Key)
		r.broken[at] = true
	}
	var fix string
	if near := nearest.To(e.Key, names); near != "" {
		fix = fmt.Sprintf("did you mean [%s]?", join(at, near))
		r.broken[join(at, near)] = true
	} else if full := pathOf(e.Key, "", true); full != "" {
		fix = fmt.Sprintf("write [%s]", full)
	} else if len(names) == 0 {
		fix = fmt.Sprintf("[%s] contains no tables: remove it", at)
	} else {
		for i, name := range names {
			names[i] = "[" + join(at, name) + "]"
		}
		fix = "write " + enumerate(names, "or")
	}
	span := e.Value.Span
	if !strings.HasPrefix(span.Text(), "[") { // made by a dotted key or `{`
		span = e.Span
	}
	r.Problems.At(span, problem.UnknownKey, path, what, fix)
}

// algorithm is the name of the chosen table in [algorithm]; "" without one.
func (r *binder) algorithm() string {
	if e := r.root.Find("algorithm"); e != nil && e.Value.Kind == document.Table && len(e.Value.Entries) > 0 {
		return e.Value.Entries[0].Key
	}
	return ""
}

// fixUnknown suggests a known key: in the same table, in another one, or by the name in other
// trainers.
func fixUnknown(key string, message protoreflect.MessageDescriptor, at, algorithm string) string {
	if near := nearest.To(key, fieldNames(message, false)); near != "" {
		return fmt.Sprintf("did you mean `%s`?", near)
	}
	alias := aliasOf(key, algorithm)
	if alias != "" && parent(alias) == at {
		return fmt.Sprintf("its name is `%s`", leafOf(alias))
	}
	if full := pathOf(key, algorithm, false); full != "" {
		return fmt.Sprintf("`%s` belongs %s", key, home(full))
	}
	if alias != "" {
		return fmt.Sprintf("its name is `%s`, and it belongs %s", leafOf(alias), home(alias))
	}
	all := leaves(algorithm)
	names := make([]string, 0, len(all))
	for _, path := range all {
		names = append(names, leafOf(path))
	}
	if near := nearest.To(key, names); near != "" {
		return fmt.Sprintf("did you mean `%s`? It belongs %s", near, home(all[slices.Index(names, near)]))
	}
	known := fieldNames(message, false)
	if len(known) == 0 {
		return "remove it"
	}
	return "remove it; the keys are " + quoted(known, "and")
}

func home(path string) string {
	if table := parent(path); table != "" {
		return "in [" + table + "]"
	}
	return "at the top, before the first table"
}

func fieldNames(message protoreflect.MessageDescriptor, tables bool) []string {
	var names []string
	for _, field := range keysOf(message) {
		if (field.Message() != nil) == tables {
			names = append(names, field.TextName())
		}
	}
	return names
}

// aliasOf is the path of the key that other trainers call name; "" without one.
func aliasOf(name, algorithm string) string {
	full, ok := strings.CutPrefix(aliases[strings.ToLower(name)], "algorithm.*.")
	if !ok {
		return full
	}
	if algorithm == "" {
		algorithm = "grpo"
	}
	if full = "algorithm." + algorithm + "." + full; keyAt(full) == nil {
		return ""
	}
	return full
}

// pathOf is the path of the first key, or table, with a name. Only the keys of the chosen algorithm
// count, or those of all algorithms without a chosen one.
func pathOf(name, algorithm string, table bool) string {
	found := ""
	walk(root(), "", func(path string, field key) {
		if field.TextName() == name && (field.Message() != nil) == table && found == "" && inReach(path, algorithm) {
			found = path
		}
	})
	return found
}

// leaves are the paths of all keys, except those of other algorithms.
func leaves(algorithm string) []string {
	var out []string
	walk(root(), "", func(path string, field key) {
		if field.Message() == nil && inReach(path, algorithm) {
			out = append(out, path)
		}
	})
	return out
}

func inReach(path, algorithm string) bool {
	rest, ok := strings.CutPrefix(path, "algorithm.")
	return !ok || algorithm == "" || strings.HasPrefix(rest+".", algorithm+".")
}
