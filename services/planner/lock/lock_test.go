package lock

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	planformat "github.com/rollout-rl/rollout/libs/plan"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/problem"
	"google.golang.org/protobuf/proto"
)

func plan() *planv1.Plan {
	digest := "blake3-" + strings.Repeat("0f", 32)
	return &planv1.Plan{
		Format: planformat.Format,
		Config: &configv1.RunConfig{
			Name: proto.String("a"), Seed: proto.Uint64(1<<53 - 1), Model: &configv1.ModelConfig{Path: proto.String("m")},
			Data:      &configv1.DataConfig{Train: proto.String("d")},
			Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Sft{Sft: &configv1.SftConfig{}}},
			Train:     &configv1.TrainConfig{Steps: proto.Uint64(3)}, Sampling: &configv1.SamplingConfig{GroupSize: proto.Uint32(1)},
			Engine: &configv1.EngineConfig{MaxModelLen: proto.Uint32(64)},
		},
		Inputs:   []*planv1.Input{{Role: planv1.InputRole_INPUT_ROLE_TRAIN_DATA, Path: "d", Digest: digest, Bytes: 1 << 60, Rows: 3}},
		Packages: map[string]string{"z": "1", "a": "2"},
	}
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	data, err := Write(plan())
	if err != nil {
		t.Fatal(err)
	}
	again, err := Write(plan())
	if err != nil || !bytes.Equal(data, again) {
		t.Errorf("the same plan gave other bytes: %v\n%s\n%s", err, data, again)
	}
	if !bytes.Contains(data, []byte("\"bytes\": \"1152921504606846976\"")) {
		t.Errorf("64-bit integers are strings:\n%s", data)
	}
	got, problems := Read(data, "plan.lock")
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	if want := plan(); got.GetPlanId() == "" || !proto.Equal(got.GetConfig(), want.GetConfig()) {
		t.Errorf("read %v", got)
	}
}

func TestWhiteSpaceIsNoChange(t *testing.T) {
	t.Parallel()
	data, err := Write(plan())
	if err != nil {
		t.Fatal(err)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, data); err != nil {
		t.Fatal(err)
	}
	if _, problems := Read(compact.Bytes(), "plan.lock"); len(problems) > 0 {
		t.Error(problems)
	}
}

func TestAnyChangeOfContentIsSeen(t *testing.T) {
	t.Parallel()
	data, err := Write(plan())
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range [][2]string{{`"steps": "3"`, `"steps": "4"`}, {`"z": "1"`, `"z": "2"`}, {"0f0f", "0f0e"}, {`"bytes": "1152921504606846976",`, ""}, {`"rows": "3"`, `"rows": "2"`}} {
		changed := bytes.Replace(data, []byte(change[0]), []byte(change[1]), 1)
		if bytes.Equal(changed, data) {
			t.Fatalf("the plan has no %s", change[0])
		}
		if got, problems := Read(changed, "plan.lock"); got != nil || len(problems) == 0 {
			t.Errorf("%s became %s unseen", change[0], change[1])
		}
	}
}

func TestAConfigIsNoPlan(t *testing.T) {
	t.Parallel()
	_, problems := Read([]byte("name = \"a\"\n"), "a.toml")
	if len(problems) != 1 || !strings.Contains(problems[0].GetFix(), "--config") {
		t.Errorf("%v", problems)
	}
}

func TestPlansOfAnotherFormatAreRefused(t *testing.T) {
	t.Parallel()
	if rule := fmt.Sprint((&planv1.Plan{}).ProtoReflect().Descriptor().Fields().ByName("format").Options()); !strings.Contains(rule, fmt.Sprintf("const:%d", planformat.Format)) {
		t.Errorf("the contract has another format: %s", rule)
	}
	for _, format := range []int{1, planformat.Format + 1} {
		data := fmt.Sprintf(`{"format": %d, "config": {"algorithm": {"grpo": {"clip_low": 0.2}}}}`, format)
		got, problems := Read([]byte(data), "plan.lock")
		if got != nil || len(problems) != 1 || problems[0].GetReason() != problem.PlanFormat || !strings.Contains(problems[0].GetFix(), "`rollout plan`") {
			t.Errorf("format %d: %v, %v", format, got, problems)
		}
	}
}
