package planner

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

const examples = "../../examples"

// Every example config has no problem that its text alone reveals.
func TestExamplesAreValid(t *testing.T) {
	t.Parallel()
	s, found, sinks := server(t), 0, 0
	err := filepath.WalkDir(examples, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".toml" {
			return err
		}
		if manifest, err := filepath.Match(filepath.Join(examples, "plugins", "*", "*.toml"), path); manifest || err != nil {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		reading := s.reader.Read(&planv1.ConfigSource{Toml: text, File: path, BaseDir: filepath.Dir(path)})
		for _, p := range reading.Sorted() {
			if filepath.Base(path) == "suites.toml" && !strings.HasPrefix(p.GetField(), "eval.") && strings.Contains("MISSING_KEY CONFLICT", p.GetReason()) {
				continue // only a run needs it
			}
			t.Errorf("%s:%d: %s", path, p.GetLine(), p.GetMessage())
		}
		if reading.Config.GetSinks() != nil {
			sinks++
		}
		found++
		return nil
	})
	if err != nil || found < 10 || sinks == 0 {
		t.Errorf("%d examples, %d with sinks: %v", found, sinks, err)
	}
}

// The example with trackers is planned in full, on a small model and a row, in an environment that
// has their libraries.
func TestExampleWithTrackersIsPlanned(t *testing.T) {
	t.Parallel()
	dir := project(t, "")
	path, err := filepath.Abs(filepath.Join(examples, "addition", "tracked.toml"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(dir, "train.jsonl")
	planned, err := server(t).CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{
		Toml: text, File: path, BaseDir: filepath.Dir(path),
		Set: []string{"model.path=" + quoted(filepath.Join(dir, "model")), "data.train=" + quoted(data), "data.eval=" + quoted(data)},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range planned.GetProblems() {
		if p.GetReason() != "PACKAGE_MISSING" { // trackers' libraries are extras: TestMissingTrackerLibraryNamesItsExtra
			t.Error(p)
		}
	}
	text = []byte(strings.ReplaceAll(string(text), "[sinks.", "[skins."))
	if problems := server(t).reader.Read(&planv1.ConfigSource{Toml: text, File: path}).Sorted(); len(problems) == 0 {
		t.Error("unknown tables are accepted")
	}
}

func quoted(path string) string { return `"` + path + `"` }
