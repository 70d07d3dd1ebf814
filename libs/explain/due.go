package explain

import (
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
)

// transient is how long a wait may last before its fix no longer says that it ends by itself, by
// the reason of the wait. What loads or trains a large model may last longer than the others.
func transient(reason string) time.Duration {
	switch reason {
	case "WORKER_LOADING", "TRAIN", "TRAINING", "GENERATE", "EVALUATING":
		return 10 * time.Minute
	}
	return 45 * time.Second
}

// promises are the clauses of fixes by which nothing has to be done, with their replacements where
// the wait has lasted long.
var promises = strings.NewReplacer(
	"it ends by itself; if it does not, ", "",
	"it ends by itself; ", "",
	"it ends by itself", "",
	"the run continues by itself", "the run then continues",
	"runs continue by themselves", "runs then continue",
	"active runs continue by themselves", "active runs then continue",
)

// due drops from the fixes of a chain that a wait ends by itself, if it or what it explains has
// lasted long, and says what to do in place of it.
func (e *explainer) due() {
	var longest time.Duration
	known := false
	for i, w := range e.chain {
		if w.GetSince() != nil {
			longest, known = max(longest, e.took(w)), true
		}
		if known && longest < transient(w.GetReason()) {
			continue
		}
		fix := promises.Replace(w.GetFix())
		if w.GetFix() != "" && fix == "" {
			fix = "it lasts longer than usual: see what " + w.GetOwner() + " reports with `rollout logs tail " + e.run.GetRunId() + "`, and check the services with `rollout doctor`"
		}
		if fix != w.GetFix() {
			e.chain[i] = proto.CloneOf(w)
			e.chain[i].Fix = fix
		}
	}
}
