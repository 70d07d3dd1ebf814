package live

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/wait"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

var update = flag.Bool("update", false, "update the golden files")

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(path, []byte(got), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func statusOf(state runv1.RunState, step uint64) *runv1.RunStatus {
	return &runv1.RunStatus{
		Run:   &runv1.Run{RunId: "run-01kapq3n8jz3gq5p1cs0e8q0vd", Name: "addition-grpo", State: state, Step: step, TotalSteps: 40},
		Phase: "LEASING", WaitingFor: "12 groups of batch 13 from the inference workers",
		Queues: &runv1.Queues{InFlight: 12, Ready: 20, Leased: 0, Consumed: 384, Excluded: 1, Failures: map[string]uint64{"REWARD_TIMEOUT": 3, "TOOL_FAILED": 1200}},
		Workers: []*runv1.Worker{
			{WorkerId: "inference-0", Healthy: true, WeightsVersion: 12, Activity: "decodes 64 slots", SamplesPerSecond: 1140.4},
			{WorkerId: "learner-0", WeightsVersion: 12, Activity: "loads the model", Restarts: 2},
		},
	}
}

func step(n uint64) *eventv1.Event {
	return &eventv1.Event{
		Kind: "step.committed", Step: n, Time: timestamppb.New(noon.Add(time.Duration(n) * 2 * time.Second)), Level: eventv1.Level_LEVEL_INFO,
		Metrics: map[string]float64{
			"reward/mean": 0.5 + float64(n)/50, "loss": 0.01, "entropy": 0.4, "samples_per_second": 1140, "tokens_per_second": 12300, "time/step": 0.22,
		},
	}
}

func eval(n uint64, reward float64) *eventv1.Event {
	return &eventv1.Event{Kind: "eval.finished", Step: n, Time: timestamppb.New(noon), Metrics: map[string]float64{"eval/reward": reward}}
}

// The main metric of an evaluation is that of scored answers, else that of the rows.
func TestEvaluationsHaveAMainMetric(t *testing.T) {
	t.Parallel()
	for want, metrics := range map[string]map[string]float64{
		"accuracy":         {"eval/reward": 0.5, "eval/accuracy": 0.4},
		"reward":           {"eval/reward": 0.5, "eval/length": 3},
		"rewards/accuracy": {"eval/loss": 0.6, "eval/rewards/accuracy": 0.7},
		"loss":             {"eval/loss": 0.6, "eval/entropy": 1},
	} {
		r := &Run{}
		for step := range uint64(2) {
			r.Add(&eventv1.Event{Kind: "eval.finished", Step: step, Metrics: metrics})
		}
		values, name, _ := r.Accuracy()
		if name != want || len(values) != 2 || values[0] != metrics["eval/"+want] {
			t.Errorf("%v: %s %v, want %s", metrics, name, values, want)
		}
		if names := evalNames(metrics); names[0] != "eval/"+want {
			t.Errorf("%v is shown as %v", metrics, names)
		}
	}
}

// busy is a run in its twelfth step.
func busy() *Run {
	r := &Run{}
	r.Update(statusOf(runv1.RunState_RUN_STATE_RUNNING, 12))
	r.Add(eval(0, 0.51))
	for n := uint64(1); n <= 12; n++ {
		r.Add(step(n))
	}
	r.Add(eval(10, 0.73))
	for i := range 5 {
		r.Add(&eventv1.Event{
			Kind: "log", Level: eventv1.Level_LEVEL_WARN + eventv1.Level(i%2), Service: "inference-worker/inference-0",
			Time: timestamppb.New(noon), Message: fmt.Sprintf("warning %c\nwith two lines", 'a'+i),
		})
	}
	return r
}

func TestView(t *testing.T) {
	t.Parallel()
	golden(t, "testdata/view.txt", busy().View(output.Style{}, 100, time.UTC, "Ctrl-C stops"))
	golden(t, "testdata/view-color.txt", busy().View(output.Style{Color: true}, 100, time.UTC, ""))
	narrow := busy().View(output.Style{Color: true}, 40, time.UTC, "")
	golden(t, "testdata/view-narrow.txt", narrow)
	for line := range strings.Lines(narrow) {
		if width := ansi.StringWidth(strings.TrimSuffix(line, "\n")); width > 40 {
			t.Errorf("a line of %d columns: %q", width, line)
		}
	}
	if got := (&Run{}).View(output.Style{}, 80, nil, ""); got != "waiting for the run's status\n" {
		t.Errorf("before the first status: %q", got)
	}
}

// Training on preferences shows the accuracy and margin of pairs in addition to the loss.
func TestPreferencesShowAccuracyAndMargin(t *testing.T) {
	t.Parallel()
	r := &Run{}
	status := statusOf(runv1.RunState_RUN_STATE_RUNNING, 3)
	status.Run.Plan = &planv1.Plan{Config: &configv1.RunConfig{Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Dpo{}}}}
	r.Update(status)
	e := step(3)
	e.Metrics = map[string]float64{"loss": 0.69, "rewards/accuracy": 0.625, "rewards/margin": 0.031, "grad_norm": 0.7}
	r.Add(e)
	if line, want := r.Line(e, output.Style{}, time.UTC), "12:00:06 step 3/40  loss 0.690  accuracy 0.625  margin 0.031  grad norm 0.700"; line != want {
		t.Errorf("got  %s\nwant %s", line, want)
	}
	if view := r.View(output.Style{}, 120, time.UTC, ""); !strings.Contains(view, "0.690  accuracy 0.625  margin 0.031  grad norm") {
		t.Errorf("the view\n%s", view)
	}
	e = step(4)
	e.Metrics = map[string]float64{"loss": 0.693, "rewards/accuracy": 0, "rewards/margin": -3e-8} // of the first step
	if line := r.Line(e, output.Style{}, time.UTC); !strings.HasSuffix(line, "accuracy 0  margin 0") {
		t.Error(line)
	}
	e.Metrics = map[string]float64{"loss": 0.5, "rewards/margin": 0.2} // KTO has no pairs
	r.Add(e)
	if line := r.Line(e, output.Style{}, time.UTC); !strings.HasSuffix(line, "loss 0.500  margin 0.200") {
		t.Error(line)
	}
}

func warned(seconds float64, format string, args ...any) *eventv1.Event {
	return &eventv1.Event{
		Kind: "log", Level: eventv1.Level_LEVEL_WARN, Service: "inference-worker/inference-0", Message: fmt.Sprintf(format, args...),
		Time: timestamppb.New(noon.Add(time.Duration(seconds * float64(time.Second)))),
	}
}

// Warnings that differ only in numbers and quoted text are joined: the view counts them, and the
// lines show them every ten seconds and at the end.
func TestRepeatedWarningsAreJoined(t *testing.T) {
	t.Parallel()
	r := &Run{}
	r.Update(statusOf(runv1.RunState_RUN_STATE_RUNNING, 2))
	var printed []string
	add := func(e *eventv1.Event) {
		r.Add(e)
		if line := r.Line(e, output.Style{}, time.UTC); line != "" {
			printed = append(printed, line)
		}
	}
	for i := range 30 {
		add(warned(float64(i)/2, "`score` raised ValueError: can't read '%c': line %d", 'a'+i%7, i))
	}
	counted := warned(15, "`score` raised ValueError: can't read 'z': line 9")
	counted.Attributes = map[string]string{"repeated": "12"} // the worker counted them itself
	add(counted)
	add(warned(15.5, "the disk is full"))
	printed = append(printed, r.LastLines(output.Style{}, time.UTC))
	want := []string{
		"12:00:00 warning inference-worker/inference-0: `score` raised ValueError: can't read 'a': line 0",
		"12:00:10 warning inference-worker/inference-0: 20 times: `score` raised ValueError: can't read 'g': line 20",
		"12:00:15 warning inference-worker/inference-0: the disk is full",
		"12:00:15 warning inference-worker/inference-0: 21 times: `score` raised ValueError: can't read 'z': line 9",
	}
	if diff := cmp.Diff(want, printed); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	view := r.View(output.Style{}, 200, time.UTC, "")
	if !strings.Contains(view, "42 times: `score` raised") || strings.Count(view, "`score` raised") != 1 || !strings.Contains(view, "the disk is full") {
		t.Errorf("the view\n%s", view)
	}
}

// An evaluation in which the reward of some rows failed shows its metrics, and the warning on its
// own line.
func TestEvaluationsWithFailedRowsShowTheirMetrics(t *testing.T) {
	t.Parallel()
	r := &Run{}
	r.Update(statusOf(runv1.RunState_RUN_STATE_RUNNING, 2))
	var printed []string
	for i, reward := range []float64{0.5, 0.625, math.NaN()} {
		e := &eventv1.Event{
			Kind: "eval.finished", Step: uint64(10 * i), Level: eventv1.Level_LEVEL_WARN, Service: "learner-controller",
			Time:    timestamppb.New(noon.Add(time.Duration(i) * time.Second)),
			Metrics: map[string]float64{"eval/reward": reward, "eval/length": 4, "eval/samples": 64, "eval/failed": 1},
			Message: fmt.Sprintf("evaluation at step %d: reward %.3f over 63 held-out prompts; 1 failed and are not counted", 10*i, reward),
		}
		if math.IsNaN(reward) { // no row was scored
			e.Metrics = map[string]float64{"eval/samples": 64, "eval/failed": 64}
			e.Message = "evaluation at step 20: no held-out prompt was scored"
		}
		r.Add(e)
		printed = append(printed, r.Line(e, output.Style{}, time.UTC))
	}
	want := []string{
		"12:00:00 eval after step 0  reward 0.500  length 4  (64 samples)  (1 failed)\n" +
			"12:00:00 warning learner-controller: evaluation at step 0: reward 0.500 over 63 held-out prompts; 1 failed and are not counted",
		"12:00:01 eval after step 10  reward 0.625  length 4  (64 samples)  (1 failed)",
		"12:00:02 eval after step 20  (64 samples)  (64 failed)\n" +
			"12:00:02 warning learner-controller: evaluation at step 20: no held-out prompt was scored",
	}
	if diff := cmp.Diff(want, printed); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	view := r.View(output.Style{}, 200, time.UTC, "")
	if want := "held-out  ▁█  0.625  reward after step 10, 0.500 at first  64 of 64 samples failed after step 20\n"; !strings.Contains(view, want) {
		t.Errorf("the view lacks %q:\n%s", want, view)
	}
}

// The view names the sidecars with which something is wrong.
func TestTheViewNamesSidecars(t *testing.T) {
	t.Parallel()
	status := statusOf(runv1.RunState_RUN_STATE_RUNNING, 3)
	status.Workers = []*runv1.Worker{{WorkerId: "inference-0", Kind: "inference", Waits: []*waitv1.Wait{
		{Reason: wait.Slot, Evidence: "the groups wait for a free slot"},
		{Reason: wait.PluginLeaks, Evidence: "the sidecar judge: it has 300 MB of memory"},
	}}}
	r := &Run{}
	r.Update(status)
	view := r.View(output.Style{}, 200, time.UTC, "")
	if want := "plugin    PLUGIN_LEAKS  the sidecar judge: it has 300 MB of memory (inference-0)\n"; !strings.Contains(view, want) || strings.Count(view, "plugin  ") != 1 {
		t.Errorf("the view lacks %q, or has more:\n%s", want, view)
	}
}

// The view always shows what the run waits for and for how long; lines show it when the wait is
// long.
func TestWaitsShowTheirDuration(t *testing.T) {
	t.Parallel()
	status := statusOf(runv1.RunState_RUN_STATE_STARTING, 0)
	status.WaitingFor, status.WaitingSince = "learner-0 to load the model (its process)", timestamppb.New(noon)
	r := &Run{now: func() time.Time { return noon.Add(12 * time.Second) }}
	r.Update(status)
	if view := r.View(output.Style{}, 100, time.UTC, ""); !strings.Contains(view, "learner-0 to load the model (its process)  12 s so far") {
		t.Errorf("the view\n%s", view)
	}
	var s stall
	var reported []string
	for second := range 50 {
		if line := s.line(status, noon.Add(time.Duration(second)*time.Second), output.Style{}, time.UTC); line != "" {
			reported = append(reported, line)
		}
	}
	want := []string{
		"12:00:10 still waits for learner-0 to load the model (its process)  10 s so far",
		"12:00:20 still waits for learner-0 to load the model (its process)  20 s so far",
		"12:00:40 still waits for learner-0 to load the model (its process)  40 s so far",
	}
	if diff := cmp.Diff(want, reported); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	status.WaitingFor, status.WaitingSince = "", nil
	if line := s.line(status, noon.Add(time.Hour), output.Style{}, time.UTC); line != "" {
		t.Errorf("it waits for nothing: %s", line)
	}
}

// The renderer leaves old lines on the screen when a view shrinks, as at the end of a run.
func TestScreenNeverShrinks(t *testing.T) {
	t.Parallel()
	m, _, _ := screen()
	m.Run.Update(statusOf(runv1.RunState_RUN_STATE_RUNNING, 2))
	before := strings.Count(m.View().Content, "\n")
	m.Run.Update(&runv1.RunStatus{Run: &runv1.Run{State: runv1.RunState_RUN_STATE_SUCCEEDED}})
	m.Done = true
	view := m.View().Content
	if after := strings.Count(view, "\n"); after != before || m.blank != 6 { // the wait, the groups, the failures, two workers, the hint
		t.Errorf("%d lines became %d, of them %d empty:\n%s", before, after, m.blank, view)
	}
}

func TestTheRemainingTimeIsKnownOnlyWhileARunIsActive(t *testing.T) {
	t.Parallel()
	for _, state := range []runv1.RunState{runv1.RunState_RUN_STATE_CANCELLED, runv1.RunState_RUN_STATE_PAUSED, runv1.RunState_RUN_STATE_DRAINING, runv1.RunState_RUN_STATE_FAILED} {
		r := busy()
		r.Status.Run.State = state
		if left, ok := r.Remaining(); ok {
			t.Errorf("%s: %v left", state, left)
		}
	}
	r := busy() // stood still for a day, then was resumed
	r.Add(&eventv1.Event{Kind: "run.state", Attributes: map[string]string{"state": "STARTING"}})
	if _, ok := r.Remaining(); ok {
		t.Error("the pace of before is that of now")
	}
	for n := uint64(13); n <= 14; n++ {
		e := step(n)
		e.Time = timestamppb.New(e.GetTime().AsTime().Add(24 * time.Hour))
		r.Add(e)
	}
	if left, ok := r.Remaining(); !ok || left != 26*2*time.Second {
		t.Errorf("%v left", left)
	}
}

func TestTheRemainingTimeFollowsTheLastSteps(t *testing.T) {
	t.Parallel()
	left, ok := busy().Remaining()
	if want := 28 * 2 * time.Second; !ok || left != want {
		t.Errorf("%v, want %v", left, want)
	}
	if _, ok := (&Run{}).Remaining(); ok {
		t.Error("the end of a run without steps is known")
	}
}

func TestAStepThatRecoveryRepeatsCountsOnce(t *testing.T) {
	t.Parallel()
	r := busy()
	before := len(r.Reward)
	r.Add(step(11))
	r.Add(step(12))
	if len(r.Reward) != before {
		t.Errorf("%d points, want %d", len(r.Reward), before)
	}
	r.Add(eval(10, 0.74))
	if len(r.Evals) != 2 || r.Evals[1].Metrics["eval/reward"] != 0.74 {
		t.Errorf("evaluations %v", r.Evals)
	}
}

func TestSpark(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		values []float64
		width  int
		want   string
	}{
		{nil, 10, ""}, {[]float64{1}, 10, "▅"}, {[]float64{0, 1}, 10, "▁█"}, {[]float64{3, 3, 3}, 10, "▅▅▅"},
		{[]float64{0, 0, 1, 1, 2, 2, 3, 3}, 4, "▁▃▆█"}, {[]float64{0, 1}, 0, ""},
	} {
		if got := Spark(c.values, c.width); got != c.want {
			t.Errorf("Spark(%v, %d) = %q, want %q", c.values, c.width, got, c.want)
		}
	}
	if got := Bar(1, 4, 8); got != "██░░░░░░" {
		t.Error(got)
	}
	if got := Bar(9, 0, 4) + Bar(9, 4, 4); got != "░░░░████" {
		t.Error(got)
	}
}

// screen returns a model, the channel of its updates, and the stops that it requested.
func screen() (*Screen, chan Update, *[]bool) {
	updates := make(chan Update, 8)
	var asked []bool
	return &Screen{Run: &Run{}, width: 80, zone: time.UTC, updates: updates, stop: func(drain bool) error {
		asked = append(asked, drain)
		return nil
	}}, updates, &asked
}

// feed sends a message to the model and runs the command that it returns, once.
func feed(m *Screen, msg tea.Msg) tea.Msg {
	_, cmd := m.Update(msg)
	if cmd == nil {
		return nil
	}
	return cmd()
}

func TestScreenTakesUpdatesUntilTheEnd(t *testing.T) {
	t.Parallel()
	m, updates, _ := screen()
	updates <- Update{History: []*eventv1.Event{step(1), step(2)}}
	updates <- Update{Status: statusOf(runv1.RunState_RUN_STATE_RUNNING, 2)}
	updates <- Update{Event: step(3)}
	updates <- Update{Done: true}
	msg := m.next()()
	for range 4 {
		msg = feed(m, msg)
	}
	if _, quit := msg.(tea.QuitMsg); !quit || !m.Done {
		t.Errorf("after the end: %T, done %t", msg, m.Done)
	}
	feed(m, tea.WindowSizeMsg{Width: 60, Height: 20})
	view := m.View()
	if !strings.Contains(view.Content, "3/40") || view.WindowTitle != "addition-grpo 3/40" || strings.Contains(view.Content, "Ctrl-C") {
		t.Errorf("title %q, view\n%s", view.WindowTitle, view.Content)
	}
}

func TestScreenKeys(t *testing.T) {
	t.Parallel()
	m, _, asked := screen()
	m.Run.Update(statusOf(runv1.RunState_RUN_STATE_RUNNING, 2))
	press := tea.KeyPressMsg{Code: 'c', Mod: tea.ModCtrl}
	feed(m, press)
	if !strings.Contains(m.View().Content, "press Ctrl-C again to stop immediately") {
		t.Error(m.View().Content)
	}
	feed(m, interrupted{}) // a signal counts like the key
	if diff := cmp.Diff([]bool{true, false}, *asked); diff != "" {
		t.Error(diff)
	}
	if _, quit := feed(m, press).(tea.QuitMsg); !quit || !m.Detached {
		t.Error("the third does not leave")
	}
	m, _, asked = screen()
	if _, quit := feed(m, tea.KeyPressMsg{Code: 'd', Text: "d"}).(tea.QuitMsg); !quit || !m.Detached || len(*asked) > 0 {
		t.Error("d does not detach")
	}
}

func TestScreenErrors(t *testing.T) {
	t.Parallel()
	m, _, _ := screen()
	boom := errors.New("boom")
	m.stop = func(bool) error { return boom }
	if _, quit := feed(m, feed(m, interrupted{})).(tea.QuitMsg); !quit || !errors.Is(m.Err, boom) {
		t.Errorf("got %v", m.Err)
	}
	m, updates, _ := screen()
	updates <- Update{Err: boom}
	if _, quit := feed(m, m.next()()).(tea.QuitMsg); !quit || !errors.Is(m.Err, boom) {
		t.Errorf("got %v", m.Err)
	}
	close(updates)
	if u, ok := m.next()().(Update); !ok || !u.Done {
		t.Errorf("a closed stream gives %v", u)
	}
}

func TestAnswersBeforeAndAfter(t *testing.T) {
	t.Parallel()
	r := &Run{}
	r.Update(statusOf(runv1.RunState_RUN_STATE_CANCELLED, 40))
	for n, samples := range []string{
		`[{"row": 3, "prompt": "a\u001b[2J", "completion": "x", "reward": 0}, {"row": 9, "prompt": "only before", "completion": ""}]`,
		`[{"row": 5, "prompt": "only after"}, {"row": 3, "prompt": "a\u001b[2J", "completion": "y", "reward": 1}]`,
	} {
		e := eval(uint64(40*n), 0.4+float64(n)/2)
		e.Attributes = map[string]string{"samples": samples}
		r.Add(e)
	}
	for _, group := range []string{"0/3", "0/7", "0/3"} { // reported again after a restart
		r.Add(&eventv1.Event{Kind: "group.excluded", Level: eventv1.Level_LEVEL_WARN, Attributes: map[string]string{
			"group": group, "reason": "ATTEMPTS_EXHAUSTED", "last_reason": "REWARD_RAISED"}})
	}
	golden(t, "testdata/summary.txt", r.Summary(output.Style{}, Paths{PNG: "/r/reward.png", HTML: "/r/index.html"}))
}

func TestQuestionOfARenderedChat(t *testing.T) {
	t.Parallel()
	for prompt, want := range map[string]string{
		"17+25=": "17+25=",
		"system\nBe brief.\nuser\nWhat is 3+7?\nassistant\n": "What is 3+7?",
		"": "",
	} {
		if got := (Answer{Prompt: prompt}).Question(); got != want {
			t.Errorf("%q: got %q, want %q", prompt, got, want)
		}
	}
}

func TestAnAnswerThatWasNotScoredHasNoReward(t *testing.T) {
	t.Parallel()
	zero := 0.0
	for want, a := range map[string]Answer{"not scored reward_raised": {Failed: "REWARD_RAISED"}, "0": {Reward: &zero}} {
		if got := a.Verdict(); got != want || a.Good() {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
