package plan_test

import (
	"testing"

	"github.com/rollout-rl/rollout/libs/plan"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

func TestInputsAreLocated(t *testing.T) {
	t.Parallel()
	folder := plan.InputsOf("/state")
	for want, in := range map[string]*planv1.Input{
		"/base/data/train.jsonl":                     {Path: "data/train.jsonl"},
		"/data/train.jsonl":                          {Path: "/data/train.jsonl"},
		"/state/inputs/rows/blake3-1.jsonl":          {Path: "openai/gsm8k", Digest: "blake3-1", Sources: []*planv1.Source{{}}},
		"/state/inputs/models/org--m/c0/config.json": {Path: "org/m@main/config.json", Revision: "c0"},
	} {
		if got := folder.Locate("/base", in); got != want {
			t.Errorf("%s is at %s, want %s", in.GetPath(), got, want)
		}
		if got, made := plan.Made(in), in.GetDigest()+in.GetRevision() != ""; got != made {
			t.Errorf("%s: made %v", in.GetPath(), got)
		}
	}
}
