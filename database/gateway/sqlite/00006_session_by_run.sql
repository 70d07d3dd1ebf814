-- +goose Up
CREATE INDEX session_by_run ON session (run_id);

-- +goose Down
DROP INDEX session_by_run;
