-- +goose Up
-- The runs that an artifact was stored for; '': for no run. An artifact is deleted with its last
-- row.
CREATE TABLE artifact_owner (
    digest TEXT NOT NULL,
    run_id TEXT NOT NULL,
    PRIMARY KEY (digest, run_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX artifact_owner_by_run ON artifact_owner (run_id, digest);

-- +goose Down
DROP TABLE artifact_owner;
