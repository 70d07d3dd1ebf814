package doctor

import (
	"context"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/checkpoint"
)

// probed is a host whose probe has a result.
type probed struct {
	checkpoint.Checkpointer
	checkpoint.Report
}

func (p probed) Probe(context.Context) checkpoint.Report { return p.Report }

func TestProcessesAreReportedAsTheirProbeSays(t *testing.T) {
	t.Parallel()
	for name, one := range map[string]struct {
		probe  checkpoint.Report
		status Status
		detail string
		fix    string
	}{
		"works": {checkpoint.Report{OK: true, Program: "/criu", Version: "4.2.1", Seconds: 0.19}, OK, "CRIU 4.2.1 saved and restored a process in 190 ms", ""},
		"missing": {checkpoint.Report{Error: checkpoint.Fail(checkpoint.ReasonUnavailable, "install it", "criu is not installed")},
			Skipped, "criu is not installed; only snapshots of kind process need it: install it", ""},
		"forbidden": {checkpoint.Report{Program: "/criu", Version: "4.2.1", Error: checkpoint.Fail(checkpoint.ReasonUnavailable, "run it as root", "not permitted")},
			Warning, "snapshots of kind process can't be taken here: not permitted", "run it as root"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := &report{}
			process(t.Context(), Input{Processes: probed{Report: one.probe}}, r)
			if got := r.list[0]; got.Status != one.status || !strings.HasPrefix(got.Detail, one.detail) || got.Fix != one.fix {
				t.Errorf("%+v", got)
			}
		})
	}
}
