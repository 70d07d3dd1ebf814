package live

import (
	"regexp"
	"strconv"
	"strings"
	"time"

	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// repeatEvery is the minimum time between two prints of a repeated warning.
const repeatEvery = 10 * time.Second

// Warning is a warning or error with its number of repetitions. Messages that differ only in
// numbers and quoted text are the same.
type Warning struct {
	*eventv1.Event        // the newest
	Count          uint64 // number of events

	printed time.Time // last time
	pending uint64    // events since then
}

// variable matches the parts of a message that are ignored: numbers and quoted text.
var variable = regexp.MustCompile(`\B'[^']*'|"[^"]*"|[0-9]+`)

// key is equal for warnings that are the same.
func key(e *eventv1.Event) string {
	message, _, _ := strings.Cut(e.GetMessage(), "\n")
	return e.GetService() + "\x00" + e.GetKind() + "\x00" + e.GetLevel().String() + "\x00" + variable.ReplaceAllString(message, "#")
}

// times returns the number of warnings that an event stands for: a source may join them itself.
func times(e *eventv1.Event) uint64 {
	if n, err := strconv.ParseUint(e.GetAttributes()["repeated"], 10, 64); err == nil && n > 0 {
		return n
	}
	return 1
}

// Joins reports whether repetitions of an event are joined: of warnings and errors, but not of
// evaluations, whose metrics differ.
func Joins(e *eventv1.Event) bool {
	return e.GetLevel() >= eventv1.Level_LEVEL_WARN && e.GetKind() != evalFinished
}

// Repeats joins equal warnings. The zero value is ready to use.
type Repeats struct {
	byKey map[string]*Warning
	order []*Warning // by first occurrence
}

// Add counts a warning.
func (r *Repeats) Add(e *eventv1.Event) *Warning {
	w := r.byKey[key(e)]
	if w == nil {
		if r.byKey == nil {
			r.byKey = map[string]*Warning{}
		}
		w = &Warning{}
		r.byKey[key(e)] = w
		r.order = append(r.order, w)
	}
	w.Event = e
	w.Count += times(e)
	w.pending += times(e)
	return w
}

// Due returns the warnings to print at the time of an event, and how many events each stands for.
// They count as printed.
func (r *Repeats) Due(now time.Time) (due []*Warning, counts []uint64) {
	for _, w := range r.order {
		if w.pending > 0 && (w.printed.IsZero() || now.Sub(w.printed) >= repeatEvery) {
			due, counts = append(due, w), append(counts, w.pending)
			w.printed, w.pending = now, 0
		}
	}
	return due, counts
}

// Rest returns the warnings that are not printed yet, after the last event.
func (r *Repeats) Rest() (rest []*Warning, counts []uint64) {
	for _, w := range r.order {
		if w.pending > 0 {
			rest, counts = append(rest, w), append(counts, w.pending)
			w.pending = 0
		}
	}
	return rest, counts
}
