-- +goose Up
-- The highest incarnation of the run that opened the ledger. Callers that act for an older one are refused.
ALTER TABLE ledger ADD COLUMN incarnation INTEGER NOT NULL DEFAULT 0;

-- +goose Down
ALTER TABLE ledger DROP COLUMN incarnation;
