package config

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go/buf/validate"
	"buf.build/go/protovalidate"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/nearest"
	"github.com/rollout-rl/rollout/services/planner/document"
	"github.com/rollout-rl/rollout/services/planner/problem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// checker checks the rules of a configuration and reports each violation at its place in the text.
type checker struct{ *Reading }

// rules checks the rules of the contract.
func (r *checker) rules(validator protovalidate.Validator) {
	r.choices(r.Config.ProtoReflect(), "")
	err := validator.Validate(r.Config)
	var invalid *protovalidate.ValidationError
	if err != nil && !errors.As(err, &invalid) {
		r.Problems.At(r.source.End(), problem.BadValue, "", err.Error(), "")
		return
	}
	if err != nil {
		for _, violation := range invalid.Violations {
			if !isCrossField(violation) {
				r.violation(violation)
			}
		}
	}
	r.traits() // rules between keys come second: they mean nothing for a key with a wrong value
	r.gates()
	r.suites()
	if err != nil {
		expressions := expressions()
		for _, violation := range invalid.Violations {
			if id := violation.Proto.GetRuleId(); isCrossField(violation) {
				r.crossField(id, violation.Proto.GetMessage(), dotted(violation), keysIn(expressions[id]))
			}
		}
	}
}

// choices checks that each table sets exactly one of the keys that share a choice. A configuration
// without its text may have all of them: a plan has the keys that were computed from the others.
func (r *checker) choices(m protoreflect.Message, at string) {
	choices := map[string][]key{}
	var names []string
	for _, k := range keysOf(m.Descriptor()) {
		if name := metaOf(k).GetChoice(); name != "" {
			if choices[name] == nil {
				names = append(names, name)
			}
			choices[name] = append(choices[name], k)
		}
		if k.Message() != nil && !k.IsMap() && k.holder(m).Has(k.FieldDescriptor) {
			r.choices(k.value(m).Message(), join(at, k.TextName()))
		}
	}
	for _, name := range names {
		r.choice(m, at, choices[name])
	}
}

// choice checks the keys of one choice. A key in an override replaces another one in the file.
func (r *checker) choice(m protoreflect.Message, at string, keys []key) {
	var names, lines, inFile, overrides []string
	set := false
	for _, k := range keys {
		path := join(at, k.TextName())
		names, lines = append(names, k.TextName()), append(lines, fmt.Sprintf("`%s = %s`", k.TextName(), sample(k)))
		set = set || k.holder(m).Has(k.FieldDescriptor) || r.unread(path)
		if e := r.root.Find(path); e != nil && e.Span.Source.Name == overrideFile {
			overrides = append(overrides, path)
		} else if e != nil {
			inFile = append(inFile, path)
		}
	}
	first := join(at, names[0])
	if !set && !r.holes {
		r.Problems.At(r.Place(first), problem.MissingKey, first, fmt.Sprintf("[%s] sets neither %s", at, quoted(names, "nor")), "write "+enumerate(lines, "or"))
	}
	if len(overrides) == 1 {
		for _, path := range inFile {
			k := keyOf(m.Descriptor(), leafOf(path))
			k.holder(m).Clear(k.FieldDescriptor)
		}
		return
	}
	if both := append(inFile, overrides...); len(both) > 1 {
		r.Problems.At(r.Place(both[1]), problem.Conflict, both[1], fmt.Sprintf("[%s] takes only one of %s", at, quoted(names, "and")), "remove one of them")
	}
}

func isCrossField(v *protovalidate.Violation) bool { return fixes[v.Proto.GetRuleId()] != "" }

func (r *checker) violation(v *protovalidate.Violation) {
	field, id := dotted(v), v.Proto.GetRuleId()
	if v.Proto.GetForKey() {
		r.badName(field, id)
		return
	}
	item := strings.IndexByte(field, '[')
	if item >= 0 {
		field = field[:item]
	}
	if r.brokenUnder(field) {
		return
	}
	if id == "required" {
		r.missing(field, keyAt(field))
		return
	}
	descriptor := keyAt(field)
	place := r.Place(field)
	text := place.Text()
	defer func() { r.broken[field] = true }()
	switch {
	case descriptor.IsList() && item >= 0:
		r.Problems.At(place, problem.BadValue, field, fmt.Sprintf("`%s` has an empty item", field), "remove the empty item")
	case descriptor.IsList():
		r.Problems.At(place, problem.OutOfRange, field, fmt.Sprintf("`%s` %s", field, v.Proto.GetMessage()), "shorten the list")
	case descriptor.Kind() == protoreflect.StringKind:
		r.badText(place, field, *descriptor, v)
	default:
		fix := fixRange(*descriptor)
		if other := foreign(parent(field), leafOf(field), algorithm.Name(r.Config)); other != nil && other.trainer == "TRL" && other.target != field {
			fix = fmt.Sprintf("%s; for the `%s` of %s, %s", fix, leafOf(field), other.trainer, other.fix(parent(field), text))
		}
		r.Problems.At(place, problem.OutOfRange, field,
			fmt.Sprintf("`%s` must be %s, got %s", field, limitsOf(descriptor), text), fix)
	}
}

// badText reports a string that is not among the allowed ones or has the wrong form.
func (r *checker) badText(place document.Span, field string, descriptor key, v *protovalidate.Violation) {
	rules := rulesOf(descriptor)
	got := v.FieldValue.String()
	switch {
	case len(rules.GetString().GetIn()) > 0:
		allowed := append([]string(nil), rules.GetString().GetIn()...)
		fix := "write " + alternatives(allowed)
		if near := nearest.Of(got, allowed); near != "" {
			fix = fmt.Sprintf("did you mean %q?", near)
		}
		if field == "weights.way" && (got == "ipc" || got == "nccl") {
			fix = "remove it: engines with `ipc` or `nccl` need GPUs, on which only the engine `transformers` runs; on one host weights are in shared memory"
		}
		r.Problems.At(place, problem.BadValue, field, fmt.Sprintf("`%s` must be %s, got %q", field, alternatives(allowed), got), fix)
	case got == "":
		r.Problems.At(place, problem.BadValue, field, fmt.Sprintf("`%s` is empty", field), example(descriptor))
	case leafOf(field) == "plugin":
		fix := example(descriptor)
		if strings.HasSuffix(got, ".py") {
			fix = fmt.Sprintf("name the function too: `plugin = \"%s:reward\"`", got)
		}
		if strings.HasSuffix(got, ".toml") {
			fix = fmt.Sprintf("name the plugin of the manifest too: `plugin = \"%s:NAME\"`", got)
		}
		r.Problems.At(place, problem.BadValue, field, fmt.Sprintf("`%s` must be of the form `file.py:function`, `plugin.toml:NAME`, or `DISTRIBUTION:NAME`, got %q", field, got), fix)
	case leafOf(field) == "baseline":
		r.Problems.At(place, problem.BadValue, field, fmt.Sprintf("`%s` must end in .parquet or .jsonl, got %q", field, got), example(descriptor))
	case field == "name":
		fix := example(descriptor)
		if slug := slugify(got); slug != "" {
			fix = fmt.Sprintf("write `name = %q`", slug)
		}
		r.Problems.At(place, problem.BadValue, field,
			fmt.Sprintf("`%s` must have 1 to 63 lower-case letters, digits, and dashes, got %q", field, got), fix)
	default:
		r.Problems.At(place, problem.BadValue, field, fmt.Sprintf("`%s`: %s, got %q", field, v.Proto.GetMessage(), got), example(descriptor))
	}
}

var nameInPath = regexp.MustCompile(`\["([^"]*)"\]`)

// dotted is the path of a violation as the text writes it, such as `reward.composite.format` for a
// named table.
func dotted(v *protovalidate.Violation) string {
	return tomlPath(nameInPath.ReplaceAllString(protovalidate.FieldPathString(v.Proto.GetField()), ".$1"))
}

// badName reports an invalid name of a table.
func (r *checker) badName(field, rule string) {
	r.broken[field] = true
	if rule == "string.not_in" {
		r.Problems.At(r.Place(field), problem.BadValue, field,
			fmt.Sprintf("[%s]: the metric `reward/%s` already exists", field, leafOf(field)), "rename the table")
		return
	}
	r.Problems.At(r.Place(field), problem.BadValue, field,
		fmt.Sprintf("[%s]: a name has lower-case letters, digits, and underscores, and starts with a letter", field), "rename the table")
}

// missing reports an absent key or table, with the lines that fix it.
func (r *checker) missing(field string, descriptor *key) {
	if r.holes {
		return // it may be on a line that could not be read
	}
	place := r.Place(field)
	if descriptor == nil { // a required oneof
		table := parent(field) // the path ends with the name of the oneof
		r.Problems.At(place, problem.MissingKey, table, fmt.Sprintf("[%s] has no table of an algorithm", table),
			"write "+enumerate(oneofTables(table), "or"))
		return
	}
	if descriptor.Message() == nil {
		where, fix := "at the top level", example(*descriptor)+" before the first table"
		if table := parent(field); table != "" {
			where, fix = "in ["+table+"]", example(*descriptor)
		} else {
			place.Offset = 0
		}
		r.Problems.At(place, problem.MissingKey, field, fmt.Sprintf("`%s` is missing %s", descriptor.TextName(), where), fix)
		return
	}
	if names := oneofTables(field); len(names) > 0 {
		r.Problems.At(place, problem.MissingKey, field, "no algorithm is set", "add the table "+enumerate(names, "or"))
		return
	}
	r.broken[field] = true // no rule is checked for its keys
	r.Problems.At(place, problem.MissingKey, field, fmt.Sprintf("the table [%s] is missing", field), "add "+tableExample(field, descriptor.Message()))
}

var pathInRule = regexp.MustCompile(`this\.([a-z_][a-z_0-9.]*[a-z_0-9])`)

// keysIn are the keys that an expression in CEL reads.
func keysIn(expression string) []string {
	var keys []string
	for _, match := range pathInRule.FindAllStringSubmatch(expression, -1) {
		keys = append(keys, match[1])
	}
	return keys
}

// crossField reports a broken rule between keys, at the first key that the text sets, in the order
// of the rule's message. at is the table whose message has the rule, "" for the root. A rule that
// reads a key without a readable value is not reported.
func (r *checker) crossField(id, message, at string, keys []string) {
	chosen := "algorithm." + algorithm.Name(r.Config)
	for _, read := range keys {
		path := join(at, tomlPath(strings.Replace(read, "algorithm.*", chosen, 1)))
		if k := keyAt(path); r.unread(path) || k != nil && k.IsMap() && r.brokenUnder(path) {
			return
		}
	}
	if at != "" {
		message = strings.ReplaceAll(message, parent(at)+".*", at)
	}
	message = strings.ReplaceAll(message, "algorithm.*", chosen)
	named := namedFields(message)
	if r.holes && r.root.Find(named[0]) == nil {
		return // it may be on a line that could not be read
	}
	if id == "run_config.data_train" && r.root.Find("data.train") != nil && r.root.Find("data.train_mix") != nil {
		r.Problems.At(r.root.Find("data.train").Span, problem.Conflict, "data.train", "`data.train` and `[data.train_mix.*]` are both set",
			"remove `data.train`, or write it as a table [data.train_mix.NAME] with `path`")
		return
	}
	place, field := r.source.End(), ""
	for _, path := range named {
		if e := r.root.Find(path); e != nil {
			place, field = e.Value.Span, path
			break
		}
	}
	r.Problems.At(place, problem.Conflict, field, message, fixes[id])
}

// fixes has the suggestion for each rule between keys; a test compares it with the contract.
var fixes = map[string]string{
	"run_config.sync_staleness":                "remove `staleness.max_steps`, or write `mode = \"async\"`",
	"run_config.reward":                        "add [reward] with `plugin = \"reward.py:function\"`",
	"run_config.reward_kind":                   "write `plugin = \"reward.py:function\"` only",
	"run_config.reward_sandbox":                "remove `sandbox` from [reward]",
	"run_config.reward_part":                   "write `plugin = \"reward.py:function\"` only",
	"run_config.external_reward":               "remove the table [reward], and close each session with its reward",
	"run_config.external_eval":                 "remove `every_steps` from [eval], and watch `reward/mean` instead",
	"run_config.external_rows":                 "use an algorithm such as [algorithm.grpo], or remove `kind` from [environment]",
	"run_config.external_teacher":              "write `teacher` with a folder instead",
	"run_config.external_deterministic":        "remove `deterministic`",
	"run_config.external_smaller":              "remove `min_group_size`",
	"run_config.environment_path":              "write `path = \"guess.py:Guess\"` in [environment] for `kind = \"python\"` or `\"verifiers\"` only",
	"run_config.tools_chat":                    "write `chat_template = true` in [model]",
	"run_config.environment_reward":            "remove the table [reward]",
	"run_config.multistep_algorithm":           "use [algorithm.ppo], or remove the table [multistep]",
	"run_config.multistep_reward":              "remove the table [reward]",
	"run_config.multistep_kind":                "remove `kind` from [environment]",
	"run_config.multistep_engine":              "remove `kind` from [engine]",
	"run_config.multistep_lora":                "remove the table [lora]",
	"run_config.multistep_ranks":               "remove `ranks` from [train]",
	"run_config.multistep_logprob_type":        "remove `logprob_type` from [multistep], or write `logprob_type = \"action_level\"`",
	"run_config.multistep_eval":                "add `eval = \"heldout.jsonl\"` to [data], or remove `every_steps` from [eval]",
	"run_config.multistep_suites":              "remove the tables, and write `eval = \"heldout.jsonl\"` in [data]",
	"run_config.multistep_kl":                  "remove `kl_coefficient`: it is 0.0 by default with [multistep]",
	"run_config.multistep_critic":              "remove `critic` from [algorithm.ppo]",
	"run_config.multistep_verify":              "remove `verify` from [weights]",
	"run_config.multistep_update":              "remove `update` from [weights]",
	"run_config.multistep_chat":                "remove `chat_template` from [model]",
	"run_config.multistep_environments":        "write `environments = 8` in [multistep], or another multiple of `workers` in [engine]",
	"run_config.multistep_environment_workers": "write `environments = 8` in [multistep], or another multiple of `environment_workers`",
	"run_config.environment_rows":              "use an algorithm such as [algorithm.grpo], or remove `kind` from [environment]",
	"run_config.environment_teacher":           "write `teacher` with a folder instead",
	"run_config.credit":                        "remove `credit`, or use [algorithm.ppo], [algorithm.reinforce_pp], or [algorithm.grpo]",
	"run_config.min_group_size":                "lower `min_group_size`",
	"run_config.min_group_compared":            "write `min_group_size = 2`",
	"run_config.group_size":                    "write `group_size = 8` in [sampling]",
	"run_config.single":                        "remove `group_size` from [sampling]",
	"run_config.temperature":                   "remove `temperature` from [sampling]: 1.0 is the default",
	"run_config.minibatches":                   "lower `minibatches`, or raise `groups_per_step` in [train]",
	"policy_loss.kl_estimator":                 "write `kl_estimator = \"k3\"`, or `kl_in = \"reward\"`",
	"policy_loss.kl_target":                    "remove `kl_target`, or write `kl_coefficient = 0.05`",
	"policy_loss.dual_clip":                    "write `dual_clip = 3.0`, or remove it",
	"cispo.dual_clip":                          "remove `dual_clip`",
	"policy_loss.importance_floor":             "lower `importance_floor` or raise `importance_cap`",
	"policy_loss.importance_sample_floor":      "lower `importance_sample_floor` or raise `importance_sample_cap`",
	"run_config.kto_weights":                   "remove one of them: 1.0 is the default",
	"run_config.teacher":                       "write `teacher = \"models/teacher\"`, or a table [algorithm.distillation.endpoint] with `base_url` and `model`",
	"run_config.teacher_temperature":           "remove `temperature` from [sampling]: 1.0 is the default",
	"run_config.data_train":                    "write `train = \"data/train.jsonl\"` in [data], or tables such as [data.train_mix.math] with `path`",
	"run_config.data_weights":                  "write a `weight` in each table, or remove all of them to have every row once",
	"run_config.deterministic_async":           "remove `deterministic`, or write `mode = \"sync\"`",
	"ppo.critic_warmup_steps":                  "write `critic = \"network\"`, or remove `critic_warmup_steps`",
	"distillation.teacher_top_k":               "write `teacher = \"models/teacher\"` instead of the table [algorithm.distillation.endpoint], or remove `teacher_top_k`",
	"run_config.critic_warmup":                 "lower `critic_warmup_steps` or raise `steps`",
	"run_config.warmup":                        "lower `warmup_steps` or raise `steps`",
	"run_config.eval_data":                     "add `eval = \"data/eval.jsonl\"` to [data] and, to score answers, a [reward] table, or remove `every_steps` from [eval]",
	"run_config.engine_url":                    "write `kind = \"vllm\"` in [engine], or remove `url`",
	"run_config.engine_url_host":               "start the server on this host with `--host 127.0.0.1` and write that address, or put TLS in front of it",
	"run_config.engine_url_workers":            "write `workers = 1` in [engine], or remove `url`",
	"run_config.eval_workers":                  "lower `workers` in [eval], or raise `workers` in [engine]",
	"run_config.eval_workers_idle":             "remove `workers` from [eval], or write `every_steps = 10` there and add a [reward] table",
	"run_config.reward_model_eval":             "remove the table [reward]: evaluations then report `rewards/accuracy` on the held-out pairs",
	"run_config.lora_freeze":                   "remove `freeze` from [train], or the table [lora]",
	"run_config.lora_average":                  "remove `ema_decay` from [train], or the table [lora]",
	"run_config.deliver":                       "remove `deliver_every_steps`: 1 is the default",
	"eval_suite.reward":                        "write `reward = { plugin = \"reward.py:function\" }` only",
	"run_config.context":                       "lower `max_tokens` in [sampling], or raise `max_model_len` in [engine]",
}

// expressions are the rules between keys that the contract has, by their ids.
func expressions() map[string]string {
	out := map[string]string{}
	var add func(message protoreflect.MessageDescriptor)
	add = func(message protoreflect.MessageDescriptor) {
		rules, _ := proto.GetExtension(message.Options(), validate.E_Message).(*validate.MessageRules)
		for _, rule := range rules.GetCel() {
			out[rule.GetId()] = rule.GetExpression()
		}
		for i := range message.Fields().Len() {
			if inner := tableOf(message.Fields().Get(i)); inner != nil {
				add(inner)
			}
		}
	}
	add(root())
	return out
}

var inBackticks = regexp.MustCompile("`\\[?([a-z_0-9.]+)\\]?[^`]*`")

func namedFields(message string) []string {
	var out []string
	for _, match := range inBackticks.FindAllStringSubmatch(message, -1) {
		out = append(out, match[1])
	}
	return out
}

// unread reports whether a key, or a table that contains it, could not be read.
func (r *Reading) unread(field string) bool {
	for broken := range r.broken {
		if broken == field || strings.HasPrefix(field, broken+".") {
			return true
		}
	}
	return false
}

// brokenUnder reports whether a key, a table that contains it, or a key in it could not be read.
func (r *Reading) brokenUnder(field string) bool {
	for broken := range r.broken {
		if strings.HasPrefix(broken, field+".") {
			return true
		}
	}
	return r.unread(field)
}
