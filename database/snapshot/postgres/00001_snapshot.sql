-- +goose Up
-- One row a manifest; the manifest itself is a serialized rollout.snapshot.v1.Snapshot.
CREATE TABLE snapshot (
    snapshot_id TEXT COLLATE "C" PRIMARY KEY,
    run_id      TEXT COLLATE "C" NOT NULL,
    kind        BIGINT NOT NULL,
    step        BIGINT NOT NULL,
    manifest    BYTEA NOT NULL,
    pinned      BOOLEAN NOT NULL DEFAULT FALSE, -- kept by retention: a run began from it
    UNIQUE (run_id, kind, step)
);

-- Which artifacts a manifest names.
CREATE TABLE snapshot_file (
    snapshot_id TEXT COLLATE "C" NOT NULL REFERENCES snapshot (snapshot_id) ON DELETE CASCADE,
    digest      TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (snapshot_id, digest)
);
CREATE INDEX snapshot_file_by_digest ON snapshot_file (digest);

-- Artifacts that may be named by no manifest: noted before an import and when a manifest goes, forgotten after a sweep.
CREATE TABLE candidate (
    digest TEXT COLLATE "C" PRIMARY KEY
);

-- +goose Down
DROP TABLE candidate;
DROP TABLE snapshot_file;
DROP TABLE snapshot;
