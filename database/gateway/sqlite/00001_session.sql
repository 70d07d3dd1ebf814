-- +goose Up
-- One row per completion, with exactly the tokens that were sampled, in the order of the session.
CREATE TABLE turn (
    number     INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id TEXT NOT NULL,
    turn       BLOB NOT NULL -- rollout.gateway.v1.SessionTurn
) STRICT;
CREATE INDEX turn_by_session ON turn (session_id, number);

-- +goose Down
DROP TABLE turn;
