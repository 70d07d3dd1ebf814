package logs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/services/storage"
)

var givenKind = regexp.MustCompile(`\bKind: +"([a-z]+\.?[a-z_]*)", *(?:Level|Step|RunId|Time)|events\.emit\(\s*"([a-z_.]+)"`)

// TestEventKindsAreThoseOfTheSources finds every kind that a service or worker emits.
func TestEventKindsAreThoseOfTheSources(t *testing.T) {
	t.Parallel()
	found := map[string]bool{"log": true} // what telemetry makes of a log record
	for _, root := range []string{"../../../../services", "../../../../libs", "../../../../python/rollout_workers"} {
		if err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || strings.HasSuffix(path, "_test.go") || !slices.Contains([]string{".go", ".py"}, filepath.Ext(path)) {
				return err
			}
			source, err := os.ReadFile(path)
			for _, match := range givenKind.FindAllStringSubmatch(string(source), -1) {
				found[match[1]+match[2]] = true
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if len(found) < 10 {
		t.Fatalf("found %v", found)
	}
	for kind := range found {
		if !storage.Telemetry(kind) && !slices.Contains(eventKinds, kind) {
			t.Errorf("`rollout logs tail --kind %s` would be refused: add it to eventKinds", kind)
		}
	}
}
