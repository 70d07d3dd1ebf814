package controller

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/completion"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// reporter emits the events of one run. Any goroutine may call fenced, leftOut, caughtUp,
// evaluated, and skipped; the others belong to the goroutine of the drive.
type reporter struct {
	settings
	bus     Events
	now     func() time.Time
	log     *slog.Logger
	samples int // how many samples of an evaluation go into its event

	flat flatSteps
}

// emit sets the fields that all events of a run share, and the event's id if it has none.
func (r *reporter) emit(e *eventv1.Event) {
	now := r.now().UTC()
	e.EventId = cmp.Or(e.GetEventId(), id.New(now))
	e.RunId, e.Time, e.Service = r.runID, timestamppb.New(now), names.ControllerService
	if e.GetLevel() == 0 {
		e.Level = eventv1.Level_LEVEL_INFO
	}
	r.bus.Emit(e)
}

// flush waits until the events are on the bus, so that the scheduler finds them there when the end
// of the run is reported. It gives up after a while: a run can end without the bus.
func (r *reporter) flush(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := r.bus.Flush(ctx); err != nil {
		r.log.WarnContext(ctx, "the last events of the run are not on the bus: they are stored after its end, or lost", "error", err)
	}
}

func (r *reporter) phase(p *learnerv1.Progress) {
	name := phaseName(p.GetPhase())
	level := eventv1.Level_LEVEL_DEBUG
	if p.GetPhase() == failed {
		level = eventv1.Level_LEVEL_ERROR
	}
	r.emit(&eventv1.Event{
		Kind: "phase", Level: level, Step: p.GetStep(), Message: "phase " + name,
		Attributes: map[string]string{"phase": name},
	})
}

// step emits a committed step, and returns its metrics.
func (r *reporter) step(batch *bufferv1.Batch, result *learnerv1.TrainResult, times map[string]float64) map[string]float64 {
	all := stepMetrics(result, times, len(batch.GetSamples()))
	r.addDynamicSampling(batch, all)
	message := fmt.Sprintf("step %d of %d: %d groups, %d samples, loss %.4g", batch.GetStep(), r.steps,
		batch.GetGroups(), len(batch.GetSamples()), all["loss"])
	if excluded := batch.GetExcluded(); excluded > 0 {
		message += fmt.Sprintf("; %d groups were excluded", excluded)
	}
	r.emit(&eventv1.Event{
		Kind: "step.committed", Step: batch.GetStep(), Metrics: all, Message: message,
		Attributes: map[string]string{
			"batch": batch.GetBatchId(), "weights_digest": result.GetWeightsDigest(),
			"excluded": strconv.FormatUint(uint64(batch.GetExcluded()), 10),
		},
	})
	if r.flat.add(all) {
		r.warnFlat(batch.GetStep(), all)
	}
	if r.maxBatches > 0 && batch.GetGroups() < r.cfg.GetTrain().GetGroupsPerStep() {
		r.warnShort(batch)
	}
	return all
}

// completions emits the recorded completions of a step. Call it before step, so that a receiver
// of the event of the step has them.
func (r *reporter) completions(batch *bufferv1.Batch, result *learnerv1.TrainResult) {
	if len(result.GetCompletions()) == 0 {
		return
	}
	recorded := completion.Of(result.GetCompletions(), batch.GetSamples())
	text, err := json.Marshal(recorded)
	if err != nil { // a number that JSON can't represent; the learner refuses such a step
		r.log.Warn("the completions of a step were not emitted", "step", result.GetStep(), "error", err)
		return
	}
	r.emit(&eventv1.Event{
		Kind: "completions", Level: eventv1.Level_LEVEL_DEBUG, Step: result.GetStep(), Message: fmt.Sprintf("recorded %d completions", len(recorded)),
		Attributes: map[string]string{"completions": string(text)},
	})
}

func (r *reporter) delivered(w *weightsv1.WeightsManifest, workers int, seconds float64) {
	r.emit(&eventv1.Event{
		Kind: "weights.delivered", Level: eventv1.Level_LEVEL_DEBUG, Step: w.GetVersion(),
		Message:    fmt.Sprintf("%d workers loaded weights version %d", workers, w.GetVersion()),
		Attributes: map[string]string{"version": strconv.FormatUint(w.GetVersion(), 10), "digest": w.GetDigest(), "workers": strconv.Itoa(workers)},
		Metrics:    map[string]float64{"time/deliver": seconds},
	})
}

// forked emits that a retrained version has other bits than the lost one, and begins a lineage.
func (r *reporter) forked(version uint64, digest string, got *bufferv1.RecordWeightsResponse) {
	message := fmt.Sprintf("the weights of step %d were lost, and training on the recorded batches again gave other bits: version %d begins lineage %d",
		version, version, got.GetLineage())
	if reissued := got.GetReissued(); reissued > 0 {
		message += fmt.Sprintf("; %d groups with samples of lost weights are sampled again", reissued)
	}
	r.emit(&eventv1.Event{
		Kind: "lineage.forked", Level: eventv1.Level_LEVEL_WARN, Step: version, Message: message,
		Attributes: map[string]string{
			"lineage": strconv.FormatUint(uint64(got.GetLineage()), 10), "version": strconv.FormatUint(version, 10),
			"lost": got.GetLostDigest(), "digest": digest,
		},
	})
}

func (r *reporter) fenced(worker string, err error) {
	r.emit(&eventv1.Event{
		Kind: "worker.fenced", Level: eventv1.Level_LEVEL_ERROR, Attributes: map[string]string{"worker": worker},
		Message: fmt.Sprintf("%s could not verify its weights and gets no more work: %s", worker, rpcerr.Text(err)),
	})
	r.log.Error("a worker could not verify its weights", "worker", worker, "error", err)
}

func (r *reporter) leftOut(worker string, version uint64, err error) {
	r.emit(&eventv1.Event{
		Kind: "weights.left_out", Level: eventv1.Level_LEVEL_WARN, Step: version,
		Attributes: map[string]string{"worker": worker, "version": strconv.FormatUint(version, 10)},
		Message:    fmt.Sprintf("%s could not load weights version %d; it is left out and tries again: %s", worker, version, rpcerr.Text(err)),
	})
}

func (r *reporter) caughtUp(worker string, m *weightsv1.WeightsManifest) {
	r.emit(&eventv1.Event{
		Kind: "weights.caught_up", Step: m.GetVersion(),
		Attributes: map[string]string{"worker": worker, "version": strconv.FormatUint(m.GetVersion(), 10)},
		Message:    fmt.Sprintf("%s, which was left out, loaded weights version %d", worker, m.GetVersion()),
	})
}

// evalSample is one held-out sample in the event of an evaluation. A sample that was not scored has
// a reason and no reward.
type evalSample struct {
	Row        uint64   `json:"row"`
	Prompt     string   `json:"prompt"`
	Completion string   `json:"completion"`
	Reward     *float64 `json:"reward"`
	Failed     string   `json:"failed,omitempty"`
}

// evaluated emits the result of an evaluation by the rewards of completions, and returns its
// metrics.
func (r *reporter) evaluated(step uint64, m *weightsv1.WeightsManifest, all []answers) map[string]float64 {
	means, parts := map[string]float64{}, []string{}
	attributes := map[string]string{"weights_version": strconv.FormatUint(m.GetVersion(), 10), "weights_digest": m.GetDigest()}
	measured := []suiteResult{}
	for _, each := range all {
		if each.suite == heldOut {
			means = score(each.samples)
			if r.cfg.GetMultistep() != nil {
				means = returns(each.samples)
			}
			attributes["samples"] = r.shown(each.samples)
			parts = append(parts, heldOutText(means))
			continue
		}
		result := measure(r.cfg, each)
		maps.Copy(means, result.means())
		measured, parts = append(measured, result), append(parts, result.text())
	}
	if len(measured) > 0 {
		if text, err := json.Marshal(measured); err == nil { // a score may be infinite
			attributes["suites"] = string(text)
		}
	}
	r.evaluation(step, means, fmt.Sprintf("evaluation at step %d: %s", step, strings.Join(parts, "; ")), "failed", attributes)
	return means
}

func heldOutText(means map[string]float64) string {
	if text, ok := returnText(means); ok {
		return text
	}
	reward, ok := means["eval/reward"]
	if !ok {
		return "no held-out prompt was scored"
	}
	return fmt.Sprintf("reward %.3f over %.0f held-out prompts", reward, means["eval/samples"]-means["eval/failed"])
}

// shown returns the first samples as JSON.
func (r *reporter) shown(samples []*inferencev1.EvalSample) string {
	shown := []evalSample{}
	for _, s := range samples[:min(len(samples), r.samples)] {
		a := evalSample{Row: s.GetRow(), Prompt: s.GetPrompt(), Completion: s.GetCompletion()}
		if scored(s) {
			reward := s.GetReward()
			a.Reward = &reward
		} else {
			a.Failed = cmp.Or(s.GetReason(), "FAILED")
		}
		shown = append(shown, a)
	}
	text, err := json.Marshal(shown)
	if err != nil {
		return "[]" // a reward that JSON can't represent
	}
	return string(text)
}

// loss emits the result of an evaluation by the loss of held-out rows, and returns its metrics.
func (r *reporter) loss(step uint64, got *learnerv1.EvaluateLossResponse) map[string]float64 {
	means := map[string]float64{"eval/samples": float64(got.GetRows()), "eval/failed": float64(got.GetRefused())}
	for name, value := range got.GetMetrics() {
		means["eval/"+name] = value
	}
	message := fmt.Sprintf("evaluation at step %d: loss %.4g over %d held-out rows", step, got.GetMetrics()["loss"], got.GetRows()-got.GetRefused())
	r.evaluation(step, means, message, "could not be used", map[string]string{"weights_version": strconv.FormatUint(step, 10)})
	return means
}

// evaluation emits the result of an evaluation; failed is what happened to the rows that do not
// count.
func (r *reporter) evaluation(step uint64, means map[string]float64, message, failed string, attributes map[string]string) {
	level := eventv1.Level_LEVEL_INFO
	failures := 0.0
	for name, value := range means {
		if name == "eval/failed" || strings.HasPrefix(name, "eval/") && strings.HasSuffix(name, "/failed") {
			failures += value
		}
	}
	if failures > 0 {
		level = eventv1.Level_LEVEL_WARN
		message += fmt.Sprintf("; %.0f %s and are not counted", failures, failed)
	}
	r.emit(&eventv1.Event{Kind: "eval.finished", Step: step, Level: level, Metrics: means, Message: message, Attributes: attributes})
}

// skipped emits that an evaluation was not made, because no process has its weights any more.
func (r *reporter) skipped(step uint64, err error) {
	r.emit(&eventv1.Event{
		Kind: "eval.skipped", Step: step, Level: eventv1.Level_LEVEL_WARN,
		Message: fmt.Sprintf("the evaluation of step %d is skipped: %s", step, rpcerr.Text(err)),
	})
}

// flatSteps counts consecutive steps in which the rewards of every group were equal, so that there
// is no gradient.
type flatSteps struct {
	steps  int
	warnAt int // number of steps of the next warning
}

// firstFlatWarning is the number of steps of the first warning; the next is at ten times as many.
const firstFlatWarning = 3

// add counts a step by its metrics and reports whether a warning is due.
func (f *flatSteps) add(metrics map[string]float64) bool {
	if share, grouped := metrics["zero_advantage_groups"]; !grouped || share < 1 {
		f.steps = 0
		return false
	}
	if f.steps++; f.steps == 1 {
		f.warnAt = firstFlatWarning
	}
	if f.steps != f.warnAt {
		return false
	}
	f.warnAt *= 10
	return true
}

func (r *reporter) warnFlat(step uint64, metrics map[string]float64) {
	rewards := "all rewards of a group were equal"
	if metrics["reward/std"] == 0 {
		rewards += fmt.Sprintf(", and in the last step all of them were %.4g", metrics["reward/mean"])
	}
	r.emit(&eventv1.Event{
		Kind: "step.flat", Level: eventv1.Level_LEVEL_WARN, Step: step,
		Message: fmt.Sprintf("the last %d steps had no gradient: %s. Look at completions (`rollout completions %s`), then give partial credit in the "+
			"reward, choose prompts that the policy sometimes solves, or raise `temperature` or `group_size` in [sampling]", r.flat.steps, rewards, r.runID),
		Metrics: map[string]float64{"steps": float64(r.flat.steps), "reward/mean": metrics["reward/mean"]},
	})
}

// warnShort warns of a step for which dynamic sampling found too few groups with different rewards.
func (r *reporter) warnShort(batch *bufferv1.Batch) {
	r.emit(&eventv1.Event{
		Kind: "step.short", Level: eventv1.Level_LEVEL_WARN, Step: batch.GetStep(),
		Message: fmt.Sprintf("step %d trained on %d instead of %d groups: of the %d groups that it may sample (sampling.refill_rounds = %d), "+
			"%d had equal rewards (mean %.4g)", batch.GetStep(), batch.GetGroups(), r.cfg.GetTrain().GetGroupsPerStep(),
			batch.GetGroups()+batch.GetExcluded(), r.maxBatches, batch.GetZeroAdvantage(), batch.GetZeroAdvantageReward()),
		Metrics: map[string]float64{
			"groups": float64(batch.GetGroups()), "zero_advantage": float64(batch.GetZeroAdvantage()), "reward/zero_advantage": batch.GetZeroAdvantageReward(),
		},
	})
}

// addDynamicSampling adds what dynamic sampling did to the metrics of a step: the share of groups
// that were excluded for equal rewards, how many batches' worth of groups were sampled, and the
// mean reward of everything sampled, which differs from that of the batch.
func (r *reporter) addDynamicSampling(batch *bufferv1.Batch, all map[string]float64) {
	if r.maxBatches == 0 {
		return
	}
	groups, zero := float64(batch.GetGroups()), float64(batch.GetZeroAdvantage())
	sampled := groups + float64(batch.GetExcluded())
	all["dynamic_sampling/excluded"] = zero / sampled
	all["dynamic_sampling/rounds"] = sampled / float64(r.cfg.GetTrain().GetGroupsPerStep())
	if mean, ok := all["reward/mean"]; ok {
		all["reward/sampled"] = (mean*groups + batch.GetZeroAdvantageReward()*zero) / (groups + zero)
	}
}
