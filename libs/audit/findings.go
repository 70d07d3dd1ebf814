package audit

import (
	"fmt"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// maxBreaks is how many breaks a section lists. Further ones are counted.
const maxBreaks = 10_000

// findings collects the breaks of one section of the report.
type findings struct {
	index  *index
	report *Report
	breaks []Break
}

func newReport(x *index) *Report {
	state := x.Ledger.GetState()
	return &Report{
		RunID: x.Run.GetRunId(), Name: x.Run.GetName(), State: x.state(), Chain: x.Ledger.GetChain(),
		Excluded: map[string]int{}, Breaks: []Break{}, Epochs: []Epoch{}, Lineages: []Lineage{}, Skipped: []Skipped{},
		Counts: map[string]int64{
			"duplicates_dropped": int64(state.GetDuplicates()), "refused": int64(state.GetRefused()), "infra_failed": int64(state.GetInfraFailed()),
		},
	}
}

// add completes a break and adds it.
func (f *findings) add(b Break, kind, format string, args ...any) {
	if len(f.breaks) == maxBreaks {
		f.report.Omitted++
		return
	}
	b.Kind, b.Run, b.Message = kind, f.report.RunID, fmt.Sprintf(format, args...)
	f.breaks = append(f.breaks, b)
}

func (f *findings) ofGroup(g *bufferv1.GroupRecord) Break {
	attempt := g.GetKey().GetAttempt()
	return Break{Group: f.index.name(g.GetPosition()), Step: g.GetStep(), Attempt: &attempt}
}

func (f *findings) ofSample(p *Prompt, s *bufferv1.SampleRecord) Break {
	k, offset := s.GetRef().GetKey(), s.GetRef().GetOffset()
	attempt, sample := k.GetAttempt(), k.GetSample()
	b := Break{Group: f.index.name(p.Position), Attempt: &attempt, Sample: &sample, Segment: s.GetSegment(), Step: p.group().GetStep()}
	if s.GetSegment() > 0 {
		b.Offset = &offset
	}
	return b
}
