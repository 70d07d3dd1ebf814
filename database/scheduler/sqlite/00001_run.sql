-- +goose Up
-- One row per run. `record` is a serialized rollout.run.v1.Run; the other columns are for queries and transactions.
CREATE TABLE run (
    run_id          TEXT PRIMARY KEY,
    name            TEXT NOT NULL,
    state           INTEGER NOT NULL,
    idempotency_key TEXT UNIQUE,
    record          BLOB NOT NULL,
    queues          BLOB NOT NULL
) STRICT;
CREATE INDEX run_by_name ON run (name, run_id);
CREATE INDEX run_by_state ON run (state, run_id);

-- The dataset cursor: the next position to issue. It never decreases.
CREATE TABLE cursor (
    run_id   TEXT PRIMARY KEY REFERENCES run (run_id),
    position INTEGER NOT NULL,
    first    INTEGER NOT NULL,
    step     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- +goose Down
DROP TABLE cursor;
DROP TABLE run;
