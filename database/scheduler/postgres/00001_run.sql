-- +goose Up
-- One row per run. `record` is a serialized rollout.run.v1.Run; the other columns are for queries and transactions.
CREATE TABLE run (
    run_id          TEXT COLLATE "C" PRIMARY KEY,
    name            TEXT COLLATE "C" NOT NULL,
    state           BIGINT NOT NULL,
    idempotency_key TEXT COLLATE "C" UNIQUE,
    record          BYTEA NOT NULL,
    queues          BYTEA NOT NULL
);
CREATE INDEX run_by_name ON run (name, run_id);
CREATE INDEX run_by_state ON run (state, run_id);

-- The dataset cursor: the next position to issue. It never decreases.
CREATE TABLE cursor (
    run_id   TEXT COLLATE "C" PRIMARY KEY REFERENCES run (run_id),
    position BIGINT NOT NULL,
    first    BIGINT NOT NULL,
    step     BIGINT NOT NULL
);

-- +goose Down
DROP TABLE cursor;
DROP TABLE run;
