-- +goose Up
-- One row per manifest, which is a serialized rollout.snapshot.v1.Snapshot.
CREATE TABLE snapshot (
    snapshot_id TEXT PRIMARY KEY,
    run_id      TEXT NOT NULL,
    kind        INTEGER NOT NULL,
    step        INTEGER NOT NULL,
    manifest    BLOB NOT NULL,
    pinned      INTEGER NOT NULL DEFAULT 0, -- exempt from retention: a run started from it
    UNIQUE (run_id, kind, step)
) STRICT;

-- Artifacts that a manifest names.
CREATE TABLE snapshot_file (
    snapshot_id TEXT NOT NULL REFERENCES snapshot (snapshot_id) ON DELETE CASCADE,
    digest      TEXT NOT NULL,
    PRIMARY KEY (snapshot_id, digest)
) STRICT, WITHOUT ROWID;
CREATE INDEX snapshot_file_by_digest ON snapshot_file (digest);

-- Artifacts that may have no manifest: added before an import and when a manifest is deleted, removed
-- after a sweep.
CREATE TABLE candidate (
    digest TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;

-- +goose Down
DROP TABLE candidate;
DROP TABLE snapshot_file;
DROP TABLE snapshot;
