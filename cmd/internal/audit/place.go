package audit

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

// Place is where a control plane keeps its runs.
type Place struct {
	Databases sqldb.Place
	Segments  string     // folder of a folder a run
	Bucket    blob.Store // has the segments that the folder lacks; nil: the folder is all there is
	Artifacts string     // folder, where there is no bucket
	Spool     string     // folder for what is being read, where there is a bucket
}

// Folder is the place of a control plane without servers: its state folder.
func Folder(state string) Place {
	return Place{
		Databases: sqldb.Archive(filepath.Join(state, "db")), Segments: filepath.Join(state, "segments"), Artifacts: filepath.Join(state, "artifacts"),
	}
}

// Configured is the place that a rolloutd.toml names. Segments of a bucket are read into scratch, an empty folder.
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
	if place.Bucket, err = backend.Bucket(ctx, cfg.Blob, environ); err != nil || place.Bucket == nil {
		return place, err
	}
	place.Segments, place.Spool = filepath.Join(scratch, "segments"), filepath.Join(scratch, "spool")
	return place, os.MkdirAll(place.Spool, 0o700)
}

// check says what is missing of a state folder.
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

// CAS is the artifacts.
func (p Place) CAS() (*blob.CAS, error) {
	if p.Bucket != nil {
		return blob.NewCAS(p.Bucket, p.Spool), nil
	}
	local, err := files.Open(p.Artifacts)
	if err != nil {
		return nil, err
	}
	return blob.NewCAS(local, local.Spool()), nil
}

func (p Place) payloads(run string) buffer.Payloads {
	from := buffer.Payloads{Folder: filepath.Join(p.Segments, run), Artifact: func(ctx context.Context, ref string) ([]byte, error) {
		artifacts, err := p.CAS()
		if err != nil {
			return nil, err
		}
		return artifacts.Read(ctx, ref)
	}}
	if p.Bucket != nil {
		from.Blobs = p.Bucket
	}
	return from
}
