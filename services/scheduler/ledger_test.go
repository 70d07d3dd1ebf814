package scheduler_test

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

func (l *ledger) OpenLedger(_ context.Context, in *bufferv1.OpenLedgerRequest, _ ...grpc.CallOption) (*bufferv1.OpenLedgerResponse, error) {
	var state *bufferv1.LedgerState
	if err := l.m.admit("OpenLedger", in.GetIncarnation()); err != nil {
		return nil, err
	}
	l.m.do(func() {
		l.m.incarnation = in.GetIncarnation()
		if l.m.config != nil && !proto.Equal(l.m.config, in.GetConfig()) {
			l.m.t.Errorf("the ledger was opened with %v, then with %v", l.m.config, in.GetConfig())
		}
		if l.m.config == nil {
			l.m.config, l.m.step = in.GetConfig(), in.GetConfig().GetFirstStep()
		}
		l.m.open = true
	})
	l.m.read(func() { state = l.m.state() })
	return &bufferv1.OpenLedgerResponse{State: state}, nil
}

// admit refuses what is asked in the name of an older incarnation, as buffer and controller do.
func (m *mesh) admit(what string, incarnation uint32) (err error) {
	m.read(func() {
		if incarnation < m.incarnation {
			m.refused = append(m.refused, what)
			err = status.Error(codes.FailedPrecondition, "a newer incarnation is known")
		}
	})
	return err
}

func (l *ledger) CloseLedger(_ context.Context, in *bufferv1.CloseLedgerRequest, _ ...grpc.CallOption) (*bufferv1.CloseLedgerResponse, error) {
	if err := l.m.admit("CloseLedger", in.GetIncarnation()); err != nil {
		return nil, err
	}
	l.m.do(func() { l.m.open = false })
	return &bufferv1.CloseLedgerResponse{}, nil
}

func (m *mesh) state() *bufferv1.LedgerState {
	s := &bufferv1.LedgerState{Step: m.step, StalledReason: m.stalled, StalledMessage: m.stalled}
	for _, p := range m.positions() {
		switch g := m.groups[p]; g.GetState() {
		case bufferv1.GroupState_GROUP_STATE_OPEN:
			s.Open++
		case bufferv1.GroupState_GROUP_STATE_READY:
			s.Ready++
		case bufferv1.GroupState_GROUP_STATE_CONSUMED:
			s.Consumed++
		case bufferv1.GroupState_GROUP_STATE_EXCLUDED:
			s.Excluded++
		case bufferv1.GroupState_GROUP_STATE_DISSOLVED:
			s.Dissolved = append(s.Dissolved, proto.CloneOf(g))
		}
	}
	return s
}

func (m *mesh) positions() (out []uint64) {
	for p := range m.groups {
		out = append(out, p)
	}
	slices.Sort(out)
	return out
}

func (l *ledger) WatchLedger(ctx context.Context, _ *bufferv1.WatchLedgerRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[bufferv1.WatchLedgerResponse], error) {
	return &follow[bufferv1.WatchLedgerResponse]{ctx: ctx, m: l.m, next: func() (*bufferv1.WatchLedgerResponse, bool) {
		return &bufferv1.WatchLedgerResponse{State: l.m.state()}, false
	}}, nil
}

func (l *ledger) ListSteps(_ context.Context, in *bufferv1.ListStepsRequest, _ ...grpc.CallOption) (*bufferv1.ListStepsResponse, error) {
	out := &bufferv1.ListStepsResponse{}
	l.m.read(func() {
		for step := in.GetFromStep(); step <= l.m.step; step++ {
			out.Steps = append(out.Steps, &bufferv1.StepRecord{Step: step, WeightsDigest: fmt.Sprint("digest-", step)})
		}
	})
	return out, nil
}

func (l *ledger) ListGroups(_ context.Context, in *bufferv1.ListGroupsRequest, _ ...grpc.CallOption) (*bufferv1.ListGroupsResponse, error) {
	out := &bufferv1.ListGroupsResponse{}
	l.m.read(func() {
		for _, p := range l.m.positions() {
			if p >= in.GetFromPosition() && len(out.GetGroups()) < int(in.GetLimit()) {
				out.Groups = append(out.Groups, proto.CloneOf(l.m.groups[p]))
			}
		}
	})
	return out, nil
}

func (l *ledger) ExcludeGroups(_ context.Context, in *bufferv1.ExcludeGroupsRequest, _ ...grpc.CallOption) (*bufferv1.ExcludeGroupsResponse, error) {
	l.m.do(func() {
		for _, k := range in.GetGroups() {
			g := l.m.groups[uint64(k.GetEpoch())*rows+k.GetIndex()]
			g.State, g.Reason = bufferv1.GroupState_GROUP_STATE_EXCLUDED, in.GetReason()
		}
	})
	return &bufferv1.ExcludeGroupsResponse{}, nil
}

func (l *ledger) ReissueGroups(_ context.Context, in *bufferv1.ReissueGroupsRequest, _ ...grpc.CallOption) (*bufferv1.ReissueGroupsResponse, error) {
	var err error
	l.m.do(func() {
		for _, k := range in.GetGroups() {
			g := l.m.groups[uint64(k.GetEpoch())*rows+k.GetIndex()]
			if g.GetKey().GetAttempt() >= k.GetAttempt() {
				continue
			}
			if g.GetState() != bufferv1.GroupState_GROUP_STATE_DISSOLVED {
				err = status.Error(codes.FailedPrecondition, "not dissolved")
				return
			}
			g.Key, g.State = k, bufferv1.GroupState_GROUP_STATE_OPEN
		}
	})
	return &bufferv1.ReissueGroupsResponse{}, err
}
