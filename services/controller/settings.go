package controller

import (
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// settings are the facts about a run that do not change while it is driven.
type settings struct {
	runID         string
	incarnation   uint32
	fence         *fencev1.Fence // what the calls to other services carry
	directory     string
	fromSnapshot  string // empty for a run that starts from the model
	planID        string
	cfg           *configv1.RunConfig
	steps         uint64
	deterministic bool
	rows          uint64
	oldLineage    bufferv1.OldLineage // what becomes of samples of lost weights; of a deterministic run UNSPECIFIED
	maxBatches    uint32              // with dynamic sampling: how many batches' worth of groups a step may sample; else 0
}

func newSettings(spec *learnerv1.StartRunRequest, epoch uint64) settings {
	cfg := spec.GetPlan().GetConfig()
	s := settings{
		runID: spec.GetRunId(), incarnation: spec.GetFence().GetIncarnation(), directory: spec.GetRunDirectory(),
		fromSnapshot: spec.GetFromSnapshot(), planID: spec.GetPlan().GetPlanId(), cfg: cfg,
		fence: &fencev1.Fence{Incarnation: spec.GetFence().GetIncarnation(), Role: names.ControllerService, LeaderEpoch: epoch},
		steps: cfg.GetTrain().GetSteps(), deterministic: cfg.GetDeterministic(), maxBatches: algorithm.DrawBatches(cfg),
	}
	switch {
	case s.deterministic:
	case cfg.GetRecovery().GetOldLineage() == "reissue":
		s.oldLineage = bufferv1.OldLineage_OLD_LINEAGE_REISSUE
	default:
		s.oldLineage = bufferv1.OldLineage_OLD_LINEAGE_KEEP
	}
	for _, in := range spec.GetPlan().GetInputs() {
		if in.GetRole() == planv1.InputRole_INPUT_ROLE_TRAIN_DATA {
			s.rows = in.GetRows()
		}
	}
	return s
}

// generates reports whether the weights can generate text, so that inference workers load them.
func (s settings) generates() bool { return algorithm.Generates(s.cfg) }

// evaluatesLoss reports whether the learner evaluates, by the loss of held-out rows.
func (s settings) evaluatesLoss() bool { return algorithm.TeachesHeldOut(s.cfg) }

func (s settings) last(step uint64) bool { return step >= s.steps }

// evaluates reports whether an evaluation follows a step: every n-th step, and the last.
func (s settings) evaluates(step uint64) bool {
	every := s.cfg.GetEval().GetEverySteps()
	return every > 0 && (step%every == 0 || s.last(step))
}

// snapshots reports whether a snapshot follows a step: every n-th step, and the last.
func (s settings) snapshots(step uint64) bool {
	every := s.cfg.GetSnapshot().GetEverySteps()
	return s.last(step) || every > 0 && step%every == 0
}

// delivers reports whether the weights of a step are delivered: every n-th step, the last, and each
// step whose evaluation needs them at a worker.
func (s settings) delivers(step uint64) bool {
	every := s.cfg.GetTrain().GetDeliverEverySteps()
	return s.last(step) || s.evaluates(step) && !s.evaluatesLoss() || every > 0 && step%every == 0
}
