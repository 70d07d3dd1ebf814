-- +goose Up
-- Sessions that are samples of prompt groups, and how sessions ended.
ALTER TABLE session ADD COLUMN group_id TEXT COLLATE "C" NOT NULL DEFAULT ''; -- <run>/<epoch>/<index>/<attempt>; '': none
ALTER TABLE session ADD COLUMN sample BIGINT NOT NULL DEFAULT 0; -- in the group
ALTER TABLE session ADD COLUMN task BYTEA; -- rollout.gateway.v1.SessionTask
ALTER TABLE session ADD COLUMN due_ms BIGINT NOT NULL DEFAULT 0; -- when it must be closed, or settled; 0: never
ALTER TABLE session ADD COLUMN state BIGINT NOT NULL DEFAULT 0; -- 0: open, 1: closed, 2: settled (the buffer has answered)
ALTER TABLE session ADD COLUMN ended BYTEA; -- rollout.gateway.v1.SessionEnd
CREATE UNIQUE INDEX session_by_sample ON session (group_id, sample) WHERE group_id <> '';
CREATE INDEX session_by_due ON session (due_ms) WHERE due_ms > 0;

-- +goose Down
DROP INDEX session_by_due;
DROP INDEX session_by_sample;
ALTER TABLE session DROP COLUMN ended;
ALTER TABLE session DROP COLUMN state;
ALTER TABLE session DROP COLUMN due_ms;
ALTER TABLE session DROP COLUMN task;
ALTER TABLE session DROP COLUMN sample;
ALTER TABLE session DROP COLUMN group_id;
