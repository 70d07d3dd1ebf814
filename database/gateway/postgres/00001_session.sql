-- +goose Up
-- One row per completion, with exactly the tokens that were sampled, in the order of the session.
CREATE TABLE turn (
    number     BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session_id TEXT COLLATE "C" NOT NULL,
    turn       BYTEA NOT NULL -- rollout.gateway.v1.SessionTurn
);
CREATE INDEX turn_by_session ON turn (session_id, number);

-- +goose Down
DROP TABLE turn;
