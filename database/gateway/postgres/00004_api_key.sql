-- +goose Up
-- The API keys, of which only the hash is stored.
CREATE TABLE api_key (
    name                TEXT COLLATE "C" PRIMARY KEY,
    sha256              TEXT COLLATE "C" NOT NULL UNIQUE, -- of the key, in hexadecimal
    scope               TEXT COLLATE "C" NOT NULL,
    project             TEXT COLLATE "C" NOT NULL, -- '': the default project
    created_ms          BIGINT NOT NULL,
    expires_ms          BIGINT NOT NULL, -- 0: never
    used_ms             BIGINT NOT NULL, -- when it was last used, to within a minute; 0: never
    requests_per_minute BIGINT NOT NULL, -- 0: any number
    tokens_per_minute   BIGINT NOT NULL  -- 0: any number
);
-- One row. The revision changes with each change of a key, except of used_ms.
CREATE TABLE api_key_revision (revision BIGINT NOT NULL);
INSERT INTO api_key_revision (revision) VALUES (0);

-- +goose Down
DROP TABLE api_key_revision;
DROP TABLE api_key;
