package archive

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/exit"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Source reads artifacts.
type Source interface {
	// Artifact writes the bytes with a content id to w.
	Artifact(ctx context.Context, content string, w io.Writer) error
}

// Written says what an archive contains.
type Written struct {
	Artifacts, Inputs int
	Bytes             int64
	// Left are inputs that are not in the archive.
	Left []string
}

// Write writes an archive of a snapshot, whose origin must be set. withInputs: whether the files of
// the plan are written too.
func Write(ctx context.Context, w io.Writer, from Source, snapshot *snapshotv1.Snapshot, withInputs bool) (Written, error) {
	snapshot = proto.CloneOf(snapshot)
	origin := snapshot.GetOrigin()
	carried, left := files(origin.GetPlan())
	if !withInputs {
		carried, left = nil, nil
	}
	at := placed(origin.GetBaseDir(), carried)
	if withInputs {
		origin.BaseDir = at.base
	}
	out := &writer{Writer: tar.NewWriter(w), snapshot: snapshot}
	written := Written{Left: left}
	head, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(snapshot)
	if err != nil {
		return written, err
	}
	if err := out.entry(manifest, uint64(len(head)), func(w io.Writer) error { _, err := w.Write(head); return err }); err != nil {
		return written, err
	}
	for _, f := range distinct(snapshot) {
		fill := func(w io.Writer) error { return from.Artifact(ctx, f.GetDigest(), w) }
		if err := out.entry(artifacts+f.GetDigest(), f.GetBytes(), fill); err != nil {
			return written, fmt.Errorf("read %s of %s: %w", f.GetPath(), snapshot.GetSnapshotId(), err)
		}
		written.Artifacts++
	}
	seen := map[string]bool{}
	for _, f := range carried {
		name := at.name(f)
		if seen[name] {
			continue
		}
		seen[name] = true
		if err := out.input(ctx, name, filepath.Join(at.root, filepath.FromSlash(name[len(inputs):])), f); err != nil {
			return written, err
		}
		written.Inputs++
	}
	written.Bytes = out.bytes
	return written, out.Close()
}

type writer struct {
	*tar.Writer
	snapshot *snapshotv1.Snapshot
	bytes    int64
}

func (w *writer) entry(name string, size uint64, fill func(io.Writer) error) error {
	w.bytes += int64(size)
	header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(size), Mode: 0o644, ModTime: w.snapshot.GetCreateTime().AsTime(), Format: tar.FormatPAX}
	if err := w.WriteHeader(header); err != nil {
		return err
	}
	return fill(w)
}

// input writes a file of the plan, which must be as the plan has it.
func (w *writer) input(ctx context.Context, name, path string, f file) error {
	const fix = "restore the file, or leave the inputs out with --without-inputs and provide them where the snapshot is restored"
	r, err := os.Open(path)
	if err != nil {
		return exit.New(exit.NoInput, fix, "cannot read an input of the run: %w", err)
	}
	defer func() { _ = r.Close() }()
	info, err := r.Stat()
	if err == nil && uint64(info.Size()) != f.bytes {
		err = &changed{name: path}
	}
	if err == nil {
		err = w.entry(name, f.bytes, func(w io.Writer) error { return copied(w, r, path, f.digest, f.bytes) })
	}
	if of := (*changed)(nil); errors.As(err, &of) {
		return exit.New(exit.Data, fix, "%s has changed since the run was planned", path)
	}
	return errors.Join(err, ctx.Err())
}
