package buffer

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rollout-rl/rollout/libs/sqldb"
)

func TestASlowIngestAndAFailingOneAreWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newLiveState()
		s.BeginIngest()
		if w := s.ingestWait(); w != nil {
			t.Errorf("it has just begun: %v", w)
		}
		<-time.After(2 * slowIngest)
		if w := s.ingestWait(); w.GetReason() != "INGEST_FAILS" || w.GetFix() == "" {
			t.Errorf("a slow one: %v", w)
		}
		s.EndIngest(sqldb.ErrLocked.Wrap(errors.New("database is locked")))
		want := "the buffer to write the samples that have arrived, which fails: another process has locked the database for ten seconds: database is locked"
		if w := s.ingestWait(); w.GetEvidence() != want || w.GetFix() == "" {
			t.Errorf("a failing one: %v", w)
		}
		s.BeginIngest()
		s.EndIngest(nil)
		if w := s.ingestWait(); w != nil {
			t.Errorf("it succeeded: %v", w)
		}
	})
}
