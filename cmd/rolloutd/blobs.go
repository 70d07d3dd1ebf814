package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/rollout-rl/rollout/cmd/internal/backend"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/files"
)

// openArtifacts opens the artifact store of the storage service.
func openArtifacts(ctx context.Context, m *mesh) (*blob.CAS, error) {
	store, err := backend.Bucket(ctx, m.cfg.Blob, m.environ)
	if err != nil {
		return nil, err
	}
	if store == nil {
		local, err := files.Open(artifactDir(m.cfg.SharedDir))
		if err != nil {
			return nil, err
		}
		return blob.NewCAS(local, local.Spool()), nil
	}
	spool := filepath.Join(m.cfg.StateDir, "spool")
	if err := os.RemoveAll(spool); err != nil { // left by a process that died
		return nil, fmt.Errorf("clear the spool folder: %w", err)
	}
	if err := os.MkdirAll(spool, 0o700); err != nil {
		return nil, fmt.Errorf("create the spool folder: %w", err)
	}
	return blob.NewCAS(store, spool), nil
}
