package evidence

import (
	"context"
	"os"
	"path/filepath"

	"github.com/rollout-rl/rollout/cmd/internal/backend"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/files"
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/services/buffer"
)

// Place is where a control plane stores its runs.
type Place struct {
	Databases sqldb.Place

	runs      string     // folder with a folder per run
	bucket    blob.Store // nil: segments and artifacts are files
	segments  string     // folder with a folder per run; a cache where there is a bucket
	artifacts string     // folder; used without a bucket
	spool     string     // folder for artifacts that are being read from the bucket
}

// Folder returns the place of a control plane without servers: its state folder.
func Folder(state string) Place {
	return Place{
		Databases: sqldb.Archive(filepath.Join(state, "db")), runs: filepath.Join(state, "runs"),
		segments: filepath.Join(state, "segments"), artifacts: filepath.Join(state, "artifacts"),
	}
}

// Configured returns the place that a rolloutd.toml names. Content of a bucket is cached in
// scratch, an empty folder.
func Configured(ctx context.Context, file, scratch string, environ []string) (Place, error) {
	cfg, err := config.Load([]string{"--config", file}, environ, os.Stderr)
	if err != nil {
		return Place{}, exit.New(exit.Usage, "", "%w", err)
	}
	place := Folder(cfg.SharedDir)
	if place.Databases, err = backend.Databases(cfg, environ); err != nil {
		return Place{}, err
	}
	if files, ok := place.Databases.(sqldb.Files); ok {
		place.Databases = sqldb.Archive(files)
	}
	if place.bucket, err = backend.Bucket(ctx, cfg.Blob, environ); err != nil || place.bucket == nil {
		return place, err
	}
	place.segments, place.spool = filepath.Join(scratch, "segments"), filepath.Join(scratch, "spool")
	return place, os.MkdirAll(place.spool, 0o700)
}

// check returns an error where a state folder has no databases.
func (p Place) check() error {
	folder, ok := p.Databases.(sqldb.Archive)
	if !ok {
		return nil
	}
	for _, service := range []string{"scheduler", "buffer", "snapshot"} {
		if _, err := os.Stat(filepath.Join(string(folder), service+".sqlite")); err != nil {
			return exit.New(exit.NoInput, "name the state folder with --state-dir, a running control plane with --server, or its rolloutd.toml with --config",
				"no %s database to read: %w", service, err)
		}
	}
	return nil
}

// Artifacts returns the store of artifacts.
func (p Place) Artifacts() (*blob.CAS, error) {
	if p.bucket != nil {
		return blob.NewCAS(p.bucket, p.spool), nil
	}
	local, err := files.Open(p.artifacts)
	if err != nil {
		return nil, err
	}
	return blob.NewCAS(local, local.Spool()), nil
}

func (p Place) payloads(run string) buffer.Payloads {
	from := buffer.Payloads{Folder: filepath.Join(p.segments, run), Artifact: func(ctx context.Context, ref string) ([]byte, error) {
		artifacts, err := p.Artifacts()
		if err != nil {
			return nil, err
		}
		return artifacts.Read(ctx, ref)
	}}
	if p.bucket != nil {
		from.Blobs = p.bucket
	}
	return from
}
