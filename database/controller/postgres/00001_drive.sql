-- +goose Up
-- One row a run that was ever driven. The ledger and the snapshots hold the truth; this is what a restarted controller needs
-- to find them again.
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
