-- +goose Up
-- One row per run that was driven. The ledger and the snapshots are authoritative; this is what a
-- restarted controller needs to continue.
CREATE TABLE drive (
    run_id      TEXT PRIMARY KEY,
    incarnation INTEGER NOT NULL,
    phase       INTEGER NOT NULL,
    step        INTEGER NOT NULL,
    active      INTEGER NOT NULL,
    spec        BLOB NOT NULL, -- rollout.learner.v1.StartRunRequest
    weights     BLOB NOT NULL  -- rollout.weights.v1.WeightsManifest, empty before the first
) STRICT;
CREATE INDEX drive_by_active ON drive (active);

-- +goose Down
DROP TABLE drive;
