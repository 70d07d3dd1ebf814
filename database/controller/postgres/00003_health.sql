-- +goose Up
-- What the health check of a run remembers of its steps (JSON), empty before the first step.
ALTER TABLE drive ADD COLUMN health BYTEA NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE drive DROP COLUMN health;
