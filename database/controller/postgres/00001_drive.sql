-- +goose Up
-- One row per run that was driven. The ledger and the snapshots are authoritative; this is what a
-- restarted controller needs to continue.
CREATE TABLE drive (
    run_id      TEXT COLLATE "C" PRIMARY KEY,
    incarnation BIGINT NOT NULL,
    phase       BIGINT NOT NULL,
    step        BIGINT NOT NULL,
    active      BOOLEAN NOT NULL,
    spec        BYTEA NOT NULL, -- rollout.learner.v1.StartRunRequest
    weights     BYTEA NOT NULL  -- rollout.weights.v1.WeightsManifest, empty before the first
);
CREATE INDEX drive_by_active ON drive (active);

-- +goose Down
DROP TABLE drive;
