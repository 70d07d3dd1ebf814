-- +goose Up
-- A snapshot is identified by run, kind, step, and name. SQLite can't change a constraint, so both
-- tables are copied; dropping the old child first keeps its cascade from deleting the copies.
CREATE TABLE named_snapshot (
    snapshot_id TEXT PRIMARY KEY,
    run_id      TEXT NOT NULL,
    kind        INTEGER NOT NULL,
    step        INTEGER NOT NULL,
    name        TEXT NOT NULL DEFAULT '',
    manifest    BLOB NOT NULL,
    pinned      INTEGER NOT NULL DEFAULT 0,
    UNIQUE (run_id, kind, step, name)
) STRICT;
INSERT INTO named_snapshot (snapshot_id, run_id, kind, step, manifest, pinned)
    SELECT snapshot_id, run_id, kind, step, manifest, pinned FROM snapshot;

CREATE TABLE named_snapshot_file (
    snapshot_id TEXT NOT NULL REFERENCES named_snapshot (snapshot_id) ON DELETE CASCADE,
    digest      TEXT NOT NULL,
    PRIMARY KEY (snapshot_id, digest)
) STRICT, WITHOUT ROWID;
INSERT INTO named_snapshot_file (snapshot_id, digest) SELECT snapshot_id, digest FROM snapshot_file;

DROP TABLE snapshot_file;
DROP TABLE snapshot;
ALTER TABLE named_snapshot RENAME TO snapshot;
ALTER TABLE named_snapshot_file RENAME TO snapshot_file;
CREATE INDEX snapshot_file_by_digest ON snapshot_file (digest);

-- +goose Down
CREATE TABLE unnamed_snapshot (
    snapshot_id TEXT PRIMARY KEY,
    run_id      TEXT NOT NULL,
    kind        INTEGER NOT NULL,
    step        INTEGER NOT NULL,
    manifest    BLOB NOT NULL,
    pinned      INTEGER NOT NULL DEFAULT 0,
    UNIQUE (run_id, kind, step)
) STRICT;
INSERT INTO unnamed_snapshot SELECT snapshot_id, run_id, kind, step, manifest, pinned FROM snapshot WHERE name = '';

CREATE TABLE unnamed_snapshot_file (
    snapshot_id TEXT NOT NULL REFERENCES unnamed_snapshot (snapshot_id) ON DELETE CASCADE,
    digest      TEXT NOT NULL,
    PRIMARY KEY (snapshot_id, digest)
) STRICT, WITHOUT ROWID;
INSERT INTO unnamed_snapshot_file
    SELECT snapshot_id, digest FROM snapshot_file WHERE snapshot_id IN (SELECT snapshot_id FROM unnamed_snapshot);

DROP TABLE snapshot_file;
DROP TABLE snapshot;
ALTER TABLE unnamed_snapshot RENAME TO snapshot;
ALTER TABLE unnamed_snapshot_file RENAME TO snapshot_file;
CREATE INDEX snapshot_file_by_digest ON snapshot_file (digest);
