-- +goose Up
-- The highest incarnation of the run that opened the ledger: who conducts an older one stood still, and is refused.
ALTER TABLE ledger ADD COLUMN incarnation BIGINT NOT NULL DEFAULT 0;

-- +goose Down
ALTER TABLE ledger DROP COLUMN incarnation;
