package evidence_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/evidence"
	"github.com/rollout-rl/rollout/libs/audit"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/id"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

func blake(text string) string {
	h := id.NewHasher()
	_, _ = h.Write([]byte(text))
	return h.ID()
}

func check(t *testing.T, folder string) *audit.Report {
	t.Helper()
	e, err := evidence.Read(t.Context(), evidence.Folder(folder), "audited", true)
	must(t, err)
	defer e.Close()
	return report(t, e)
}

func report(t *testing.T, e *audit.Evidence) *audit.Report {
	t.Helper()
	r, err := audit.Check(e)
	must(t, err)
	return r
}

func TestAnIntactRunPasses(t *testing.T) {
	t.Parallel()
	r := check(t, state(t))
	if !r.Whole {
		t.Fatalf("breaks: %v", r.Breaks)
	}
	if r.Steps != 3 || len(r.Epochs) != 2 || r.Excluded["ATTEMPTS_EXHAUSTED"] != 1 {
		t.Errorf("%+v", r)
	}
	if want := (audit.Epoch{Consumed: 4, Excluded: 1}); r.Epochs[0] != want {
		t.Errorf("first epoch %+v", r.Epochs[0])
	}
	if want := (audit.Epoch{Epoch: 1, Consumed: 1, InFlight: 2}); r.Epochs[1] != want {
		t.Errorf("second epoch %+v", r.Epochs[1])
	}
	if want := (audit.Samples{Trained: 15, Verified: 9, Covered: 6, Tokens: 36, Receipts: 9}); r.Samples != want {
		t.Errorf("samples %+v", r.Samples)
	}
	if r.Published.Whole != 2 || r.Published.Bytes != 28 {
		t.Errorf("published %+v", r.Published)
	}
	if r.Segments.Whole != 2 || r.Segments.Covered != 1 {
		t.Errorf("segments %+v", r.Segments)
	}
}

// Each corruption is reported with its kind and its place.
func TestCorruptionsAreNamed(t *testing.T) {
	t.Parallel()
	whole := state(t)
	for _, c := range []struct {
		name  string
		spoil spoil
		want  string // kind
		where audit.Break
	}{
		{"lost group", do("buffer", `DELETE FROM prompt_group WHERE position = 1`), "GROUP_MISSING", audit.Break{Group: "0/1"}},
		{"lost sample", do("buffer", `DELETE FROM sample WHERE position = 4 AND sample = 1`), "SAMPLES_MISSING", audit.Break{Group: "0/4", Step: 3}},
		{"wrong number of samples", do("buffer", `UPDATE prompt_group SET samples = 9 WHERE position = 2`), "SAMPLE_COUNT", audit.Break{Group: "0/2", Step: 2}},
		{"doubled consumption", do("buffer", `UPDATE sample SET byte_offset = (SELECT byte_offset FROM sample WHERE position = 4 AND sample = 0),
			crc32c = (SELECT crc32c FROM sample WHERE position = 4 AND sample = 0) WHERE position = 5 AND sample = 2`), "PAYLOAD_SHARED", audit.Break{Group: "1/0", Step: 3, Segment: 3}},
		{"foreign payload", do("buffer", `UPDATE sample SET byte_offset = (SELECT byte_offset FROM sample WHERE position = 4 AND sample = 0),
			byte_length = (SELECT byte_length FROM sample WHERE position = 4 AND sample = 0), crc32c = (SELECT crc32c FROM sample WHERE position = 4 AND sample = 0) WHERE position = 5 AND sample = 2`), "PAYLOAD_FOREIGN", audit.Break{Group: "1/0", Step: 3, Segment: 3}},
		{"group consumed by another step", do("buffer", `UPDATE prompt_group SET step = 3 WHERE position = 2`), "WRONG_STEP", audit.Break{Group: "0/2", Step: 3}},
		{"group taken from its step", do("buffer", `UPDATE prompt_group SET step = 3 WHERE position = 2`), "BATCH_CHANGED", audit.Break{Step: 2}},
		{"group set back", do("buffer", `UPDATE prompt_group SET state = 2, step = 0 WHERE position = 0`), "NOT_CONSUMED", audit.Break{Group: "0/0"}},
		{"swapped digest", do("buffer", `UPDATE step SET weights_digest = ? WHERE step = 2`, digest(9)), "CHAIN_BROKEN", audit.Break{Step: 2}},
		{"swapped digest, links made again", func(t *testing.T, folder string) {
			do("buffer", `UPDATE step SET weights_digest = ? WHERE step = 2`, digest(9))(t, folder)
			chained(t, folder)
		}, "WEIGHTS_SWAPPED", audit.Break{Step: 2}},
		{"swapped digest, links and record made again", func(t *testing.T, folder string) {
			do("buffer", `UPDATE step SET weights_digest = ? WHERE step = 2`, digest(9))(t, folder)
			do("buffer", `UPDATE weights SET digest = ? WHERE version = 2`, digest(9))(t, folder)
			chained(t, folder)
		}, "RECEIPT_MISMATCH", audit.Break{Step: 3, Group: "0/4", Segment: 3}},
		{"step gap", do("buffer", `DELETE FROM step WHERE step = 2`), "STEP_GAP", audit.Break{Step: 2}},
		{"lost last step", do("buffer", `DELETE FROM step WHERE step = 3`), "LEDGER_HEAD", audit.Break{Step: 2}},
		{"ledger set back", do("buffer", `UPDATE ledger SET step = 2`), "RUN_AHEAD", audit.Break{Step: 2}},
		{"lost weights", do("buffer", `DELETE FROM weights WHERE version = 1`), "WEIGHTS_MISSING", audit.Break{Step: 1}},
		{"receipt of unknown weights", do("buffer", `UPDATE sample SET receipt_version = 77 WHERE position = 5 AND sample = 0`), "RECEIPT_UNKNOWN", audit.Break{Group: "1/0", Step: 3, Segment: 3}},
		{"wrong receipt", do("buffer", `UPDATE sample SET receipt_digest = ? WHERE position = 5 AND sample = 0`, digest(9)), "RECEIPT_MISMATCH", audit.Break{Group: "1/0", Step: 3, Segment: 3}},
		{"receipt of later weights", do("buffer", `UPDATE sample SET receipt_version = 3 WHERE position = 2`), "RECEIPT_FROM_LATER", audit.Break{Group: "0/2", Step: 2, Segment: 2}},
		{"stale sample", do("buffer", `UPDATE sample SET min_version = 0 WHERE position = 4`), "STALE", audit.Break{Group: "0/4", Step: 3, Segment: 3}},
		{"exclusion without reason", do("buffer", `UPDATE prompt_group SET reason = '' WHERE position = 3`), "EXCLUDED_WITHOUT_REASON", audit.Break{Group: "0/3", Step: 2}},
		{"exclusion not counted", do("buffer", `UPDATE step SET excluded_count = 0 WHERE step = 2`), "STEP_COUNTS", audit.Break{Step: 2}},
		{"orphan sample", do("buffer", `UPDATE sample SET position = 8 WHERE position = 6`), "SAMPLE_WITHOUT_GROUP", audit.Break{Group: "1/3", Segment: 3}},
		{"ledger miscounts", do("buffer", `UPDATE ledger SET consumed = 6`), "LEDGER_COUNTS", audit.Break{}},
		{"aborted sample trained", do("buffer", `UPDATE sample SET outcome = 3 WHERE position = 4 AND sample = 0`), "UNTRAINABLE", audit.Break{Group: "0/4", Step: 3, Segment: 3}},
		{"missing segment", func(t *testing.T, folder string) {
			must(t, os.Remove(segment.Path(filepath.Join(folder, "segments", run), 3)))
		}, "SEGMENT_MISSING", audit.Break{Segment: 3}},
		{"truncated segment", edit(3, func(b []byte) []byte { return b[:len(b)-5] }), "SEGMENT_SHORT", audit.Break{Segment: 3}},
		{"bit flip in a payload", edit(3, func(b []byte) []byte { b[40] ^= 1; return b }), "PAYLOAD_DAMAGED", audit.Break{Group: "0/4", Step: 3, Segment: 3}},
		{"bit flip in a segment", edit(3, func(b []byte) []byte { b[40] ^= 1; return b }), "SEGMENT_DAMAGED", audit.Break{Segment: 3}},
		{"segment without its head", edit(2, func(b []byte) []byte { b[0] = 'X'; return b }), "SEGMENT_DAMAGED", audit.Break{Segment: 2}},
		{"cursor beyond", do("scheduler", `UPDATE cursor SET position = 9`), "CURSOR_BEYOND", audit.Break{Group: "1/3"}},
		{"state without its files", func(t *testing.T, folder string) {
			must(t, os.RemoveAll(filepath.Join(folder, "artifacts")))
		}, "SNAPSHOT_MISSING", audit.Break{Step: 1}},
		{"bit flip in a file of a state", func(t *testing.T, folder string) {
			file, err := filepath.Glob(filepath.Join(folder, "artifacts", "cas", "*", "*"))
			must(t, err)
			data, err := os.ReadFile(file[0])
			must(t, err)
			data[len(data)/2] ^= 1
			must(t, os.Chmod(file[0], 0o600))
			must(t, os.WriteFile(file[0], data, 0o600))
		}, "SNAPSHOT_CORRUPT", audit.Break{Step: 1}},
		{"edited file of the weights", func(t *testing.T, folder string) {
			must(t, os.WriteFile(filepath.Join(published(folder), "config.json"), []byte("config.jsoN"), 0o600))
		}, "WEIGHTS_FILE_CHANGED", audit.Break{Step: 3}},
		{"cut off file of the weights", func(t *testing.T, folder string) {
			must(t, os.Truncate(filepath.Join(published(folder), "model.safetensors"), 3))
		}, "WEIGHTS_FILE_CHANGED", audit.Break{Step: 3}},
		{"missing file of the weights", func(t *testing.T, folder string) {
			must(t, os.Remove(filepath.Join(published(folder), "model.safetensors")))
		}, "WEIGHTS_FILE_MISSING", audit.Break{Step: 3}},
		{"edited manifest of the weights", func(t *testing.T, folder string) {
			must(t, os.WriteFile(filepath.Join(published(folder), "rollout_weights.json"), []byte("{"), 0o600))
		}, "WEIGHTS_FILE_CHANGED", audit.Break{Step: 3}},
		{"cursor behind", do("scheduler", `UPDATE cursor SET position = 6`), "CURSOR_BEHIND", audit.Break{Group: "1/1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			folder := t.TempDir()
			for _, part := range []string{"db", "segments", "artifacts", "runs"} {
				must(t, os.CopyFS(filepath.Join(folder, part), os.DirFS(filepath.Join(whole, part))))
			}
			c.spoil(t, folder)
			r := check(t, folder)
			var reported []string
			for _, b := range r.Breaks {
				reported = append(reported, b.Kind+" "+b.Message)
				if b.Kind == c.want && b.Run == run && b.Group == c.where.Group && b.Step == c.where.Step && b.Segment == c.where.Segment {
					if payload := b.Segment > 0 && b.Group != ""; payload && (b.Offset == nil || b.Sample == nil) {
						t.Errorf("no offset or sample: %+v", b)
					}
					return
				}
			}
			t.Errorf("no %s at %+v; reported was\n%s", c.want, c.where, strings.Join(reported, "\n"))
		})
	}
}

// The databases refuse two rows for one prompt; an export with two rows is reported.
func TestAPromptConsumedTwice(t *testing.T) {
	t.Parallel()
	evidence, err := evidence.Read(t.Context(), evidence.Folder(state(t)), run, true)
	must(t, err)
	defer evidence.Close()
	again := &bufferv1.ExportLedgerResponse{}
	must(t, evidence.Rows.Prompts(func(p *audit.Prompt) error {
		if p.Position == 0 {
			again.Groups = p.Groups
		}
		return nil
	}))
	must(t, evidence.Add(again))
	r := report(t, evidence)
	for _, b := range r.Breaks {
		if b.Kind == "GROUP_TWICE" && b.Group == "0/0" && b.Step == 1 {
			return
		}
	}
	t.Errorf("%+v", r.Breaks)
}

// With preference pairs a group has two samples, whatever `sampling.group_size` is.
func TestTheLedgerIsOfThePlan(t *testing.T) {
	t.Parallel()
	evidence, err := evidence.Read(t.Context(), evidence.Folder(state(t)), run, true)
	must(t, err)
	defer evidence.Close()
	config := evidence.Run.GetPlan().GetConfig()
	config.Sampling.GroupSize = proto.Uint32(1)
	foreign := func() bool {
		return slices.ContainsFunc(report(t, evidence).Breaks, func(b audit.Break) bool { return b.Kind == "LEDGER_CONFIG" })
	}
	if !foreign() {
		t.Error("a ledger of 3 samples a group passed for a plan of 1")
	}
	config.Algorithm = &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Dpo{Dpo: &configv1.DpoConfig{}}}
	if !foreign() {
		t.Error("a ledger of 3 samples a group passed for pairs")
	}
	evidence.Ledger.Config.GroupSize = 2
	if foreign() {
		t.Error("a ledger of pairs was refused")
	}
}

func TestARunWithoutALedger(t *testing.T) {
	t.Parallel()
	folder := state(t)
	do("buffer", `UPDATE ledger SET run = 'another'`)(t, folder)
	if r := check(t, folder); len(r.Breaks) != 1 || r.Breaks[0].Kind != "LEDGER_MISSING" {
		t.Errorf("%+v", r.Breaks)
	}
	evidence, err := evidence.Read(t.Context(), evidence.Folder(folder), run, true)
	must(t, err)
	defer evidence.Close()
	evidence.Run.Step = 0
	if r := report(t, evidence); !r.Whole { // it has not begun
		t.Errorf("%+v", r.Breaks)
	}
}

// Another program can open a ledger and send samples without the scheduler: what is there is
// checked, and the checks that need a run are listed.
func TestALedgerWithoutARun(t *testing.T) {
	t.Parallel()
	folder := state(t)
	do("scheduler", `DELETE FROM cursor`)(t, folder)
	do("scheduler", `DELETE FROM run`)(t, folder)
	read := func() *audit.Report {
		e, err := evidence.Read(t.Context(), evidence.Folder(folder), run, true)
		must(t, err)
		defer e.Close()
		return report(t, e)
	}
	r := read()
	if !r.Whole || r.RunID != run || r.State != "" || r.Steps != 3 {
		t.Fatalf("%+v", r)
	}
	if want := (audit.Samples{Trained: 15, Verified: 9, Covered: 6, Tokens: 36, Receipts: 9}); r.Samples != want {
		t.Errorf("samples %+v", r.Samples)
	}
	if want := []audit.Epoch{{Consumed: 4, Excluded: 1}, {Epoch: 1, Consumed: 1, InFlight: 1}}; !slices.Equal(r.Epochs, want) {
		t.Errorf("epochs %+v", r.Epochs)
	}
	var skipped []string
	for _, s := range r.Skipped {
		skipped = append(skipped, s.Check)
	}
	if want := []string{"plan", "cursor", "run", "snapshots"}; !slices.Equal(skipped, want) {
		t.Errorf("skipped %v", skipped)
	}
	if _, err := evidence.Read(t.Context(), evidence.Folder(folder), "run-none", true); exit.From(err).Code != exit.NoInput {
		t.Errorf("neither a run nor a ledger: %v", err)
	}
	edit(2, func(data []byte) []byte { data[len(data)-1] ^= 1; return data })(t, folder)
	if r := read(); r.Whole {
		t.Error("a damaged payload passed")
	}
}

func TestNothingToRead(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	_, err := evidence.Read(t.Context(), evidence.Folder(folder), "audited", true)
	if e := exit.From(err); e.Code != exit.NoInput || e.Fix == "" {
		t.Errorf("%v", err)
	}
	if left, _ := os.ReadDir(folder); len(left) > 0 {
		t.Errorf("made %v", left)
	}
}
