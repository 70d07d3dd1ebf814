-- +goose Up
-- A snapshot is identified by run, kind, step, and name.
ALTER TABLE snapshot ADD COLUMN name TEXT COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE snapshot DROP CONSTRAINT snapshot_run_id_kind_step_key;
ALTER TABLE snapshot ADD CONSTRAINT snapshot_run_id_kind_step_name_key UNIQUE (run_id, kind, step, name);

-- +goose Down
DELETE FROM snapshot WHERE name <> '';
ALTER TABLE snapshot DROP CONSTRAINT snapshot_run_id_kind_step_name_key;
ALTER TABLE snapshot ADD CONSTRAINT snapshot_run_id_kind_step_key UNIQUE (run_id, kind, step);
ALTER TABLE snapshot DROP COLUMN name;
