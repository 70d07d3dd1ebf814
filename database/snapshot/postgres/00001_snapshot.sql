-- +goose Up
-- One row per manifest, which is a serialized rollout.snapshot.v1.Snapshot.
CREATE TABLE snapshot (
    snapshot_id TEXT COLLATE "C" PRIMARY KEY,
    run_id      TEXT COLLATE "C" NOT NULL,
    kind        BIGINT NOT NULL,
    step        BIGINT NOT NULL,
    manifest    BYTEA NOT NULL,
    pinned      BOOLEAN NOT NULL DEFAULT FALSE, -- exempt from retention: a run started from it
    UNIQUE (run_id, kind, step)
);

-- Artifacts that a manifest names.
CREATE TABLE snapshot_file (
    snapshot_id TEXT COLLATE "C" NOT NULL REFERENCES snapshot (snapshot_id) ON DELETE CASCADE,
    digest      TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (snapshot_id, digest)
);
CREATE INDEX snapshot_file_by_digest ON snapshot_file (digest);

-- Artifacts that may have no manifest: added before an import and when a manifest is deleted, removed
-- after a sweep.
CREATE TABLE candidate (
    digest TEXT COLLATE "C" PRIMARY KEY
);

-- +goose Down
DROP TABLE candidate;
DROP TABLE snapshot_file;
DROP TABLE snapshot;
