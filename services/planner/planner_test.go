package planner

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/probe"
)

const tokenizer = `{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": false},
"model": {"type": "WordLevel", "vocab": {"<unk>": 0, "1": 1, "+": 2, "=": 3}, "unk_token": "<unk>"}}`

const configText = `name = "addition"
[model]
path = "model"
[data]
train = "train.jsonl"
[sampling]
group_size = 2
max_tokens = 6
[reward]
plugin = "reward.py:exact"
[algorithm.grpo]
[train]
steps = 4
`

// prober is the interpreter of the checkout's environment, else the system's.
func prober(t *testing.T) Config {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	python := filepath.Join(root, ".venv/bin/python")
	if _, err := os.Stat(python); err != nil {
		if python, err = exec.LookPath("python3"); err != nil {
			t.Fatal("no Python: run `make venv`")
		}
	}
	return Config{Python: python, PythonPath: filepath.Join(root, "python"), Env: os.Environ(), Folder: t.TempDir()}
}

func server(t *testing.T) *Server {
	t.Helper()
	s, err := New(prober(t))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// project is a folder with everything that configText names.
func project(t *testing.T, reward string) string {
	t.Helper()
	dir := t.TempDir()
	header := `{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`
	weights := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header+"0123"...)
	for name, text := range map[string]string{
		"train.jsonl": `{"prompt": "1+1=", "answer": "2"}` + "\n", "reward.py": reward, "model/config.json": `{"n_positions": 32}`,
		"model/tokenizer.json": tokenizer, "model/model.safetensors": string(weights), "model/README.md": "not read",
	} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func create(t *testing.T, s *Server, dir string, set ...string) *planv1.CreatePlanResponse {
	t.Helper()
	response, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{
		Toml: []byte(configText), File: "run.toml", BaseDir: dir, Set: set,
	}})
	if err != nil {
		t.Fatal(err)
	}
	return response
}

func TestPlanPinsEveryInput(t *testing.T) {
	t.Parallel()
	dir := project(t, "from lib import grade\nimport json\n\ndef exact(samples):\n    import late\n    return [grade(s) for s in samples]\n")
	for name, text := range map[string]string{"lib.py": "def grade(s): return 1.0\n", "late.py": "", "unused.py": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s := server(t)
	plan := create(t, s, dir)
	if len(plan.GetProblems()) > 0 {
		t.Fatal(plan.GetProblems())
	}
	var paths []string
	for _, in := range plan.GetPlan().GetInputs() {
		paths = append(paths, in.GetPath())
		if in.GetBytes() == 0 && in.GetPath() != "late.py" || !strings.HasPrefix(in.GetDigest(), "blake3-") {
			t.Errorf("%v", in)
		}
	}
	want := []string{"train.jsonl", "model/config.json", "model/model.safetensors", "model/tokenizer.json", "late.py", "lib.py", "reward.py"}
	if !slices.Equal(paths, want) {
		t.Errorf("inputs %q, want %q", paths, want)
	}
	if got := plan.GetPlan().GetConfig().GetEngine().GetMaxModelLen(); got != 32 {
		t.Errorf("the default length is %d; the model has 32 positions", got)
	}
	if _, err := os.Stat(filepath.Join(dir, "__pycache__")); err == nil {
		t.Error("the dry call did not remove its files")
	}
	// a change of an imported module is reported
	if err := os.WriteFile(filepath.Join(dir, "lib.py"), []byte("def grade(s): return 2.0\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	verified, err := s.VerifyPlan(t.Context(), &planv1.VerifyPlanRequest{Lock: plan.GetLock(), File: "plan.lock", BaseDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if p := verified.GetProblems(); len(p) != 1 || p[0].GetFile() != "lib.py" || p[0].GetReason() != "INPUT_CHANGED" {
		t.Errorf("problems: %v", p)
	}
}

// RenewPlan keeps the configuration, takes new digests, and reports problems of the inputs.
func TestRenewPlanReadsTheInputsAgain(t *testing.T) {
	t.Parallel()
	dir := project(t, "def exact(samples): return [1.0 for s in samples]\n")
	s := server(t)
	first := create(t, s, dir)
	renew := func() *planv1.RenewPlanResponse {
		t.Helper()
		response, err := s.RenewPlan(t.Context(), &planv1.RenewPlanRequest{Plan: first.GetPlan(), BaseDir: dir})
		if err != nil {
			t.Fatal(err)
		}
		return response
	}
	if same := renew(); string(same.GetLock()) != string(first.GetLock()) {
		t.Errorf("the plan differs, although no input changed: %v", same.GetProblems())
	}
	if err := os.WriteFile(filepath.Join(dir, "reward.py"), []byte("def exact(samples): return [2.0 for s in samples]\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	renewed := renew()
	if len(renewed.GetProblems()) > 0 || renewed.GetPlan().GetPlanId() == first.GetPlan().GetPlanId() ||
		!proto.Equal(renewed.GetPlan().GetConfig(), first.GetPlan().GetConfig()) {
		t.Fatalf("renewed %v", renewed)
	}
	verified, err := s.VerifyPlan(t.Context(), &planv1.VerifyPlanRequest{Lock: renewed.GetLock(), BaseDir: dir})
	if err != nil || len(verified.GetProblems()) > 0 {
		t.Errorf("%v %v", verified.GetProblems(), err)
	}
	if err := os.Remove(filepath.Join(dir, "train.jsonl")); err != nil {
		t.Fatal(err)
	}
	if p := renew().GetProblems(); len(p) != 1 || p[0].GetReason() != "MISSING_FILE" || p[0].GetField() != "data.train" || p[0].GetFile() != "" {
		t.Errorf("problems %v", p)
	}
	if _, err := s.RenewPlan(t.Context(), &planv1.RenewPlanRequest{Plan: first.GetPlan()}); rpcerr.Reason(err) != "BAD_BASE_DIR" {
		t.Errorf("got %v", err)
	}
}

func TestRenewPlanOverridesSettings(t *testing.T) {
	t.Parallel()
	dir := project(t, "def exact(samples): return [1.0 for s in samples]\n")
	s := server(t)
	first := create(t, s, dir)
	renew := func(set ...string) *planv1.RenewPlanResponse {
		t.Helper()
		response, err := s.RenewPlan(t.Context(), &planv1.RenewPlanRequest{Plan: first.GetPlan(), BaseDir: dir, Set: set})
		if err != nil {
			t.Fatal(err)
		}
		return response
	}
	longer := renew("train.steps=77", `name="longer"`)
	want := proto.CloneOf(first.GetPlan().GetConfig())
	want.Train.Steps, want.Name = proto.Uint64(77), proto.String("longer")
	if !proto.Equal(longer.GetPlan().GetConfig(), want) {
		t.Errorf("problems %v\ngot  %v\nwant %v", longer.GetProblems(), longer.GetPlan().GetConfig(), want)
	}
	for override, reason := range map[string]string{"train.stepz=3": "UNKNOWN_KEY", "train.steps=0": "OUT_OF_RANGE", "train.steps": "SYNTAX", `train.steps="x"`: "WRONG_TYPE"} {
		if p := renew(override).GetProblems(); len(p) == 0 || p[0].GetReason() != reason {
			t.Errorf("%s: %v", override, p)
		}
	}
}

func TestPlanKillsARewardThatBlocksTheInterpreter(t *testing.T) {
	t.Parallel()
	dir := project(t, "import re\n\ndef exact(samples):\n    return [float(bool(re.match('(a+)+$', 'a' * 64 + 'b'))) for s in samples]\n")
	s := server(t)
	s.prober.KillDelay = time.Second
	problems := create(t, s, dir, "reward.timeout_seconds=0.2").GetProblems() // the match never ends
	if len(problems) != 1 || problems[0].GetReason() != "REWARD_TIMEOUT" || problems[0].GetField() != "reward.plugin" {
		t.Errorf("problems: %v", problems)
	}
}

// A slow start of the interpreter is not reported as a slow reward.
func TestSlowStartOfTheInterpreterIsAProbeFailure(t *testing.T) {
	t.Parallel()
	s := server(t)
	s.prober.StartUp = time.Millisecond
	problems := create(t, s, project(t, "def exact(samples): return [0.0 for _ in samples]\n")).GetProblems()
	if len(problems) == 0 {
		t.Error("the interpreter started within a millisecond")
	}
	for _, p := range problems {
		if p.GetReason() != "PROBE_FAILED" || !strings.Contains(p.GetMessage(), "not ready after 1ms") {
			t.Errorf("got %v", p)
		}
	}
}

func TestCancelledCallStopsTheProbe(t *testing.T) {
	t.Parallel()
	dir := project(t, "import os, time\n\ndef exact(samples):\n    open('"+filepath.Join(t.TempDir(), "called")+"', 'w').close()\n    time.sleep(3600)\n")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err := server(t).CreatePlan(ctx, &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{
		Toml: []byte(configText), File: "run.toml", BaseDir: dir, Set: []string{"reward.timeout_seconds=3600"},
	}})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestMissingPythonIsOneProblem(t *testing.T) {
	t.Parallel()
	dir := project(t, "def exact(samples): return []\n")
	s, err := New(Config{Python: "/nowhere/python"})
	if err != nil {
		t.Fatal(err)
	}
	problems := create(t, s, dir).GetProblems()
	if len(problems) != 1 || problems[0].GetReason() != "PROBE_FAILED" {
		t.Errorf("problems: %v", problems)
	}
	if _, err := New(Config{}); err == nil {
		t.Error("New accepts an empty interpreter")
	}
}

func TestBaseDirMustBeAbsolute(t *testing.T) {
	t.Parallel()
	s := server(t)
	_, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{BaseDir: "here"}})
	if rpcerr.Reason(err) != "BAD_BASE_DIR" || rpcerr.Code(err) != codes.InvalidArgument {
		t.Errorf("got %v", err)
	}
	if _, err = s.VerifyPlan(t.Context(), &planv1.VerifyPlanRequest{}); rpcerr.Reason(err) != "BAD_BASE_DIR" {
		t.Errorf("got %v", err)
	}
}

func TestValidateConfigReadsNoInputs(t *testing.T) {
	t.Parallel()
	s, err := New(Config{Python: "/nowhere/python"})
	if err != nil {
		t.Fatal(err)
	}
	response, err := s.ValidateConfig(t.Context(), &planv1.ValidateConfigRequest{Source: &planv1.ConfigSource{Toml: []byte(configText), File: "run.toml"}})
	if err != nil || len(response.GetProblems()) > 0 || response.GetConfig().GetName() != "addition" {
		t.Errorf("%v %v", response, err)
	}
}

// Moments in 8 bits need a package that is not installed by default.
func TestOptimizerNeedsItsPackage(t *testing.T) {
	t.Parallel()
	s, version := server(t), "1"
	answer := &probe.Answer{Python: version, Packages: map[string]*string{}}
	for _, name := range probe.Packages {
		answer.Packages[name] = &version
	}
	missing := func(optimizer string) int {
		d := s.checks(s.reader.Read(&planv1.ConfigSource{Toml: []byte(configText), Set: []string{`train.optimizer="` + optimizer + `"`}}), "", nil)
		before := d.Problems.Len()
		d.packages.versions(answer)
		return d.Problems.Len() - before
	}
	if missing("adamw") != 0 || missing("adamw_8bit") != 1 {
		t.Errorf("missing %d and %d", missing("adamw"), missing("adamw_8bit"))
	}
	answer.Packages["bitsandbytes"] = &version
	if missing("adamw_8bit") != 0 {
		t.Error("bitsandbytes is installed and reported as missing")
	}
}

func TestPlanReportsMissingPackages(t *testing.T) {
	t.Parallel()
	s := server(t)
	answer, err := s.prober.Ask(t.Context(), probe.Request{Packages: []string{"torch", "unobtainium"}})
	if err != nil {
		t.Fatal(err)
	}
	d := s.checks(s.reader.Read(&planv1.ConfigSource{}), "", nil)
	before := d.Problems.Len()
	if got := d.packages.versions(answer); got["python"] == "" || got["torch"] == "" {
		t.Errorf("versions %v", got)
	}
	if d.Problems.Len() == before {
		t.Error("an absent package is not reported") // transformers and others were not in the answer
	}
}

// warned returns the warnings of a plan for a field.
func warned(t *testing.T, response *planv1.CreatePlanResponse, field string) (found []*planv1.Problem) {
	t.Helper()
	if len(response.GetProblems()) > 0 {
		t.Fatal(response.GetProblems())
	}
	for _, w := range response.GetWarnings() {
		if w.GetField() == field {
			found = append(found, w)
		}
	}
	return found
}

func TestAnUnusualLearningRateIsAWarning(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, "def exact(samples): return [float(s.completion == '2') for s in samples]\n")
	for rate, says := range map[string]string{"1.0": "destroy the model", "0.01": "destroy the model", "1e-10": "hardly change", "6e-3": "", "1e-6": ""} {
		found := warned(t, create(t, s, dir, "train.learning_rate="+rate), "train.learning_rate")
		if (len(found) > 0) != (says != "") || len(found) > 0 && (found[0].GetReason() != "UNUSUAL_VALUE" || !strings.Contains(found[0].GetMessage(), says)) {
			t.Errorf("%s: warnings %v", rate, found)
		}
	}
}

func TestARewardThatNeverDiffersIsAWarning(t *testing.T) {
	t.Parallel()
	s := server(t)
	for text, says := range map[string]string{
		"def exact(samples): return [0.25 for s in samples]\n":                              "the reward is 0.25 for all 2 samples of the dry call: for the reference answer \"2\" of the first row",
		"def exact(samples): return [float(s.completion == '2') for s in samples]\n":        "",
		"def exact(samples): return [-1.0 * len(s.completion) for s in samples]\n":          "",
		"def exact(samples): return [float(s.completion == 'four') + 1 for s in samples]\n": "the reward is 1 for all",
	} {
		dir := project(t, text)
		rows := `{"prompt": "1+1=", "answer": "2"}` + "\n" + `{"prompt": "1+2=", "answer": "3"}` + "\n"
		if err := os.WriteFile(filepath.Join(dir, "train.jsonl"), []byte(rows), 0o644); err != nil {
			t.Fatal(err)
		}
		found := warned(t, create(t, s, dir), "reward.plugin")
		if (len(found) > 0) != (says != "") || len(found) > 0 && (found[0].GetReason() != "CONSTANT_REWARD" || !strings.Contains(found[0].GetMessage(), says)) {
			t.Errorf("%s: warnings %v", text, found)
		}
	}
}
