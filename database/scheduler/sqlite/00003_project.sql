-- +goose Up
-- The project of a run, as in its record; '': the default project.
ALTER TABLE run ADD COLUMN project TEXT NOT NULL DEFAULT '';
CREATE INDEX run_by_project ON run (project, run_id);

-- +goose Down
DROP INDEX run_by_project;
ALTER TABLE run DROP COLUMN project;
