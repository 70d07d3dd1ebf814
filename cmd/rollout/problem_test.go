package main

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/services/planner"
)

// python is the interpreter of the checkout's environment, else the system's.
func python(t *testing.T) string {
	t.Helper()
	if path, err := filepath.Abs("../../.venv/bin/python"); err == nil {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Fatal("no Python: run `make venv`")
	}
	return path
}

// realPlanner is a plane with the planner of production.
func realPlanner(t *testing.T) *plane {
	t.Helper()
	source, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	server, err := planner.New(planner.Config{Python: python(t), PythonPath: source, Env: os.Environ()})
	if err != nil {
		t.Fatal(err)
	}
	return newPlane(t, server)
}

// project makes a folder with a configuration that has no problem, its data, reward and model.
func project(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("testdata/problem/_base")); err != nil {
		t.Fatal(err)
	}
	header := `{"embedding":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`
	weights := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	write(t, filepath.Join(dir, "model/model.safetensors"), string(weights)+"01234567")
	return dir
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// overlay applies a case to the project: its files replace files; each line `old => new` of the
// file `edit` is a replacement in run.toml; each line of the file `remove` names a file to delete.
func overlay(t *testing.T, dir, fixture string) {
	t.Helper()
	if err := filepath.WalkDir(fixture, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(fixture, path)
		switch rel {
		case "want.txt":
		case "edit":
			config := read(t, filepath.Join(dir, "run.toml"))
			for line := range strings.Lines(read(t, path)) {
				before, after, _ := strings.Cut(strings.TrimRight(line, "\n"), " => ")
				if !strings.Contains(config, before) {
					t.Fatalf("%s: the configuration has no %q", path, before)
				}
				config = strings.Replace(config, before, strings.ReplaceAll(after, `\n`, "\n"), 1)
			}
			write(t, filepath.Join(dir, "run.toml"), config)
		case "remove":
			for name := range strings.Lines(read(t, path)) {
				if err := os.RemoveAll(filepath.Join(dir, strings.TrimSpace(name))); err != nil {
					t.Fatal(err)
				}
			}
		default:
			write(t, filepath.Join(dir, rel), read(t, path))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// anonymous replaces the parts of a text that differ between machines.
func anonymous(text, dir string) string {
	text = strings.ReplaceAll(text, dir+"/", "")
	text = strings.ReplaceAll(text, dir, "$DIR")
	text = regexp.MustCompile(`blake3-[0-9a-f]+`).ReplaceAllString(text, "blake3-$$HEX")
	text = regexp.MustCompile(`but \S+ is installed`).ReplaceAllString(text, "but $$VERSION is installed")
	text = regexp.MustCompile(`workers' Python \(\S+\)`).ReplaceAllString(text, "workers' Python ($$PYTHON)")
	return text
}

// TestProblems compares the output for each broken configuration, dataset, reward, and model with a
// golden file. Cases that begin with `config` are validated only; the others are planned, which
// loads their inputs.
func TestProblems(t *testing.T) {
	t.Parallel()
	cases, err := filepath.Glob("testdata/problem/[a-z]*")
	if err != nil || len(cases) < 30 {
		t.Fatalf("%d cases, %v", len(cases), err)
	}
	plane := realPlanner(t)
	for _, fixture := range cases {
		name := filepath.Base(fixture)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := project(t)
			overlay(t, dir, fixture)
			command, want := "plan", filepath.Join(fixture, "want.txt")
			if strings.HasPrefix(name, "config") {
				command = "validate"
			}
			got := execute(t, plane, command, "--server", "here", "--config", filepath.Join(dir, "run.toml"))
			if got.code == 0 {
				t.Errorf("nothing is wrong: %s", got.stdout)
			}
			if _, err := os.Stat(filepath.Join(dir, "plan.lock")); err == nil {
				t.Error("a plan was written all the same")
			}
			golden(t, want, anonymous(got.text(), dir))
		})
	}
}

func execute(t *testing.T, plane *plane, args ...string) result {
	t.Helper()
	return call{plane: plane}.run(t, args...)
}
