package controller

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
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

// emit fills in what all events of a drive share.
func (d *drive) emit(e *eventv1.Event) {
	now := d.deps.Now().UTC()
	e.EventId, e.RunId, e.Time, e.Service = id.New(now), d.spec.GetRunId(), timestamppb.New(now), names.ControllerService
	if e.GetLevel() == 0 {
		e.Level = eventv1.Level_LEVEL_INFO
	}
	d.deps.Events.Emit(e)
}

// flush sees to it that the scheduler, when it hears of the end, finds what was told before on the bus. A bus that is away keeps no run
// from ending.
func (d *drive) flush(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := d.deps.Events.Flush(ctx); err != nil {
		d.log.WarnContext(ctx, "the last events of the run may be stored after its end, or not at all", "error", err)
	}
}

func (d *drive) emitPhase() {
	p, _ := d.board.read()
	name := p.GetPhase().String()[len("PHASE_"):]
	level := eventv1.Level_LEVEL_DEBUG
	if p.GetPhase() == failed {
		level = eventv1.Level_LEVEL_ERROR
	}
	d.emit(&eventv1.Event{
		Kind: "phase", Level: level, Step: p.GetStep(), Message: "phase " + name,
		Attributes: map[string]string{"phase": name, "waiting_for": p.GetWaitingFor()},
	})
}

func (d *drive) emitStep(batch *bufferv1.Batch, result *learnerv1.TrainResult, times map[string]float64) {
	all := metrics(result, times, len(batch.GetSamples()))
	d.set.tellDraws(batch, all)
	d.emit(&eventv1.Event{
		Kind: "step.committed", Step: batch.GetStep(), Metrics: all,
		Message: fmt.Sprintf("step %d of %d: %d groups, %d samples, loss %.4g%s", batch.GetStep(), d.set.steps,
			batch.GetGroups(), len(batch.GetSamples()), all["loss"], without(batch.GetExcluded())),
		Attributes: map[string]string{
			"batch": batch.GetBatchId(), "weights_digest": result.GetWeightsDigest(),
			"excluded": strconv.FormatUint(uint64(batch.GetExcluded()), 10),
		},
	})
	d.watchGradient(batch.GetStep(), all)
	d.watchDraws(batch)
}

// emitCompletions tells of the samples of a step that are kept. It goes before the step's own event, so that who has heard of the
// step knows them.
func (d *drive) emitCompletions(result *learnerv1.TrainResult) {
	if len(result.GetCompletions()) == 0 {
		return
	}
	kept := make([]completion.Completion, 0, len(result.GetCompletions()))
	for _, c := range result.GetCompletions() {
		kept = append(kept, completion.Completion{
			Epoch: c.GetEpoch(), Index: c.GetIndex(), Sample: c.GetSample(), Prompt: c.GetPrompt(), Completion: c.GetCompletion(),
			Reward: c.GetReward(), Advantage: c.Advantage, Tokens: c.GetTokens(), Truncated: c.GetTruncated(),
		})
	}
	text, err := json.Marshal(kept)
	if err != nil { // a number that JSON has not; such a step is refused before
		d.log.Warn("completions of a step can't be told", "step", result.GetStep(), "error", err)
		return
	}
	d.emit(&eventv1.Event{
		Kind: "completions", Level: eventv1.Level_LEVEL_DEBUG, Step: result.GetStep(), Message: fmt.Sprintf("%d completions kept", len(kept)),
		Attributes: map[string]string{"completions": string(text)},
	})
}

// flatFirst is after how many steps without a gradient somebody is told; then after ten times as many.
const flatFirst = 3

// watchGradient warns of steps in a row in which the rewards of every group were equal: nothing is learned from them.
func (d *drive) watchGradient(step uint64, metrics map[string]float64) {
	share, grouped := metrics["zero_advantage_groups"]
	if !grouped || share < 1 {
		d.flat = 0
		return
	}
	if d.flat++; d.flat == 1 {
		d.flatTell = flatFirst
	}
	if d.flat != d.flatTell {
		return
	}
	d.flatTell *= 10
	rewards := "all rewards were equal"
	if metrics["reward/std"] == 0 {
		rewards = fmt.Sprintf("all rewards were equal, in the last step all of them %.4g", metrics["reward/mean"])
	}
	d.emit(&eventv1.Event{
		Kind: "step.flat", Level: eventv1.Level_LEVEL_WARN, Step: step,
		Message: fmt.Sprintf("the last %d steps taught nothing: in each of their groups %s. Look at answers (`rollout report %s`), then "+
			"give partial credit in the reward, take prompts that the policy gets right now and then, or raise `temperature` or `group_size` in [sampling]",
			d.flat, rewards, d.spec.GetRunId()),
		Metrics: map[string]float64{"steps": float64(d.flat), "reward/mean": metrics["reward/mean"]},
	})
}

func (d *drive) emitDelivered(w *weightsv1.WeightsManifest, workers int, seconds float64) {
	d.emit(&eventv1.Event{
		Kind: "weights.delivered", Level: eventv1.Level_LEVEL_DEBUG, Step: w.GetVersion(),
		Message:    fmt.Sprintf("%d workers hold weights version %d", workers, w.GetVersion()),
		Attributes: map[string]string{"version": strconv.FormatUint(w.GetVersion(), 10), "digest": w.GetDigest(), "workers": strconv.Itoa(workers)},
		Metrics:    map[string]float64{"time/deliver": seconds},
	})
}

func (d *drive) fenced(worker string, err error) {
	d.emit(&eventv1.Event{
		Kind: "worker.fenced", Level: eventv1.Level_LEVEL_ERROR, Attributes: map[string]string{"worker": worker},
		Message: fmt.Sprintf("%s can't verify its weights and gets no more work: %s", worker, rpcerr.Text(err)),
	})
	d.log.ErrorContext(context.Background(), "a worker can't verify its weights", "worker", worker, "error", err)
}

// answer is one held-out sample as tools read it from the event. A sample that was not scored has a reason and no reward.
type answer struct {
	Row        uint64   `json:"row"`
	Prompt     string   `json:"prompt"`
	Completion string   `json:"completion"`
	Reward     *float64 `json:"reward"`
	Failed     string   `json:"failed,omitempty"`
}

func (d *drive) emitEval(step uint64, samples []*inferencev1.EvalSample) {
	shown := []answer{}
	for _, s := range samples[:min(len(samples), d.cfg.Samples)] {
		a := answer{Row: s.GetRow(), Prompt: s.GetPrompt(), Completion: s.GetCompletion()}
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
		text = []byte("[]") // a reward that is no JSON number
	}
	means := score(samples)
	message := fmt.Sprintf("evaluation at step %d: no held-out prompt was scored", step)
	if reward, ok := means["eval/reward"]; ok {
		message = fmt.Sprintf("evaluation at step %d: reward %.3f over %.0f held-out prompts", step, reward, means["eval/samples"]-means["eval/failed"])
	}
	level := eventv1.Level_LEVEL_INFO
	if means["eval/failed"] > 0 {
		level = eventv1.Level_LEVEL_WARN
		message += fmt.Sprintf("; %.0f failed and count for nothing", means["eval/failed"])
	}
	d.emit(&eventv1.Event{
		Kind: "eval.finished", Step: step, Level: level, Metrics: means, Message: message, Attributes: map[string]string{"samples": string(text)},
	})
}

func (d *drive) emitLoss(step uint64, got *learnerv1.EvaluateLossResponse) {
	means := map[string]float64{"eval/samples": float64(got.GetRows()), "eval/failed": float64(got.GetRefused())}
	for name, value := range got.GetMetrics() {
		means["eval/"+name] = value
	}
	level := eventv1.Level_LEVEL_INFO
	message := fmt.Sprintf("evaluation at step %d: loss %.4g over %d held-out rows", step, got.GetMetrics()["loss"], got.GetRows()-got.GetRefused())
	if got.GetRefused() > 0 {
		level = eventv1.Level_LEVEL_WARN
		message += fmt.Sprintf("; %d could not be taken and count for nothing", got.GetRefused())
	}
	d.emit(&eventv1.Event{Kind: "eval.finished", Step: step, Level: level, Metrics: means, Message: message})
}

// without tells of groups that a step had to do without.
func without(excluded uint32) string {
	if excluded == 0 {
		return ""
	}
	return fmt.Sprintf("; %d groups were excluded", excluded)
}
