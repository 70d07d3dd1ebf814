package plan_test

import (
	"os"
	"path/filepath"
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

func TestNamesOnTheHub(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "data"), 0o700); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{
		"openai/gsm8k": true, "openai/gsm8k@e53f048": true, "Qwen/Qwen2.5-0.5B": true, "data/gsm8k": false, "other/train.jsonl": false,
		"other/a.parquet": false, "../org/name": false, "name": false, "a/b/c": false, "": false,
	} {
		if plan.OnHub(dir, path) != want {
			t.Errorf("%s: %v", path, !want)
		}
	}
}
