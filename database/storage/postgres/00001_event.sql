-- +goose Up
CREATE TABLE event (
    sequence BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id TEXT COLLATE "C" NOT NULL UNIQUE,
    run_id   TEXT COLLATE "C" NOT NULL,
    time_us  BIGINT NOT NULL, -- microseconds since 1970, UTC
    service  TEXT COLLATE "C" NOT NULL,
    level    BIGINT NOT NULL,
    kind     TEXT COLLATE "C" NOT NULL,
    event    BYTEA NOT NULL     -- rollout.event.v1.Event
);
CREATE INDEX event_by_run ON event (run_id, sequence);
CREATE INDEX event_by_kind ON event (run_id, kind, sequence);
CREATE INDEX event_by_time ON event (time_us);

-- Metrics of events that belong to a step, by name.
CREATE TABLE metric (
    run_id  TEXT COLLATE "C" NOT NULL,
    name    TEXT COLLATE "C" NOT NULL,
    step    BIGINT NOT NULL,
    value   DOUBLE PRECISION,              -- NULL: not a number
    time_us BIGINT NOT NULL,
    PRIMARY KEY (run_id, name, step)
);

-- +goose Down
DROP TABLE metric;
DROP TABLE event;
