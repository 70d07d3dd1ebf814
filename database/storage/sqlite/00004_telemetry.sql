-- +goose Up
-- Numbers that workers report every second. A source is a worker with the names of its numbers.
CREATE TABLE telemetry_source (
    source_id INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id    TEXT NOT NULL,
    service   TEXT NOT NULL,
    names     TEXT NOT NULL, -- separated by newlines
    UNIQUE (run_id, service, names)
) STRICT;

-- The newest reports.
CREATE TABLE telemetry_report (
    source_id INTEGER NOT NULL,
    time_ms   INTEGER NOT NULL, -- milliseconds since 1970, UTC
    data      BLOB NOT NULL,    -- a little-endian float32 for each name
    PRIMARY KEY (source_id, time_ms)
) STRICT, WITHOUT ROWID;

-- Older ones, summarized.
CREATE TABLE telemetry_chunk (
    source_id    INTEGER NOT NULL,
    resolution_s INTEGER NOT NULL,
    start_s      INTEGER NOT NULL, -- seconds since 1970, UTC
    data         BLOB NOT NULL,    -- buckets of this resolution, see services/storage/telemetry.go
    PRIMARY KEY (source_id, resolution_s, start_s)
) STRICT;

-- +goose Down
DROP TABLE telemetry_chunk;
DROP TABLE telemetry_report;
DROP TABLE telemetry_source;
