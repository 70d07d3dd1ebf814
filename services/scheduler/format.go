package scheduler

import (
	"context"
	"fmt"
	"strings"

	planformat "github.com/rollout-rl/rollout/libs/plan"
)

// formatPage is the number of runs that checkFormats reads at a time.
const formatPage = 1000

// checkFormats returns ErrStateFormat if the store has runs with plans of another format. Such a plan would decode without an error
// and lose its settings, so nothing may read it.
func checkFormats(ctx context.Context, store Store) error {
	var refused []string
	for after := ""; ; {
		runs, err := store.List(ctx, Filter{After: after, Limit: formatPage})
		if err != nil {
			return err
		}
		for _, run := range runs {
			if format := run.GetPlan().GetFormat(); format != planformat.Format {
				refused = append(refused, fmt.Sprintf("%s (format %d)", run.GetRunId(), format))
			}
			after = run.GetRunId()
		}
		if len(runs) < formatPage {
			break
		}
	}
	if len(refused) == 0 {
		return nil
	}
	shown := strings.Join(refused[:min(len(refused), 3)], ", ")
	if more := len(refused) - 3; more > 0 {
		shown += fmt.Sprintf(" and %d more", more)
	}
	return ErrStateFormat.WithMessage("this version reads plans of format %d, and the state holds runs of other formats: %s", planformat.Format, shown)
}
