// Package snapshot owns snapshot manifests: what a run needs to go on, named by content.
//
// The bytes are artifacts of the storage service; a manifest names them by digest, so two snapshots share what did not change.
//
//	(absent) --CreateSnapshot--> recorded --DeleteSnapshot, or newer ones beyond `keep`--> gone
//
// An artifact is deleted when no manifest names it any more. A crash between an import and its manifest, or between a manifest's
// end and the deletion of its files, leaves candidates in the store; the next sweep (at start, after each deletion) removes them.
package snapshot

import (
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Snapshot is a manifest. The contract's message is the noun of every layer.
type Snapshot = snapshotv1.Snapshot

// TrainState is the kind that a run can be restored from.
const TrainState = snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE

// Errors of this service.
var (
	ErrNotFound  = rpcerr.New(codes.NotFound, "SNAPSHOT_NOT_FOUND", "there is no such snapshot").Fix("`rollout snapshot list` shows those there are")
	ErrAmbiguous = rpcerr.New(codes.FailedPrecondition, "SNAPSHOT_AMBIGUOUS", "several snapshots begin like that").
			Fix("give more of the id; `rollout snapshot list` shows them")
	ErrInvalid  = rpcerr.New(codes.InvalidArgument, "SNAPSHOT_INVALID", "the snapshot's manifest is not usable")
	ErrMismatch = rpcerr.New(codes.DataLoss, "SNAPSHOT_FILE_MISMATCH", "a file of the snapshot is not what its manifest says")
	ErrKind     = rpcerr.New(codes.FailedPrecondition, "SNAPSHOT_NOT_RESTORABLE", "only train_state snapshots can be restored").
			Fix("`rollout snapshot list` shows the kind of each")
)

const prefix = "snap-"

// newID makes a snapshot id. Ids sort by the millisecond they were made in.
func newID(now time.Time) string { return prefix + id.New(now) }

// digests lists the distinct digests that a manifest names.
func digests(s *Snapshot) []string {
	seen := map[string]bool{}
	var out []string
	for _, f := range s.GetFiles() {
		if !seen[f.GetDigest()] {
			seen[f.GetDigest()] = true
			out = append(out, f.GetDigest())
		}
	}
	return out
}
