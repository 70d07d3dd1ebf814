-- +goose Up
-- The sessions, and the tree of each: one row per segment, in the order in which they were
-- appended. Turns of sessions from before are dropped; they expire after a week anyway.
CREATE TABLE session (
    session_id TEXT COLLATE "C" PRIMARY KEY,
    run_id     TEXT COLLATE "C" NOT NULL,
    segments   BIGINT NOT NULL, -- number of segments
    updated_ms BIGINT NOT NULL  -- when the newest was appended
);
CREATE INDEX session_by_update ON session (updated_ms);
CREATE TABLE segment (
    session_id TEXT COLLATE "C" NOT NULL,
    number     BIGINT NOT NULL, -- in the session, from 0
    segment_id TEXT COLLATE "C" NOT NULL,
    segment    BYTEA NOT NULL, -- rollout.gateway.v1.SessionSegment
    PRIMARY KEY (session_id, number)
);
CREATE UNIQUE INDEX segment_by_id ON segment (session_id, segment_id);
DROP TABLE turn;

-- +goose Down
DROP TABLE segment;
DROP TABLE session;
CREATE TABLE turn (
    number     BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session_id TEXT COLLATE "C" NOT NULL,
    turn       BYTEA NOT NULL
);
CREATE INDEX turn_by_session ON turn (session_id, number);
