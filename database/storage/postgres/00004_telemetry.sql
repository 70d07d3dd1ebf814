-- +goose Up
-- Numbers that workers report every second. A source is a worker with the names of its numbers.
CREATE TABLE telemetry_source (
    source_id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id    TEXT COLLATE "C" NOT NULL,
    service   TEXT COLLATE "C" NOT NULL,
    names     TEXT COLLATE "C" NOT NULL, -- separated by newlines
    UNIQUE (run_id, service, names)
);

-- The newest reports.
CREATE TABLE telemetry_report (
    source_id BIGINT NOT NULL,
    time_ms   BIGINT NOT NULL, -- milliseconds since 1970, UTC
    data      BYTEA NOT NULL,  -- a little-endian float32 for each name
    PRIMARY KEY (source_id, time_ms)
);

-- Older ones, summarized.
CREATE TABLE telemetry_chunk (
    source_id    BIGINT NOT NULL,
    resolution_s BIGINT NOT NULL,
    start_s      BIGINT NOT NULL, -- seconds since 1970, UTC
    data         BYTEA NOT NULL,  -- buckets of this resolution, see services/storage/telemetry.go
    PRIMARY KEY (source_id, resolution_s, start_s)
);

-- +goose Down
DROP TABLE telemetry_chunk;
DROP TABLE telemetry_report;
DROP TABLE telemetry_source;
