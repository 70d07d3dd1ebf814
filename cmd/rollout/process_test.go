package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/checkpoint/criu"
)

// A restore runs this program again, as the first process of the restored ones.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "process" {
		os.Exit(criu.Init())
	}
	os.Exit(m.Run())
}

func TestProcessCommandsNameWhatIsWrong(t *testing.T) {
	t.Parallel()
	damaged := t.TempDir()
	if err := os.WriteFile(filepath.Join(damaged, "process.json"), []byte(`{"format": 2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, one := range map[string]struct {
		args []string
		code int
		want string
	}{
		"pid":     {[]string{"dump", "zero", "--to", "x"}, 64, `invalid argument "zero": must be the id of a process`},
		"to":      {[]string{"dump", "1"}, 64, "name the new folder with --to"},
		"missing": {[]string{"restore", t.TempDir()}, 65, "has no process.json"},
		"format":  {[]string{"restore", damaged}, 65, "has format 2; this version reads 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := call{}.run(t, append([]string{"process"}, one.args...)...)
			if got.code != one.code || !strings.Contains(got.text(), one.want) {
				t.Errorf("exit code %d, want %d with %q:\n%s", got.code, one.code, one.want, got.text())
			}
		})
	}
}
