package live

import (
	"regexp"
	"strconv"
	"strings"
	"time"

	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// repeatEvery is how often a warning that comes again and again is printed again, with a count.
const repeatEvery = 10 * time.Second

// Warning is a warning or error, with how often it was given in all; texts that differ in numbers and quoted parts alone are one.
type Warning struct {
	*eventv1.Event        // the newest
	Count          uint64 // how often

	printed time.Time // when it was printed last
	left    uint64    // how many came since
}

// vary are the parts of a message that differ from case to case: numbers, and what stands in quotes.
var vary = regexp.MustCompile(`\B'[^']*'|"[^"]*"|[0-9]+`)

// alike is the same for warnings that say the same.
func alike(e *eventv1.Event) string {
	message, _, _ := strings.Cut(e.GetMessage(), "\n")
	return e.GetService() + "\x00" + e.GetKind() + "\x00" + e.GetLevel().String() + "\x00" + vary.ReplaceAllString(message, "#")
}

// times is how many warnings an event stands for: a source that gives many alike counts them itself.
func times(e *eventv1.Event) uint64 {
	if n, err := strconv.ParseUint(e.GetAttributes()["repeated"], 10, 64); err == nil && n > 0 {
		return n
	}
	return 1
}

// Repeats joins warnings that say the same. The zero value is ready.
type Repeats struct {
	seen  map[string]*Warning
	order []*Warning // as they were seen first
}

// Add counts a warning.
func (r *Repeats) Add(e *eventv1.Event) *Warning {
	w := r.seen[alike(e)]
	if w == nil {
		if r.seen == nil {
			r.seen = map[string]*Warning{}
		}
		w = &Warning{}
		r.seen[alike(e)] = w
		r.order = append(r.order, w)
	}
	w.Event = e
	w.Count += times(e)
	w.left += times(e)
	return w
}

// Due returns the warnings that should be printed at a time of the events: those not printed in the last while. Each comes with
// how many it stands for; they count as printed.
func (r *Repeats) Due(now time.Time) (due []*Warning, counts []uint64) {
	for _, w := range r.order {
		if w.left > 0 && (w.printed.IsZero() || now.Sub(w.printed) >= repeatEvery) {
			due, counts = append(due, w), append(counts, w.left)
			w.printed, w.left = now, 0
		}
	}
	return due, counts
}

// Rest returns what was counted and not printed, when no more will come.
func (r *Repeats) Rest() (rest []*Warning, counts []uint64) {
	for _, w := range r.order {
		if w.left > 0 {
			rest, counts = append(rest, w), append(counts, w.left)
			w.left = 0
		}
	}
	return rest, counts
}
