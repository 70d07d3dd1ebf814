package planner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A prompt that the vocabulary has not in full is no mistake, but nobody should have to find it out by training.
func TestPromptsThatTheTokenizerDoesNotKnowAreWarnedOf(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, "def exact(samples):\n    return [1.0] * len(samples)\n")
	if got := create(t, s, dir); len(got.GetWarnings()) != 0 || got.GetPlan() == nil {
		t.Fatalf("%v", got)
	}
	rows := `{"prompt": "1+1="}` + "\n" + `{"prompt": "1+é="}` + "\n" + `{"prompt": "1+x="}` + "\n"
	if err := os.WriteFile(filepath.Join(dir, "train.jsonl"), []byte(rows), 0o644); err != nil {
		t.Fatal(err)
	}
	got := create(t, s, dir)
	if got.GetPlan() == nil || len(got.GetProblems()) != 0 || len(got.GetWarnings()) != 1 {
		t.Fatalf("%v", got)
	}
	w := got.GetWarnings()[0]
	if w.GetFile() != "train.jsonl" || w.GetLine() != 2 || !strings.Contains(w.GetMessage(), `"é"`) || !strings.Contains(w.GetMessage(), "2 rows") {
		t.Errorf("%v", w)
	}
}
