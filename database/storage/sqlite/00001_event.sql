-- +goose Up
CREATE TABLE event (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    event_id TEXT NOT NULL UNIQUE,
    run_id   TEXT NOT NULL,
    time_us  INTEGER NOT NULL, -- microseconds since 1970, UTC
    service  TEXT NOT NULL,
    level    INTEGER NOT NULL,
    kind     TEXT NOT NULL,
    event    BLOB NOT NULL     -- rollout.event.v1.Event
) STRICT;
CREATE INDEX event_by_run ON event (run_id, sequence);
CREATE INDEX event_by_kind ON event (run_id, kind, sequence);
CREATE INDEX event_by_time ON event (time_us);

-- Metrics of events that belong to a step, by name.
CREATE TABLE metric (
    run_id  TEXT NOT NULL,
    name    TEXT NOT NULL,
    step    INTEGER NOT NULL,
    value   REAL,              -- NULL: not a number
    time_us INTEGER NOT NULL,
    PRIMARY KEY (run_id, name, step)
) STRICT, WITHOUT ROWID;

-- +goose Down
DROP TABLE metric;
DROP TABLE event;
