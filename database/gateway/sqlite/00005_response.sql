-- +goose Up
-- The stored responses of the Responses API. They are deleted with their session.
CREATE TABLE response (
    response_id TEXT PRIMARY KEY,
    session_id  TEXT NOT NULL,
    response    BLOB NOT NULL, -- JSON, as the client received it
    input_items BLOB NOT NULL  -- JSON, a list
) STRICT;
CREATE INDEX response_by_session ON response (session_id);

-- +goose Down
DROP TABLE response;
