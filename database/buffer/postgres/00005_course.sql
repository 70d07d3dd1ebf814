-- +goose Up
ALTER TABLE ledger ADD COLUMN failures TEXT NOT NULL DEFAULT '{}'; -- JSON: number of samples with INFRA_FAILED by reason
ALTER TABLE sample ADD COLUMN times BYTEA; -- rollout.trajectory.v1.EpisodeTimes, at most 4096 bytes

-- +goose Down
ALTER TABLE sample DROP COLUMN times;
ALTER TABLE ledger DROP COLUMN failures;
