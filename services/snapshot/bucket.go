package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// manifests is the prefix of the objects with manifests.
const manifests = "snapshots/"

// maxManifest bounds the memory that a damaged object can claim, in bytes.
const maxManifest = 64 << 20

// key returns the name of the object with the manifest of a snapshot.
func key(snapshotID string) string { return manifests + snapshotID + ".json" }

// split separates the digests of artifacts from the ids of snapshots.
func split(candidates []string) (files, snapshots []string) {
	for _, name := range candidates {
		if strings.HasPrefix(name, prefix) {
			snapshots = append(snapshots, name)
			continue
		}
		files = append(files, name)
	}
	return files, snapshots
}

// publish writes the manifest of a snapshot, whose files are stored, into the bucket, with what a
// restore needs to know of its run.
func (s *service) publish(ctx context.Context, snap *Snapshot) error {
	if s.Bucket == nil {
		return nil
	}
	whole := proto.CloneOf(snap)
	if whole.GetOrigin() == nil {
		origin, err := originOf(ctx, s.Scheduler, snap)
		if err != nil {
			return fmt.Errorf("find the plan of %s: %w", snap.GetRunId(), err)
		}
		whole.Origin = origin
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(whole)
	if err != nil {
		return fmt.Errorf("write the manifest of %s: %w", snap.GetSnapshotId(), err)
	}
	if _, err := s.Bucket.Put(ctx, key(snap.GetSnapshotId()), strings.NewReader(string(text))); err != nil {
		return fmt.Errorf("write the manifest of %s to the bucket: %w", snap.GetSnapshotId(), err)
	}
	return nil
}

// withdraw deletes manifests from the bucket.
func (s *service) withdraw(ctx context.Context, ids []string) error {
	if s.Bucket == nil {
		return nil
	}
	for _, snapshotID := range ids {
		if err := s.Bucket.Delete(ctx, key(snapshotID)); err != nil {
			return fmt.Errorf("delete the manifest of %s from the bucket: %w", snapshotID, err)
		}
	}
	return nil
}

// recover adds the snapshots of a page of the bucket's manifests: those after an id, at most size.
// next is the token of the next page.
func (s *service) recover(ctx context.Context, run, base, after string, size int) (found []*snapshotv1.RecoveredSnapshot, next string, err error) {
	if made, valid := strings.CutPrefix(after, prefix); after != "" && (!valid || !id.Valid(made)) {
		return nil, "", paging.ErrToken(after)
	}
	if s.Bucket == nil {
		return nil, "", ErrNoBucket
	}
	if base != "" && !filepath.IsAbs(base) {
		return nil, "", ErrInvalid.Field("base_dir", "must be absolute")
	}
	last := ""
	for object, err := range s.Bucket.List(ctx, manifests) {
		if err != nil {
			return nil, "", fmt.Errorf("list the manifests of the bucket: %w", err)
		}
		snapshotID, ok := strings.CutSuffix(strings.TrimPrefix(object.Key, manifests), ".json")
		if made, valid := strings.CutPrefix(snapshotID, prefix); !ok || !valid || !id.Valid(made) || snapshotID <= after {
			continue
		}
		if size--; size < 0 {
			return found, last, nil
		}
		last = snapshotID
		snap, err := s.manifest(ctx, object)
		if err != nil {
			return nil, "", err
		}
		project, limited := apikey.ProjectOf(ctx)
		if run != "" && snap.GetRunId() != run || limited && snap.GetOrigin().GetProject() != project {
			continue
		}
		one, err := s.adopt(ctx, snap, base)
		if err != nil {
			return nil, "", fmt.Errorf("recover %s: %w", snapshotID, err)
		}
		found = append(found, one)
	}
	return found, "", nil
}

// manifest reads an object of the bucket.
func (s *service) manifest(ctx context.Context, object blob.Info) (*Snapshot, error) {
	damaged := func(err error) error {
		return ErrInvalid.With("object", object.Key).WithMessage("the manifest %s of the bucket cannot be read: %v", object.Key, err).
			Fix("update rollout here if a newer version wrote it; otherwise delete the object, whose snapshot is lost")
	}
	r, err := s.Bucket.Get(ctx, object.Key, blob.Range{})
	if err != nil {
		return nil, fmt.Errorf("read %s of the bucket: %w", object.Key, err)
	}
	text, err := io.ReadAll(io.LimitReader(r, maxManifest))
	err = errors.Join(err, r.Close())
	if err != nil && !errors.Is(err, blob.ErrCorrupt) {
		return nil, fmt.Errorf("read %s of the bucket: %w", object.Key, err)
	}
	snap := &Snapshot{}
	if err == nil {
		err = (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(text, snap)
	}
	if err == nil && (key(snap.GetSnapshotId()) != object.Key || snap.GetOrigin().GetPlan() == nil) {
		err = errors.New("it has no plan, or belongs to another snapshot")
	}
	if err != nil {
		return nil, damaged(err)
	}
	return snap, s.check(snap, "/")
}

// adopt records a manifest of the bucket. Nothing is a candidate of a sweep in the meantime, which
// would delete the only copy.
func (s *service) adopt(ctx context.Context, snap *Snapshot, base string) (*snapshotv1.RecoveredSnapshot, error) {
	s.files.RLock()
	defer s.files.RUnlock()
	if base != "" {
		snap.Origin.BaseDir = base
	}
	known, err := s.Store.Get(ctx, snap.GetSnapshotId())
	if err == nil {
		if base != "" && known.GetOrigin() != nil {
			known.Origin.BaseDir = base
			err = s.Store.Update(ctx, known)
		}
		return &snapshotv1.RecoveredSnapshot{Snapshot: known, Known: true}, err
	}
	if !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	out := &snapshotv1.RecoveredSnapshot{Snapshot: snap}
	// The storage service takes what it has already for a file that does not exist.
	none := filepath.Join("/nonexistent", snap.GetSnapshotId())
	_, err = s.Artifacts.ImportArtifacts(ctx, &storagev1.ImportArtifactsRequest{Files: localFiles(snap, none), Fence: s.fence()})
	if e, ok := rpcerr.From(err); ok && e.Reason() == "FILE_NOT_FOUND" {
		missing, _ := filepath.Rel(none, e.Metadata()["path"])
		out.Problem = fmt.Sprintf("its file %s is not in the bucket", filepath.ToSlash(missing))
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	kept, err := s.Store.Record(ctx, snap, nil)
	if err == nil && kept.GetSnapshotId() != snap.GetSnapshotId() {
		out.Problem = "this control plane has " + kept.GetSnapshotId() + " of the same run, kind, step, and name"
	}
	return out, err
}
