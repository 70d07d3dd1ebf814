package audit

import (
	"slices"

	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// snapshotCheck checks the run's snapshots and their files.
type snapshotCheck struct {
	*index
	*findings
}

// records compares training states with the steps that they were taken after.
func (c snapshotCheck) records() {
	for _, s := range c.Snapshots {
		if s.GetKind() != snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE || s.GetRunId() != c.report.RunID {
			continue
		}
		at, step := Break{Step: s.GetStep()}, c.named[s.GetStep()]
		switch {
		case step.GetChain() == "":
			c.add(at, "SNAPSHOT_AHEAD", "snapshot %s is of step %d, which is not in the ledger", s.GetSnapshotId(), s.GetStep())
		case step.GetWeightsDigest() != s.GetWeightsDigest() && !c.recorded(s.GetStep(), s.GetWeightsDigest()) && c.Run.GetPlan().GetConfig().GetDeterministic():
			c.add(at, "SNAPSHOT_DIGEST", "snapshot %s holds %s; step %d made %s", s.GetSnapshotId(), s.GetWeightsDigest(), s.GetStep(), step.GetWeightsDigest())
		}
		p := step.GetEndPosition()
		if p == 0 { // a record from before steps had an end position
			p = s.GetStep() * uint64(c.config.GetGroupsPerStep())
		}
		if s.GetCursor().GetPosition() != p {
			c.add(at, "SNAPSHOT_CURSOR", "snapshot %s would continue at position %d; step %d ends at %d", s.GetSnapshotId(), s.GetCursor().GetPosition(), s.GetStep(), p)
		}
	}
}

// files checks that all snapshot files exist with their content: a recovery reads them, and
// payloads that they cover have been deleted.
func (c snapshotCheck) files() {
	c.report.Files = c.Files
	for _, s := range c.Snapshots {
		if s.GetRunId() != c.report.RunID {
			continue
		}
		for _, f := range s.GetFiles() {
			switch at := (Break{Step: s.GetStep()}); {
			case slices.Contains(c.Missing, f.GetDigest()):
				c.add(at, "SNAPSHOT_MISSING", "file %s of snapshot %s does not exist: %s", f.GetPath(), s.GetSnapshotId(), f.GetDigest())
			case slices.Contains(c.Corrupt, f.GetDigest()):
				c.add(at, "SNAPSHOT_CORRUPT", "file %s of snapshot %s has other content than %s", f.GetPath(), s.GetSnapshotId(), f.GetDigest())
			}
		}
	}
}
