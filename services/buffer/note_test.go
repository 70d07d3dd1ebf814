package buffer_test

import (
	"os"
	"path/filepath"
	"testing"

	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// shelve copies the database files as they are now; what is brought back is the database after a power cut that took what came since.
func (s *bench) shelve() (bringBack func()) {
	s.Helper()
	s.stop()
	files, err := filepath.Glob(filepath.Join(s.folder, "db", "buffer.sqlite*"))
	if err != nil || len(files) == 0 {
		s.Fatalf("%v, %v", files, err)
	}
	kept := map[string][]byte{}
	for _, path := range files {
		data, err := os.ReadFile(path)
		if err != nil {
			s.Fatal(err)
		}
		kept[path] = data
	}
	s.start()
	return func() {
		s.Helper()
		s.stop()
		now, _ := filepath.Glob(filepath.Join(s.folder, "db", "buffer.sqlite*"))
		for _, path := range now {
			if err := os.Remove(path); err != nil {
				s.Fatal(err)
			}
		}
		for path, data := range kept {
			if err := os.WriteFile(path, data, 0o600); err != nil {
				s.Fatal(err)
			}
		}
		s.start()
	}
}

// A power cut takes rows whose payloads are durable: they are made again, in the same order, and each once.
func TestRowsThatAPowerCutTookComeBack(t *testing.T) {
	t.Parallel()
	s := ready(t)
	s.mustPut(groupOf(0, 0, 0)[:2])
	powerCut := s.shelve()
	s.mustPut(groupOf(0, 0, 0)[2:], groupOf(1, 0, 0))
	s.mustPut(groupOf(1, 0, 0)) // twins
	broken := groupOf(2, 0, 0)
	failed(broken[1], trajectoryv1.Outcome_OUTCOME_INFRA_FAILED, "REWARD_TIMEOUT")
	s.mustPut(broken, groupOf(3, 0, 0))
	before := s.export()
	powerCut()
	s.samples(3*size + 1) // of the dissolved group one was taken
	after := s.export()
	if got, want := len(after.GetSamples()), len(before.GetSamples()); got != want || want != 3*size {
		t.Fatalf("%d samples, there were %d", got, want)
	}
	for i, sample := range after.GetSamples() {
		if was := before.GetSamples()[i]; was.GetRef().GetOffset() != sample.GetRef().GetOffset() || sample.GetFlaw() != "" {
			t.Errorf("sample %d was %v and is %v", i, was, sample)
		}
	}
	for i, group := range after.GetGroups() {
		if was := before.GetGroups()[i]; was.GetState() != group.GetState() || was.GetArrival() != group.GetArrival() {
			t.Errorf("group %d was %v and is %v", i, was, group)
		}
	}
	batch := s.lease(1)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size {
		t.Errorf("%d payloads, %v", len(got), err)
	}
	s.commit(batch)
	s.restart() // what was made again is not made twice
	if got := s.export(); len(got.GetSamples()) != 3*size {
		t.Errorf("%d samples", len(got.GetSamples()))
	}
}

// What of an append is torn comes from nowhere: neither its rows nor half of them.
func TestATornNoteIsNone(t *testing.T) {
	t.Parallel()
	s := ready(t)
	s.mustPut(groupOf(0, 0, 0))
	powerCut := s.shelve()
	s.mustPut(groupOf(1, 0, 0))
	s.mustPut(groupOf(2, 0, 0))
	folder := filepath.Join(s.cfg.Segments, run)
	number := uint32(2) // a restarted buffer began another
	whole, err := os.ReadFile(segment.Path(folder, number))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(segment.Path(folder, number), whole[:len(whole)-1], 0o600); err != nil {
		t.Fatal(err)
	}
	powerCut()
	s.samples(2 * size)
	if got := s.export(); len(got.GetSamples()) != 2*size {
		t.Errorf("%d samples", len(got.GetSamples()))
	}
	results := s.mustPut(groupOf(2, 0, 0)) // its producer had no answer
	if results[0].GetAccepted() != size {
		t.Errorf("%v", results)
	}
}
