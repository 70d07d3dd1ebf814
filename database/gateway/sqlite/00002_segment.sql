-- +goose Up
-- The sessions, and the tree of each: one row per segment, in the order in which they were
-- appended. Turns of sessions from before are dropped; they expire after a week anyway.
CREATE TABLE session (
    session_id TEXT PRIMARY KEY,
    run_id     TEXT NOT NULL,
    segments   INTEGER NOT NULL, -- number of segments
    updated_ms INTEGER NOT NULL  -- when the newest was appended
) STRICT;
CREATE INDEX session_by_update ON session (updated_ms);
CREATE TABLE segment (
    session_id TEXT NOT NULL,
    number     INTEGER NOT NULL, -- in the session, from 0
    segment_id TEXT NOT NULL,
    segment    BLOB NOT NULL, -- rollout.gateway.v1.SessionSegment
    PRIMARY KEY (session_id, number)
) STRICT;
CREATE UNIQUE INDEX segment_by_id ON segment (session_id, segment_id);
DROP TABLE turn;

-- +goose Down
DROP TABLE segment;
DROP TABLE session;
CREATE TABLE turn (
    number     INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id TEXT NOT NULL,
    turn       BLOB NOT NULL
) STRICT;
CREATE INDEX turn_by_session ON turn (session_id, number);
