-- +goose Up
-- What the gates of a run remember of its metrics (JSON), empty without gates.
ALTER TABLE drive ADD COLUMN gates BLOB NOT NULL DEFAULT x'';

-- +goose Down
ALTER TABLE drive DROP COLUMN gates;
