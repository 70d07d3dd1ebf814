-- +goose Up
-- The API keys, of which only the hash is stored.
CREATE TABLE api_key (
    name                TEXT PRIMARY KEY,
    sha256              TEXT NOT NULL UNIQUE, -- of the key, in hexadecimal
    scope               TEXT NOT NULL,
    project             TEXT NOT NULL, -- '': the default project
    created_ms          INTEGER NOT NULL,
    expires_ms          INTEGER NOT NULL, -- 0: never
    used_ms             INTEGER NOT NULL, -- when it was last used, to within a minute; 0: never
    requests_per_minute INTEGER NOT NULL, -- 0: any number
    tokens_per_minute   INTEGER NOT NULL  -- 0: any number
) STRICT;
-- One row. The revision changes with each change of a key, except of used_ms.
CREATE TABLE api_key_revision (revision INTEGER NOT NULL) STRICT;
INSERT INTO api_key_revision (revision) VALUES (0);

-- +goose Down
DROP TABLE api_key_revision;
DROP TABLE api_key;
