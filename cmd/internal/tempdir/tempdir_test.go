package tempdir

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func there(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestUnlockedFoldersAreRemoved(t *testing.T) {
	t.Parallel()
	parent := filepath.Join(t.TempDir(), "a [strange] *name")
	if err := os.Mkdir(parent, 0o700); err != nil {
		t.Fatal(err)
	}
	make := func() *Folder {
		t.Helper()
		f, err := Make(parent, ".infer-")
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	locked, inherited, dead := make(), make(), make()
	child := exec.CommandContext(t.Context(), "cat") // until its stdin ends
	child.ExtraFiles = []*os.File{inherited.Lock()}
	stdin, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	_ = inherited.Lock().Close() // as a kill does
	_ = dead.Lock().Close()
	for name, text := range map[string]string{".infer-notes": "a file", ".infer-other/spec.json": "a folder without a lock", "other/lock": "another's", ".infer-elsewhere/lock": "another-host"} {
		path := filepath.Join(parent, name)
		_ = os.MkdirAll(filepath.Dir(path), 0o700)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	another := make()
	if there(dead.Path) || !there(locked.Path) || !there(inherited.Path) || !there(another.Path) {
		t.Errorf("dead %v, locked %v, inherited %v", there(dead.Path), there(locked.Path), there(inherited.Path))
	}
	for _, name := range []string{".infer-notes", ".infer-other/spec.json", "other/lock", ".infer-elsewhere/lock"} {
		if !there(filepath.Join(parent, name)) {
			t.Errorf("%s is gone", name)
		}
	}
	_ = stdin.Close()
	if err := child.Wait(); err != nil {
		t.Error(err)
	}
	if last := make(); there(inherited.Path) || !there(last.Path) {
		t.Error("what a child locked stays when it has left")
	}
	if err := locked.Remove(); err != nil || there(locked.Path) {
		t.Errorf("%v", err)
	}
}
