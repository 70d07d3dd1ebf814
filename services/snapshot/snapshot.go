// Package snapshot owns snapshot manifests. A manifest describes what is needed to continue a run.
//
// The files are artifacts of the storage service. A manifest names them by digest, so snapshots
// share the files that did not change.
//
//	(absent) --CreateSnapshot--> recorded --DeleteSnapshot, or retention--> deleted
//
// Each kind of snapshot has a Handler, in the table newHandlers.
//
// With a bucket, each manifest is also an object of it, with the plan of its run: what the state
// folder has alone would be lost with the host. RecoverSnapshots reads these objects.
//
// An artifact is deleted when no manifest names it any more. A crash between an import and its
// manifest, or between the deletion of a manifest and that of its files, leaves candidates in the
// store. The next sweep, at the start or after a deletion, removes them.
package snapshot

import (
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Snapshot is a manifest.
type Snapshot = snapshotv1.Snapshot

// Kind is what a snapshot contains.
type Kind = snapshotv1.SnapshotKind

// The kinds.
const (
	TrainState = snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE
	Buffer     = snapshotv1.SnapshotKind_SNAPSHOT_KIND_BUFFER
	Process    = snapshotv1.SnapshotKind_SNAPSHOT_KIND_PROCESS
	Episodic   = snapshotv1.SnapshotKind_SNAPSHOT_KIND_EPISODIC
)

// Errors of this service.
var (
	ErrNotFound  = rpcerr.New(codes.NotFound, "SNAPSHOT_NOT_FOUND", "the snapshot was not found").Fix("`rollout snapshot list` shows the existing ones")
	ErrAmbiguous = rpcerr.New(codes.FailedPrecondition, "SNAPSHOT_AMBIGUOUS", "several snapshots have this prefix").
			Fix("give more of the id; `rollout snapshot list` shows the ids")
	ErrInvalid  = rpcerr.New(codes.InvalidArgument, "SNAPSHOT_INVALID", "the manifest of the snapshot is invalid")
	ErrMismatch = rpcerr.New(codes.DataLoss, "SNAPSHOT_FILE_MISMATCH", "a file of the snapshot does not have the digest in its manifest")
	ErrConflict = rpcerr.New(codes.AlreadyExists, "SNAPSHOT_CONFLICT", "a snapshot of the same run, kind, step, and name has other content")
	ErrInUse    = rpcerr.New(codes.FailedPrecondition, "SNAPSHOT_IN_USE", "a run started from the snapshot").
			Fix("delete the run that started from it first: `rollout runs delete RUN`")
	ErrNoBucket = rpcerr.New(codes.FailedPrecondition, "SNAPSHOT_NO_BUCKET", "this control plane stores its artifacts in files, not in a bucket").
			Fix("start it with the bucket of the lost one: `[blob] url` in rolloutd.toml; an exported file needs none: `rollout snapshot import FILE`")
	ErrUnsupported = rpcerr.New(codes.Unimplemented, "SNAPSHOT_KIND_UNSUPPORTED", "snapshots of this kind are not supported")
)

const prefix = "snap-"

// newID makes a snapshot id. Ids sort by the millisecond of their creation.
func newID(now time.Time) string { return prefix + id.New(now) }

// Key identifies a snapshot.
type Key struct {
	Run  string
	Kind Kind
	Step uint64
	Name string
}

// KeyOf returns the key of a manifest.
func KeyOf(s *Snapshot) Key {
	return Key{Run: s.GetRunId(), Kind: s.GetKind(), Step: s.GetStep(), Name: s.GetName()}
}

// sameContent reports whether two manifests differ at most in what the service sets.
func sameContent(a, b *Snapshot) bool {
	content := func(s *Snapshot) *Snapshot {
		s = proto.CloneOf(s)
		s.SnapshotId, s.CreateTime, s.Bytes, s.Origin = "", nil, 0, nil
		for _, f := range s.GetFiles() {
			f.Bytes, f.Blocks = 0, nil
		}
		return s
	}
	return proto.Equal(content(a), content(b))
}

// digests returns the distinct digests that a manifest names.
func digests(s *Snapshot) []string {
	found := map[string]bool{}
	var out []string
	for _, f := range s.GetFiles() {
		if !found[f.GetDigest()] {
			found[f.GetDigest()] = true
			out = append(out, f.GetDigest())
		}
	}
	return out
}

// NotFound is the ErrNotFound about an id or a prefix. It is also the answer about a snapshot of
// another project: a caller cannot tell which.
func NotFound(ref string) error {
	return ErrNotFound.With("snapshot", ref).WithMessage("snapshot %q was not found", ref)
}
