package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/command"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// TestCommands compares the output of each command, as text and as JSON, with golden files.
func TestCommands(t *testing.T) {
	t.Parallel()
	served := []*gatewayv1.Model{{Name: "addition-grpo", RunId: runID, WeightsVersion: 12}}
	runCases(t, map[string]commandCase{
		"runs-list":           {args: "runs list", asked: "ListRuns [] 20"},
		"runs-list-state":     {args: "runs list --state running,paused -n 3", asked: "ListRuns [RUN_STATE_RUNNING RUN_STATE_PAUSED] 3"},
		"runs-list-none":      {args: "runs list --state failed,cancelled", asked: "ListRuns [RUN_STATE_FAILED RUN_STATE_CANCELLED] 20"},
		"runs-list-bad":       {args: "runs list --state walking"},
		"runs-show":           {args: "runs show run-01"},
		"runs-show-failed":    {args: "runs show addition-grpo", fake: &fake{state: runv1.RunState_RUN_STATE_FAILED}},
		"runs-show-health":    {args: "runs show addition-grpo", fake: &fake{history: append(story(), collapse())}},
		"runs-show-unknown":   {args: "runs show unknown"},
		"runs-cancel":         {args: "runs cancel addition-grpo", asked: "CancelRun " + runID + " drain true"},
		"runs-cancel-now":     {args: "runs cancel addition-grpo --now", asked: "CancelRun " + runID + " drain false"},
		"runs-pause":          {args: "runs pause addition-grpo", asked: "PauseRun " + runID},
		"runs-resume":         {args: "runs resume addition-grpo", asked: "ResumeRun " + runID},
		"runs-resume-done":    {args: "runs resume addition-grpo", fake: &fake{state: runv1.RunState_RUN_STATE_SUCCEEDED}},
		"runs-delete":         {args: "runs delete addition-grpo --yes", fake: &fake{state: runv1.RunState_RUN_STATE_SUCCEEDED}, asked: "DeleteRun " + runID},
		"runs-delete-dry":     {args: "runs delete addition-grpo --dry-run", fake: &fake{state: runv1.RunState_RUN_STATE_FAILED}},
		"runs-delete-active":  {args: "runs delete addition-grpo --yes"},
		"runs-delete-unsure":  {args: "runs delete addition-grpo", fake: &fake{state: runv1.RunState_RUN_STATE_SUCCEEDED}},
		"runs-delete-none":    {args: "runs delete --yes"},
		"runs-delete-both":    {args: "runs delete addition-grpo --older-than 3d"},
		"runs-delete-bad-age": {args: "runs delete --older-than yesterday"},
		"snapshot-delete":     {args: "snapshot delete snap-01kapq5 --yes", asked: "DeleteSnapshot " + snapshot().GetSnapshotId()},
		"snapshot-delete-no":  {args: "snapshot delete snap-01kapq5"},
		"runs-typo":           {args: "runs lst"},
		"snapshot-list":       {args: "snapshot list addition-grpo", asked: `ListSnapshots "` + runID + `"`},
		"snapshot-show":       {args: "snapshot show snap-01kapq5"},
		"snapshot-named":      {args: "snapshot show snap-01kapq7"},
		"snapshot-unknown":    {args: "snapshot show snap-02"},
		"snapshot-restore":    {args: "snapshot restore snap-01kapq5 --detach", asked: "RestoreSnapshot " + snapshot().GetSnapshotId()},
		"snapshot-episodic":   {args: "snapshot create addition-grpo --kind train_state,episodic", asked: "TakeSnapshots [SNAPSHOT_KIND_TRAIN_STATE SNAPSHOT_KIND_EPISODIC]"},
		"snapshot-bad-name":   {args: "snapshot create addition-grpo --name Before"},
		"snapshot-all":        {args: "snapshot create addition-grpo --all", asked: "TakeSnapshots [SNAPSHOT_KIND_TRAIN_STATE SNAPSHOT_KIND_BUFFER]"},
		"recover":             {args: "snapshot recover", asked: `RecoverSnapshots "" in ""`},
		"recover-inputs":      {args: "snapshot recover --inputs /data"},
		"recover-run":         {args: "snapshot recover " + runID + " --inputs /data", asked: `RecoverSnapshots "` + runID + `" in "/data"`},
		"extract-nowhere":     {args: "snapshot extract snap-01kapq5"},
		"extract-exists":      {args: "snapshot extract snap-01kapq5 --to ."},
		"extract-no-path":     {args: "snapshot extract snap-01kapq5 --to new --path processes"},
		"extract-damaged":     {args: "snapshot extract snap-01kapq5 --to new"},
		"audit":               {args: "audit addition-grpo --server here", asked: `ListSnapshots "` + runID + `"`},
		"audit-external":      {args: "audit my-sampler-1 --server here"},
		"replay-external":     {args: "replay my-sampler-1 --server here"},
		"audit-unknown":       {args: "audit unknown --server here"},
		"audit-nowhere":       {args: "audit addition-grpo --state-dir /nowhere"},
		"status":              {args: "status", asked: "ListRuns [RUN_STATE_PENDING RUN_STATE_STARTING RUN_STATE_RUNNING RUN_STATE_PAUSED RUN_STATE_DRAINING] 0"},
		"logs-ended":          {args: "logs tail addition-grpo", fake: &fake{state: runv1.RunState_RUN_STATE_SUCCEEDED, history: story()}},
		"logs-details":        {args: "logs tail addition-grpo --details -n 4", fake: &fake{state: runv1.RunState_RUN_STATE_SUCCEEDED, history: story()}},
		"logs-newest":         {args: "logs tail addition-grpo -n 2 --level warn", fake: &fake{history: story()}},
		"logs-none":           {args: "logs tail addition-grpo --level error", fake: &fake{state: runv1.RunState_RUN_STATE_SUCCEEDED}},
		"logs-telemetry":      {args: "logs telemetry addition-grpo --worker inference-0 --name tokens_per_second --every 10", asked: "QueryTelemetry " + runID + " [inference-worker/inference-0] [tokens_per_second] every 10 s"},
		"logs-bad-level":      {args: "logs tail addition-grpo --level loud"},
		"logs-bad-since":      {args: "logs tail addition-grpo --since yesterday"},
		"chat":                {args: "chat", fake: &fake{models: served}, stdin: "hi\n\n/reset\nagain\n/quit\nnever\n", asked: "Complete addition-grpo session \"\"\nComplete addition-grpo session \"\""},
		"chat-message":        {args: "chat 17+25= --raw --temperature 0 --max-tokens 5", fake: &fake{models: served}, asked: "Complete addition-grpo session \"\""},
		"chat-unknown":        {args: "chat --model unknown hi", fake: &fake{models: served}},
		"chat-no-policy":      {args: "chat hi"},
		"chat-several":        {args: "chat hi", fake: &fake{models: append(served, &gatewayv1.Model{Name: "other"})}},
		"unknown-command":     {args: "rums list"},
		"unknown-flag":        {args: "validate --confg x"},
		"file-as-argument":    {args: "run base.toml"},
		"plan-as-argument":    {args: "run plan.lock"},
		"run-as-argument":     {args: "run addition-grpo"},
		"file-alone":          {args: "base.toml"},
		"config-as-plan":      {args: "run --plan base.toml"},
		"set-as-argument":     {args: "run --config base.toml train.steps=3"},
		"set-as-flag":         {args: "run --config base.toml --train.steps=3"},
		"argument-as-flag":    {args: "runs show --run addition-grpo"},
		"missing-argument":    {args: "runs show"},
		"missing-flag":        {args: "validate"},
		"two-sources":         {args: "run --plan a --config b"},
		"no-source":           {args: "run"},
		"set-without":         {args: "run --plan a --set b=c"},
		"resume-unknown":      {args: "run --resume unknown"},
		"bad-format":          {args: "status --format xml"},
	})
}

// commandCase is a command line with its expected calls.
type commandCase struct {
	args  string
	fake  *fake
	stdin string
	asked string // expected calls of the control plane
}

// runCases runs each case with both output formats.
func runCases(t *testing.T, cases map[string]commandCase) {
	t.Helper()
	for name, c := range cases {
		for _, format := range []string{cli.FormatText, cli.FormatJSON} {
			if strings.Contains(c.args, "--format") && format == cli.FormatJSON {
				continue
			}
			t.Run(name+"."+format, func(t *testing.T) {
				t.Parallel()
				f := &fake{directory: "/state/runs/" + runID}
				if c.fake != nil {
					f.history, f.models, f.state, f.changed = c.fake.history, c.fake.models, c.fake.state, c.fake.changed
				}
				args := strings.Fields(c.args)
				if format == cli.FormatJSON {
					args = append(args, "--format", "json")
				}
				got := call{plane: newPlane(t, f), stdin: strings.NewReader(c.stdin)}.run(t, args...)
				golden(t, filepath.Join("testdata/command", name+"."+format), got.text())
				if f.calls() != c.asked {
					t.Errorf("asked %q, want %q", f.calls(), c.asked)
				}
			})
		}
	}
}

func TestChatKeepsTheConversation(t *testing.T) {
	t.Parallel()
	f := &fake{models: []*gatewayv1.Model{{Name: "m"}}}
	got := call{plane: newPlane(t, f), stdin: strings.NewReader("one\ntwo\n")}.run(t, "chat", "--system", "be brief", "--top-p", "0.5")
	if got.code != 0 || len(f.prompts) != 2 {
		t.Fatalf("%s, %d prompts", got.text(), len(f.prompts))
	}
	var talk []string
	for _, message := range f.prompts[1].GetChat().GetMessages() {
		talk = append(talk, message.GetRole()+": "+message.GetContent())
	}
	if want := "system: be brief|user: one|assistant: 42\x1b[2J!|user: two"; strings.Join(talk, "|") != want {
		t.Errorf("talk %q, want %q", strings.Join(talk, "|"), want)
	}
	if f.params.GetTopP() != 0.5 || f.params.Temperature != nil || f.params.MaxTokens != nil {
		t.Errorf("params %v", f.params)
	}
	if strings.Contains(got.stdout, "\x1b") {
		t.Errorf("an escape sequence of the policy reached the terminal: %q", got.stdout)
	}
}

func TestChatRefusesWhatIsNotUTF8(t *testing.T) {
	t.Parallel()
	f := &fake{models: []*gatewayv1.Model{{Name: "m"}}}
	got := call{plane: newPlane(t, f), stdin: strings.NewReader("caf\xe9\n")}.run(t, "chat")
	if got.code != 65 || !strings.Contains(got.stderr, "the message is not UTF-8") || len(f.prompts) != 0 {
		t.Errorf("%s, %d prompts", got.text(), len(f.prompts))
	}
}

func TestLogFilters(t *testing.T) {
	t.Parallel()
	f := &fake{state: runv1.RunState_RUN_STATE_SUCCEEDED}
	got := call{plane: newPlane(t, f)}.run(t, "logs", "tail", "addition-grpo", "--service", "storage,inference-worker", "--kind", "log", "--since", "2026-11-21T12:00:00Z", "--level", "error")
	if got.code != 0 {
		t.Fatal(got.text())
	}
	if s := f.filter.String(); f.filter.GetRunId() != runID || len(f.filter.GetServices()) != 2 || f.filter.GetMinLevel() != 4 ||
		!f.filter.GetSince().AsTime().Equal(noon) || f.filter.GetKinds()[0] != "log" {
		t.Errorf("filter %s", s)
	}
}

func TestLogsAreSortedByTime(t *testing.T) {
	t.Parallel()
	late := func(n uint64, after time.Duration) *eventv1.Event {
		return &eventv1.Event{Sequence: n, Kind: "log", Service: "buffer", Level: eventv1.Level_LEVEL_INFO, Message: fmt.Sprintf("at %s", after),
			Time: timestamppb.New(noon.Add(after))}
	}
	f := &fake{state: runv1.RunState_RUN_STATE_SUCCEEDED, history: []*eventv1.Event{late(1, time.Second), late(2, 3*time.Second), late(3, 2*time.Second)}}
	got := call{plane: newPlane(t, f)}.run(t, "logs", "tail", "addition-grpo")
	if first, second, third := strings.Index(got.stdout, "at 1s"), strings.Index(got.stdout, "at 2s"), strings.Index(got.stdout, "at 3s"); first < 0 || second < first || third < second {
		t.Error(got.text())
	}
}

// Commands that change nothing start no daemon and write no file; their error names the state
// folder.
func TestReadingCommandsStartNoDaemon(t *testing.T) {
	t.Parallel()
	for _, args := range []string{"status", "runs list", "runs show x", "logs tail x", "snapshot list", "snapshot show snap-0", "chat hi"} {
		state := filepath.Join(t.TempDir(), "state")
		got := execute(t, nil, append(strings.Fields(args), "--state-dir", state)...)
		if got.code != 69 || got.stdout != "" || !strings.Contains(got.stderr, "no daemon is running in "+state) || !strings.Contains(got.stderr, "`rollout daemon start`") {
			t.Errorf("%s: %s", args, got.text())
		}
		if _, err := os.Stat(state); err == nil {
			t.Errorf("%s made the state folder", args)
		}
	}
	got := execute(t, nil, "status", "--state-dir", t.TempDir(), "--format", "json")
	if !strings.Contains(got.stderr, `"reason": "NO_DAEMON"`) || got.code != 69 {
		t.Error(got.text())
	}
}

// A message that is refused ends the command in a script, but not on a terminal. It is not part of
// the conversation.
func TestConversationContinuesAfterARefusal(t *testing.T) {
	t.Parallel()
	for typed, asked := range map[bool]int{true: 2, false: 1} {
		f := &fake{models: []*gatewayv1.Model{{Name: "m"}}}
		got := call{plane: newPlane(t, f), stdin: strings.NewReader("one\ncaf\xe9\ntwo\n"), typed: typed}.run(t, "chat")
		if len(f.prompts) != asked || (got.code == 0) != typed || !strings.Contains(got.stderr, "the message is not UTF-8") {
			t.Errorf("typed %t: %d prompts, %s", typed, len(f.prompts), got.text())
		}
		if talk := f.prompts[asked-1].GetChat().GetMessages(); len(talk) != 2*asked-1 {
			t.Errorf("typed %t: the talk is %v", typed, talk)
		}
	}
}

func TestHelpHasExamplesEverywhere(t *testing.T) {
	t.Parallel()
	root := command.Root(cli.New(nil, &cli.Printer{}, nil))
	for _, command := range root.Commands() {
		list := command.Commands()
		if len(list) == 0 {
			list = append(list, command)
		}
		for _, c := range list {
			if c.Hidden || c.Name() == "help" || c.Name() == "completion" || c.Parent().Name() == "completion" {
				continue
			}
			if c.Example == "" || c.Short == "" {
				t.Errorf("%s has no example or no short text", c.CommandPath())
			}
		}
	}
}

func TestDocs(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "reference")
	if got := execute(t, nil, "docs", "--dir", dir); got.code != 0 {
		t.Fatal(got.text())
	}
	text, err := os.ReadFile(filepath.Join(dir, "rollout_run.md"))
	if err != nil || !strings.Contains(string(text), "--resume run") || strings.Contains(string(text), "Auto generated") {
		t.Errorf("%v\n%s", err, text)
	}
	if got := execute(t, nil, "docs", "--dir", "/proc/nowhere"); got.code != 73 {
		t.Error(got.text())
	}
}

func TestVersionAndCompletion(t *testing.T) {
	t.Parallel()
	got := execute(t, nil, "version")
	if got.code != 0 || !strings.HasPrefix(got.stdout, "rollout ") {
		t.Error(got.text())
	}
	if flag := execute(t, nil, "--version"); flag != got {
		t.Error(flag.text())
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if got := execute(t, nil, "completion", shell); got.code != 0 || !strings.Contains(got.stdout, "rollout") {
			t.Errorf("%s: %d", shell, got.code)
		}
	}
	if got := execute(t, nil, "__complete", "runs", "list", "--state", ""); !strings.Contains(got.stdout, "running") {
		t.Error(got.text())
	}
}
