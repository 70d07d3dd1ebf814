// Package condition reads the conditions over metrics of gates and judges them:
//
//	eval/reward >= 0.8
//	no improvement of eval/reward in 3 evaluations
//	no improvement of loss in 50 steps by 0.01
//
// The planner reads them to report mistakes, the learner-controller to judge them.
package condition

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/rollout-rl/rollout/libs/nearest"
)

// Condition is a parsed condition. Either Operator or Window is set.
type Condition struct {
	Metric   string
	Operator string  // of a comparison: >=, >, <=, <, ==, !=
	Limit    float64 // of a comparison
	Window   uint64  // of `no improvement`: how old the best value is, in values
	By       float64 // of `no improvement`: what a value must exceed the best by to count
}

// Error is a mistake in a condition.
type Error struct{ Message, Fix string }

func (e *Error) Error() string { return e.Message + "; " + e.Fix }

// forms is the fix of a condition that has neither form.
const forms = "write `METRIC >= NUMBER`, or `no improvement of METRIC in 3 evaluations`"

const number = `([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)`

var (
	comparison  = regexp.MustCompile(`^(\S+?)\s*(>=|<=|==|!=|=>|=<|>|<|=)\s*(\S+)$`)
	improvement = regexp.MustCompile(`^no improvement of (\S+) in (\S+) (evaluations?|steps?)(?: by ` + number + `)?$`)
	metricName  = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_.@-]*(/[a-zA-Z0-9_.@-]+)*$`)
)

// Parse reads a condition. The error is an *Error.
func Parse(text string) (Condition, error) {
	text = strings.Join(strings.Fields(text), " ")
	if m := improvement.FindStringSubmatch(text); m != nil {
		return parseImprovement(m[1], m[2], m[3], m[4])
	}
	if strings.HasPrefix(text, "no ") {
		return Condition{}, &Error{fmt.Sprintf("%q is not a condition", text), "write `no improvement of METRIC in 3 evaluations`, or `in 50 steps`"}
	}
	m := comparison.FindStringSubmatch(text)
	if m == nil {
		return Condition{}, &Error{fmt.Sprintf("%q is not a condition", text), forms}
	}
	c := Condition{Metric: m[1], Operator: m[2]}
	if !slices.Contains(operators, c.Operator) {
		fix := map[string]string{"=": "==", "=>": ">=", "=<": "<="}[c.Operator]
		return Condition{}, &Error{fmt.Sprintf("`%s` is not an operator", c.Operator), fmt.Sprintf("write `%s %s %s`", c.Metric, fix, m[3])}
	}
	var err error
	if c.Limit, err = parseNumber(m[3]); err != nil {
		return Condition{}, err
	}
	return c, checkName(c.Metric)
}

var operators = []string{">=", ">", "<=", "<", "==", "!="}

func parseImprovement(metric, count, unit, by string) (Condition, error) {
	c := Condition{Metric: metric}
	var err error
	if c.Window, err = strconv.ParseUint(count, 10, 32); err != nil || c.Window == 0 {
		return Condition{}, &Error{fmt.Sprintf("%q is not a positive integer", count), fmt.Sprintf("write `no improvement of %s in 3 %s`", metric, plural(unit))}
	}
	if by != "" {
		if c.By, err = parseNumber(by); err != nil {
			return Condition{}, err
		}
		if c.By < 0 {
			return Condition{}, &Error{fmt.Sprintf("an improvement by %s is negative", by), "write the smallest change that counts, such as `by 0.01`"}
		}
	}
	if err := checkName(metric); err != nil {
		return Condition{}, err
	}
	if want := c.unit(); plural(unit) != want {
		return Condition{}, &Error{
			fmt.Sprintf("`%s` has one value per %s, not per %s", metric, strings.TrimSuffix(want, "s"), strings.TrimSuffix(plural(unit), "s")),
			fmt.Sprintf("write `no improvement of %s in %s %s`", metric, count, want),
		}
	}
	return c, nil
}

func plural(unit string) string { return strings.TrimSuffix(unit, "s") + "s" }

func parseNumber(text string) (float64, error) {
	value, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsInf(value, 0) || math.IsNaN(value) {
		return 0, &Error{fmt.Sprintf("%q is not a finite number", text), "write a number such as `0.8`"}
	}
	return value, nil
}

// checkName refuses what cannot be the name of a metric.
func checkName(metric string) error {
	if metricName.MatchString(metric) {
		return nil
	}
	return &Error{fmt.Sprintf("%q is not the name of a metric", metric), "write a name such as `eval/reward` or `mismatch/kl`"}
}

func (c Condition) unit() string {
	if Evaluated(c.Metric) {
		return "evaluations"
	}
	return "steps"
}

// String is the condition in its normal form.
func (c Condition) String() string {
	if c.Operator != "" {
		return fmt.Sprintf("%s %s %s", c.Metric, c.Operator, strconv.FormatFloat(c.Limit, 'g', -1, 64))
	}
	text := fmt.Sprintf("no improvement of %s in %d %s", c.Metric, c.Window, c.unit())
	if c.By > 0 {
		text += " by " + strconv.FormatFloat(c.By, 'g', -1, 64)
	}
	return text
}

// Holds reports whether a comparison holds for a value. NaN satisfies none.
func (c Condition) Holds(value float64) bool {
	if math.IsNaN(value) {
		return false
	}
	switch c.Operator {
	case ">=":
		return value >= c.Limit
	case ">":
		return value > c.Limit
	case "<=":
		return value <= c.Limit
	case "<":
		return value < c.Limit
	case "==":
		return value == c.Limit
	case "!=":
		return value != c.Limit
	}
	return false
}

// Better reports whether a value of a metric improves on another one by more than by.
func Better(metric string, value, best, by float64) bool {
	if LowerIsBetter(metric) {
		return best-value > by
	}
	return value-best > by
}

// LowerIsBetter reports whether a metric improves when it falls.
func LowerIsBetter(metric string) bool {
	return strings.HasSuffix(metric, "loss") || strings.HasSuffix(metric, "kl")
}

// Evaluated reports whether evaluations measure a metric. Steps measure the others.
func Evaluated(metric string) bool { return strings.HasPrefix(metric, "eval/") }

// CheckMetric refuses a metric that no run has. Metrics of rewards and evaluations are known only
// during the run. The error is an *Error.
func CheckMetric(metric string) error {
	if err := checkName(metric); err != nil {
		return err
	}
	for _, prefix := range []string{"eval/", "reward/", "staleness/share_"} {
		if strings.HasPrefix(metric, prefix) {
			return nil
		}
	}
	if slices.Contains(Names, metric) {
		return nil
	}
	fix := "`rollout report RUN` shows the metrics of a run; those of a reward are `reward/NAME`, and those of evaluations `eval/NAME`"
	if near := nearest.To(metric, append([]string{"eval/reward", "reward/mean"}, Names...)); near != "" {
		fix = fmt.Sprintf("did you mean `%s`?", near)
	}
	return &Error{fmt.Sprintf("no run has a metric `%s`", metric), fix}
}

// Names are the metrics of steps, without those of rewards.
var Names = []string{
	"loss", "entropy", "mismatch/kl", "mismatch/max_ratio", "kl/reference", "kl/reference_point", "kl/coefficient", "kl/teacher", "teacher/covered",
	"rewards/chosen", "rewards/rejected", "rewards/accuracy", "rewards/margin", "desirable", "clip_fraction", "grad_norm", "learning_rate",
	"samples", "groups", "groups/equal_rewards", "tokens", "tokens/trained", "tokens/computed", "length/mean", "length/min", "length/max",
	"staleness/max", "tokens_per_second", "samples_per_second", "updates", "refused", "zero_advantage_groups",
	"importance/weight", "importance/bounded", "importance/masked", "importance/masked_samples",
	"value/mean", "value/loss", "value/error", "value/clip_fraction", "value/grad_norm",
	"dynamic_sampling/excluded", "dynamic_sampling/rounds",
	"time/pack", "time/forward", "time/backward", "time/optimizer", "time/step", "time/read", "time/publish", "time/lease", "time/train",
	"time/commit", "time/deliver",
}

// AsError returns the mistake in an error.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Message: err.Error()}
}
