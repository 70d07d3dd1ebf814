-- +goose Up
-- The stored responses of the Responses API. They are deleted with their session.
CREATE TABLE response (
    response_id TEXT COLLATE "C" PRIMARY KEY,
    session_id  TEXT COLLATE "C" NOT NULL,
    response    BYTEA NOT NULL, -- JSON, as the client received it
    input_items BYTEA NOT NULL  -- JSON, a list
);
CREATE INDEX response_by_session ON response (session_id);

-- +goose Down
DROP TABLE response;
