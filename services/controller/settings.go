package controller

import (
	"github.com/rollout-rl/rollout/libs/algorithm"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// settings is what the plan says about the course of a run.
type settings struct {
	cfg           *configv1.RunConfig
	steps         uint64
	deterministic bool
	rows          uint64
	draws         uint32 // batches' worth of groups that a step may go through with dynamic sampling; 0: it has none
}

func settingsOf(spec *learnerv1.StartRunRequest) settings {
	cfg := spec.GetPlan().GetConfig()
	s := settings{cfg: cfg, steps: cfg.GetTrain().GetSteps(), deterministic: cfg.GetDeterministic(), draws: algorithm.DrawBatches(cfg)}
	for _, in := range spec.GetPlan().GetInputs() {
		if in.GetRole() == planv1.InputRole_INPUT_ROLE_TRAIN_DATA {
			s.rows = in.GetRows()
		}
	}
	return s
}

// offers is how weights get to workers that can't open the learner's folder.
func (s settings) offers(run string) offers {
	w := s.cfg.GetWeights()
	return offers{run: run, stream: w.GetWay() == "stream", store: w.GetWay() == "store", patch: w.GetPatch() != "off"}
}

// generates reports whether the weights can answer prompts, so that inference workers get them.
func (s settings) generates() bool { return algorithm.Generates(s.cfg) }

// teachesHeldOut reports whether evaluations are the learner's: the loss of held-out rows.
func (s settings) teachesHeldOut() bool { return algorithm.TeachesHeldOut(s.cfg) }

func (s settings) last(step uint64) bool { return step >= s.steps }

// evaluates: at every n-th step, and after the last.
func (s settings) evaluates(step uint64) bool {
	every := s.cfg.GetEval().GetEverySteps()
	return every > 0 && (step%every == 0 || s.last(step))
}

// snapshots: at every n-th step, and after the last.
func (s settings) snapshots(step uint64) bool {
	every := s.cfg.GetSnapshot().GetEverySteps()
	return s.last(step) || every > 0 && step%every == 0
}

// delivers: at every n-th step, where an evaluation needs the weights at a worker, and after the last.
func (s settings) delivers(step uint64) bool {
	every := s.cfg.GetTrain().GetDeliverEverySteps()
	return s.last(step) || s.evaluates(step) && !s.teachesHeldOut() || every > 0 && step%every == 0
}
