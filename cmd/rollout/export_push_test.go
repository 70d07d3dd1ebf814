package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	storagestore "github.com/rollout-rl/rollout/services/storage/sqlstore"
)

// uploader is a worker that keeps its spec and the folder that it would upload.
func uploader(t *testing.T, answer, code string) (command, kept string) {
	t.Helper()
	dir := t.TempDir()
	command, kept = filepath.Join(dir, "worker"), filepath.Join(dir, "kept")
	script := `#!/bin/sh
mkdir -p ` + kept + `
cp "$3" ` + kept + `/spec.json
cp -r "$(sed 's/.*"folder":"\([^"]*\)".*/\1/' "$3")" ` + kept + `
echo a library prints
cat <<'END'
` + answer + `
END
echo its last words >&2
exit ` + code + "\n"
	if err := os.WriteFile(command, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return command, kept
}

const uploaded = `{"event": "end", "commit": "abc123", "url": "https://hub/me/sums/commit/abc123"}`

func TestExportPush(t *testing.T) {
	t.Parallel()
	state := stored(t)
	if _, err := sqldbtest.Store(t, sqldb.Files(filepath.Join(state, "db")), storagestore.Open).Append(t.Context(), story()); err != nil {
		t.Fatal(err)
	}
	worker, kept := uploader(t, uploaded, "0")
	push := func(args ...string) result {
		return call{}.run(t, append([]string{"export", "push", "--state-dir", state, "--worker", worker}, args...)...)
	}
	var spec struct {
		Folder, Repository, Revision, Message string
		Private                               bool
	}
	got := push("addition-grpo", "me/sums")
	golden(t, "testdata/command/export-push.txt", strings.ReplaceAll(got.text(), state, "STATE"))
	golden(t, "testdata/command/export-push.card.md", read(t, filepath.Join(kept, "model/README.md")))
	if err := json.Unmarshal([]byte(read(t, filepath.Join(kept, "spec.json"))), &spec); err != nil {
		t.Fatal(err)
	}
	if spec.Repository != "me/sums" || spec.Revision != "" || !spec.Private || spec.Message != "weights of step 3 of "+runID {
		t.Errorf("%+v", spec)
	}
	if text := read(t, filepath.Join(kept, "model/model.safetensors")); text != "weights/model.safetensors of step 3" {
		t.Error(text)
	}
	if _, err := os.Stat(spec.Folder); !os.IsNotExist(err) {
		t.Errorf("the folder was left: %v", err)
	}
	if err := os.RemoveAll(kept); err != nil {
		t.Fatal(err)
	}
	got = push("snap-earl", "me/sums", "--adapter", "--public", "--revision", "v2", "--message", "mine", "--format", "json")
	golden(t, "testdata/command/export-push.json", got.text())
	if err := json.Unmarshal([]byte(read(t, filepath.Join(kept, "spec.json"))), &spec); err != nil {
		t.Fatal(err)
	}
	if spec.Revision != "v2" || spec.Private || spec.Message != "mine" {
		t.Errorf("%+v", spec)
	}
	card := read(t, filepath.Join(kept, "model/README.md"))
	if !strings.Contains(card, "library_name: peft\n") || strings.Contains(card, "at step 3") {
		t.Errorf("the card of the adapter of step 2:\n%s", card)
	}
}

func TestExportPushRefuses(t *testing.T) {
	t.Parallel()
	state := stored(t)
	for text, c := range map[string]struct {
		args, answer, exit string
		env                map[string]string
		code               int
	}{
		"a token for the hub is missing": {
			"addition-grpo me/sums", `{"event":"error","code":66,"reason":"HUB_NO_TOKEN","message":"a token for the hub is missing","fix":"run hf auth login"}`, "66", nil, 66,
		},
		"its last words":             {"addition-grpo me/sums", "", "1", nil, 70},
		"has no average":             {"addition-grpo me/sums --average", "", "0", nil, 65},
		"forbids calls of the hub":   {"addition-grpo me/sums", uploaded, "0", map[string]string{"HF_HUB_OFFLINE": "1"}, 69},
		"was called with 1 argument": {"addition-grpo", "", "0", nil, 64},
		`run "unknown" does not`:     {"unknown me/sums", "", "0", nil, 66},
	} {
		worker, _ := uploader(t, c.answer, c.exit)
		got := call{env: c.env}.run(t, append([]string{"export", "push", "--state-dir", state, "--worker", worker}, strings.Fields(c.args)...)...)
		if got.code != c.code || !strings.Contains(got.stderr, text) {
			t.Errorf("%s: %s", text, got.text())
		}
	}
}
