package archive_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/archive"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/id"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// store has artifacts by content id.
type store map[string][]byte

func (s store) add(text string) *snapshotv1.SnapshotFile {
	content := id.Content([]byte(text))
	s[content] = []byte(text)
	return &snapshotv1.SnapshotFile{Digest: content, Bytes: uint64(len(text))}
}

func (s store) Artifact(_ context.Context, content string, w io.Writer) error {
	data, ok := s[content]
	if !ok {
		return errors.New("no such artifact")
	}
	_, err := w.Write(data)
	return err
}

func (s store) Put(_ context.Context, _ string, r io.Reader) (string, error) {
	data, err := io.ReadAll(r)
	if err == nil {
		s[id.Content(data)] = data
	}
	return id.Content(data), err
}

// example returns a snapshot with two artifacts, one of which it names twice, and a plan in folder
// `jobs/sum` with a reward in it and data two folders above.
func example(t *testing.T) (*snapshotv1.Snapshot, store) {
	t.Helper()
	artifacts, root := store{}, t.TempDir()
	weights, state, again := artifacts.add("weights"), artifacts.add(strings.Repeat("state ", 500)), artifacts.add("weights")
	weights.Path, state.Path, again.Path = "weights/model.safetensors", "optimizer.bin", "average/model.safetensors"
	plan := &planv1.Plan{}
	for path, text := range map[string]string{"reward.py": "def reward(samples): ...\n", "../../data/train.jsonl": "{}\n"} {
		full := filepath.Join(root, "jobs", "sum", path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		plan.Inputs = append(plan.Inputs, &planv1.Input{Path: path, Digest: id.Content([]byte(text)), Bytes: uint64(len(text))})
	}
	plan.Inputs = append(plan.Inputs, &planv1.Input{Path: "/absolute/eval.jsonl", Digest: id.Content(nil)})
	return &snapshotv1.Snapshot{
		SnapshotId: "snap-1", RunId: "run-1", Step: 3, Files: []*snapshotv1.SnapshotFile{weights, state, again},
		Origin: &snapshotv1.Origin{Plan: plan, BaseDir: filepath.Join(root, "jobs", "sum")},
	}, artifacts
}

func written(t *testing.T, snapshot *snapshotv1.Snapshot, from store, withInputs bool) []byte {
	t.Helper()
	var out bytes.Buffer
	got, err := archive.Write(t.Context(), &out, from, snapshot, withInputs)
	if err != nil {
		t.Fatal(err)
	}
	if withInputs && (got.Artifacts != 2 || got.Inputs != 2 || strings.Join(got.Left, " ") != "/absolute/eval.jsonl") {
		t.Fatalf("written: %+v", got)
	}
	return out.Bytes()
}

func TestAnArchiveIsReadBack(t *testing.T) {
	for _, withInputs := range []bool{true, false} {
		t.Run(fmt.Sprint(withInputs), func(t *testing.T) {
			snapshot, from := example(t)
			before := proto.CloneOf(snapshot)
			data := written(t, snapshot, from, withInputs)
			if !proto.Equal(before, snapshot) {
				t.Fatal("writing changed the snapshot")
			}
			to, folder := store{}, filepath.Join(t.TempDir(), "inputs")
			got, err := archive.Read(t.Context(), "x.tar", bytes.NewReader(data), to, folder)
			if err != nil {
				t.Fatal(err)
			}
			if len(to) != 2 {
				t.Errorf("%d artifacts, want 2", len(to))
			}
			if missing := archive.Missing(got.GetOrigin().GetPlan()); !slices.Equal(missing, []string{"/absolute/eval.jsonl"}) {
				t.Errorf("missing: %q", missing)
			}
			want := proto.CloneOf(snapshot)
			if withInputs {
				want.Origin.BaseDir = filepath.Join(folder, "jobs", "sum")
				for _, in := range got.GetOrigin().GetPlan().GetInputs()[:2] {
					text, err := os.ReadFile(filepath.Join(got.GetOrigin().GetBaseDir(), in.GetPath()))
					if err != nil || id.Content(text) != in.GetDigest() {
						t.Errorf("%s: %q, %v", in.GetPath(), text, err)
					}
				}
			}
			if !proto.Equal(got, want) {
				t.Errorf("got %v\nwant %v", got, want)
			}
		})
	}
}

// TestDamageIsFound cuts an archive off at every byte, and flips each byte of its contents.
func TestDamageIsFound(t *testing.T) {
	snapshot, from := example(t)
	data := written(t, snapshot, from, true)
	end := len(bytes.TrimRight(data, "\x00"))
	read := func(data []byte) error {
		_, err := archive.Read(t.Context(), "x.tar", bytes.NewReader(data), store{}, filepath.Join(t.TempDir(), "inputs"))
		return err
	}
	for size := 0; size < end; size += 7 {
		if err := read(data[:size]); exit.From(err).Code != exit.Data {
			t.Fatalf("cut off after %d of %d bytes: %v", size, end, err)
		}
	}
	for _, word := range []string{"weights", "state state", "def reward", "{}\n"} {
		damaged := bytes.Clone(data)
		at := bytes.LastIndex(damaged, []byte(word))
		damaged[at] ^= 1
		err := read(damaged)
		if exit.From(err).Code != exit.Data || !strings.Contains(err.Error(), "x.tar is damaged at byte") {
			t.Errorf("a flipped bit in %q: %v", word, err)
		}
	}
}

func TestAnotherFileIsRefused(t *testing.T) {
	snapshot, from := example(t)
	outside := proto.CloneOf(snapshot)
	whole := written(t, snapshot, from, true)
	add := func(name string) []byte {
		var out bytes.Buffer
		w, r := tar.NewWriter(&out), tar.NewReader(bytes.NewReader(whole))
		for {
			header, err := r.Next()
			if err != nil {
				break
			}
			if err := w.WriteHeader(header); err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(w, r); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(w.WriteHeader(&tar.Header{Name: name, Size: 1, Mode: 0o644}), w.Close()); err == nil {
			t.Fatal("the entry has a byte")
		}
		return out.Bytes()
	}
	outside.Origin.BaseDir = "../.."
	var relative bytes.Buffer
	if _, err := archive.Write(t.Context(), &relative, from, outside, false); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		data []byte
		want string
	}{
		"text":      {[]byte("hello"), "x.tar is not an exported snapshot"},
		"outside":   {relative.Bytes(), "x.tar is not an exported snapshot"},
		"one more":  {add("inputs/other"), `x.tar has an entry "inputs/other" that its manifest does not name`},
		"traversal": {add("inputs/../../x"), ""},
	} {
		folder := filepath.Join(t.TempDir(), "a", "inputs")
		_, err := archive.Read(t.Context(), "x.tar", bytes.NewReader(c.data), store{}, folder)
		if exit.From(err).Code != exit.Data || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(filepath.Join(filepath.Dir(folder), "..", "x")); err == nil {
			t.Errorf("%s: a file was written outside", name)
		}
	}
}

func TestAChangedInputIsNotExported(t *testing.T) {
	snapshot, from := example(t)
	path := filepath.Join(snapshot.GetOrigin().GetBaseDir(), "reward.py")
	if err := os.WriteFile(path, []byte("def reward(samples):  # \n"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := archive.Write(t.Context(), io.Discard, from, snapshot, true)
	if exit.From(err).Code != exit.Data || !strings.Contains(err.Error(), "reward.py has changed since the run was planned") {
		t.Error(err)
	}
	if _, err := archive.Write(t.Context(), io.Discard, from, snapshot, false); err != nil {
		t.Error(err)
	}
}
