package ledger

import (
	"context"

	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// StateMessage is the ledger in numbers.
func StateMessage(ctx context.Context, r Reader) (*bufferv1.LedgerState, error) {
	l := r.Ledger()
	state := &bufferv1.LedgerState{
		Step: l.Step, Open: l.Groups[Open], Ready: l.Groups[Ready], Leased: l.Groups[Leased], Consumed: l.Groups[Consumed],
		Excluded: l.Groups[Excluded], Samples: l.Samples, Duplicates: l.Duplicates, Refused: l.Refused, InfraFailed: l.InfraFailed,
		WeightsVersion: l.WeightsVersion, WeightsDigest: l.WeightsDigest, Skipped: l.Skipped, Failures: l.Failures, Lineage: l.Lineage,
	}
	if l.Groups[Dissolved] == 0 {
		return state, nil
	}
	groups, err := r.ListGroups(ctx, GroupQuery{States: []State{Dissolved}})
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		state.Dissolved = append(state.Dissolved, l.GroupMessage(g))
	}
	return state, nil
}

// GroupMessage is a group as callers see it.
func (l *Ledger) GroupMessage(g *Group) *bufferv1.GroupRecord {
	return &bufferv1.GroupRecord{
		Key: l.groupKey(g), Position: g.Position, State: g.State, Reason: g.Reason, Step: g.Step, Samples: g.Samples, Failures: g.Failures,
		Pending: g.Pending, MinVersion: g.MinVersion, Arrival: g.Arrival,
		TokenRewards: g.TokenRewards,
	}
}

func (l *Ledger) groupKey(g *Group) *bufferv1.GroupKey {
	rows := l.Config.GetRows()
	return &bufferv1.GroupKey{Epoch: uint32(g.Position / rows), Index: g.Position % rows, Attempt: g.Attempt}
}

// SampleMessage is a sample without the path of its segment.
func (l *Ledger) SampleMessage(a *Sample) *bufferv1.SampleRef {
	rows := l.Config.GetRows()
	var times *trajectoryv1.EpisodeTimes
	if len(a.Times) > 0 {
		times = &trajectoryv1.EpisodeTimes{}
		if proto.Unmarshal(a.Times, times) != nil { // for people: a step does not fail because of them
			times = nil
		}
	}
	return &bufferv1.SampleRef{
		Key: &trajectoryv1.TrajectoryKey{RunId: l.Run, Epoch: uint32(a.Position / rows), Index: a.Position % rows,
			Attempt: a.Attempt, Sample: a.Sample, Part: a.Part},
		Offset: a.Offset, Length: a.Length, Crc32C: a.CRC, Reward: a.Reward, Outcome: a.Outcome, PayloadRef: a.Ref, Times: times,
	}
}

// Message is a step as callers see it.
func (s *Step) Message() *bufferv1.StepRecord {
	return &bufferv1.StepRecord{
		Step: s.Step, BatchId: s.Batch, WeightsDigest: s.WeightsDigest, Groups: s.Groups, Samples: s.Samples, Chain: s.Chain,
		Excluded: s.Excluded, ZeroAdvantage: s.Zero, EndPosition: s.End, Lineage: s.Lineage,
	}
}
