package probe

import (
	"os"
	"path/filepath"
	"testing"
)

// The process runs in the folder of temporary files, where any user may leave a module.
func TestModulesOfTheWorkingFolderAreNotImported(t *testing.T) {
	installed, temporary := t.TempDir(), t.TempDir()
	for path, text := range map[string]string{
		filepath.Join(installed, "rollout", "probe.py"):                       "print('{}')",
		filepath.Join(installed, "rollout_workers", "engines", "registry.py"): "print('{}')",
		filepath.Join(temporary, "rollout.py"):                                "raise SystemExit('planted')",
		filepath.Join(temporary, "rollout_workers", "engines", "registry.py"): "raise SystemExit('planted')",
		filepath.Join(temporary, "rollout_workers", "engines", "__init__.py"): "",
		filepath.Join(temporary, "rollout_workers", "__init__.py"):            "",
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("TMPDIR", temporary)
	p := &Prober{Python: "python3", PythonPath: installed, Env: os.Environ()}
	if _, err := p.Ask(t.Context(), Request{}); err != nil {
		t.Errorf("a probe: %v", err)
	}
	if _, err := p.Engine(t.Context(), "", "transformers"); err != nil {
		t.Errorf("an engine: %v", err)
	}
}
