// Package fencetest is for tests of services that send or receive fences.
package fencetest

import (
	"sync"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/proto/gen/names"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
)

// Scheduler is the fence of a scheduler.
func Scheduler(incarnation uint32, epoch uint64) *fencev1.Fence {
	return &fencev1.Fence{Incarnation: incarnation, Role: names.SchedulerService, LeaderEpoch: epoch}
}

// Controller is the fence of a learner-controller.
func Controller(incarnation uint32, epoch uint64) *fencev1.Fence {
	return &fencev1.Fence{Incarnation: incarnation, Role: names.ControllerService, LeaderEpoch: epoch}
}

// Memory is what a fake owner knows of leaders. The zero Memory is ready to use.
type Memory struct {
	mu     sync.Mutex
	epochs map[string]uint64
	runs   map[string]uint32
}

// Admit is fence.Admit.
func (m *Memory) Admit(run string, by *fencev1.Fence) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.epochs == nil {
		m.epochs, m.runs = map[string]uint64{}, map[string]uint32{}
	}
	if m.epochs[by.GetRole()] > by.GetLeaderEpoch() || m.runs[run] > by.GetIncarnation() {
		return fence.ErrFenced
	}
	if by != nil {
		m.epochs[by.GetRole()] = by.GetLeaderEpoch()
	}
	if run != "" {
		m.runs[run] = by.GetIncarnation()
	}
	return nil
}
