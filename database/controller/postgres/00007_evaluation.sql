-- +goose Up
-- The evaluation by reserved workers whose result is not known yet (JSON), empty without one.
ALTER TABLE drive ADD COLUMN evaluation BYTEA NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE drive DROP COLUMN evaluation;
