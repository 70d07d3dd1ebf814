package archive

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/id"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// maxManifest bounds the memory that a damaged archive can claim.
const maxManifest = 64 << 20

// Target receives the artifacts of an archive.
type Target interface {
	// Put stores an artifact and returns the content id of what was stored. It may leave the reader
	// unread if the artifact exists.
	Put(ctx context.Context, content string, r io.Reader) (string, error)
}

// Read stores the artifacts of an archive, writes its inputs into an empty folder, and returns its
// manifest, whose origin has the absolute folder of the plan. path names the archive in errors.
// Every byte is verified against the manifest.
func Read(ctx context.Context, path string, r io.Reader, to Target, folder string) (*snapshotv1.Snapshot, error) {
	count := &counting{Reader: r}
	in := &reader{path: path, count: count, tar: tar.NewReader(count), to: to, folder: folder}
	if err := in.head(); err != nil {
		return nil, err
	}
	for {
		header, err := in.tar.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = in.entry(ctx, header)
		}
		if err != nil {
			return nil, in.failed(err)
		}
	}
	for name := range in.missing {
		return nil, damaged(path, count.bytes, fmt.Errorf("%s and %d other entries are missing", name, len(in.missing)-1))
	}
	return in.snapshot, nil
}

type reader struct {
	path     string
	count    *counting
	tar      *tar.Reader
	to       Target
	folder   string
	snapshot *snapshotv1.Snapshot
	missing  map[string]file // entries that were not read yet, by name
}

// failed returns the error of an entry; errors of the target and of the disk stay as they are.
func (r *reader) failed(err error) error {
	var of *changed
	if errors.As(err, &of) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, tar.ErrHeader) || errors.Is(err, tar.ErrInsecurePath) {
		return damaged(r.path, r.count.bytes, err)
	}
	return err
}

// head reads the manifest.
func (r *reader) head() error {
	other := exit.New(exit.Data, "name a file that `rollout snapshot export` wrote", "%s is not an exported snapshot", r.path)
	header, err := r.tar.Next()
	if err != nil || header.Name != manifest || header.Size > maxManifest {
		return other
	}
	text, err := io.ReadAll(r.tar)
	if err != nil {
		return damaged(r.path, r.count.bytes, err)
	}
	r.snapshot = &snapshotv1.Snapshot{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(text, r.snapshot); err != nil {
		return exit.New(exit.Data, "update rollout here, or export with an older version", "the manifest of %s cannot be read: %w", r.path, err)
	}
	origin := r.snapshot.GetOrigin()
	if origin.GetPlan() == nil {
		return other
	}
	r.missing = map[string]file{}
	for _, f := range distinct(r.snapshot) {
		if !id.ValidContent(f.GetDigest()) {
			return other
		}
		r.missing[artifacts+f.GetDigest()] = file{path: f.GetPath(), digest: f.GetDigest(), bytes: f.GetBytes()}
	}
	if filepath.IsAbs(filepath.FromSlash(origin.GetBaseDir())) {
		return nil // written without inputs
	}
	base, err := local(r.folder, origin.GetBaseDir())
	if err != nil {
		return other
	}
	at := place{root: r.folder, base: origin.GetBaseDir()}
	carried, _ := files(origin.GetPlan())
	for _, f := range carried {
		r.missing[at.name(f)] = f
	}
	origin.BaseDir = base
	return nil
}

func (r *reader) entry(ctx context.Context, header *tar.Header) error {
	want, ok := r.missing[header.Name]
	if !ok || header.Typeflag != tar.TypeReg {
		return exit.New(exit.Data, "name a file that `rollout snapshot export` wrote", "%s has an entry %q that its manifest does not name", r.path, header.Name)
	}
	delete(r.missing, header.Name)
	if uint64(header.Size) != want.bytes {
		return &changed{name: header.Name}
	}
	if strings.HasPrefix(header.Name, artifacts) {
		stored, err := r.to.Put(ctx, want.digest, r.tar)
		if err == nil && stored != want.digest {
			err = &changed{name: header.Name}
		}
		return err
	}
	return r.input(header.Name, want)
}

func (r *reader) input(name string, want file) (err error) {
	path, err := local(r.folder, name)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return cannot(path, err)
	}
	w, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return cannot(path, err)
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	return copied(w, r.tar, name, want.digest, want.bytes)
}

func cannot(path string, err error) error {
	return exit.New(exit.CannotMake, "name another folder with --inputs", "cannot write %s: %w", path, err)
}
