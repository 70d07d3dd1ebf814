-- +goose Up
CREATE TABLE ledger (
    id              BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run             TEXT COLLATE "C"    NOT NULL UNIQUE,
    config          BYTEA    NOT NULL,            -- rollout.buffer.v1.LedgerConfig, canonical JSON
    closed          BOOLEAN NOT NULL DEFAULT FALSE,
    revision        BIGINT NOT NULL DEFAULT 0,  -- incremented by every transaction
    step            BIGINT NOT NULL DEFAULT 0,  -- last committed step
    chain           TEXT COLLATE "C"    NOT NULL DEFAULT '', -- chain digest of that step
    arrivals        BIGINT NOT NULL DEFAULT 0,  -- groups that were completed or excluded
    trimmed         BIGINT  NOT NULL DEFAULT 0,  -- payloads of steps up to this one may be deleted
    weights_version BIGINT NOT NULL DEFAULT 0,
    weights_digest  TEXT COLLATE "C"    NOT NULL DEFAULT '',
    open            BIGINT NOT NULL DEFAULT 0,  -- groups by state
    ready           BIGINT NOT NULL DEFAULT 0,
    leased          BIGINT NOT NULL DEFAULT 0,
    consumed        BIGINT NOT NULL DEFAULT 0,
    excluded        BIGINT NOT NULL DEFAULT 0,
    dissolved       BIGINT NOT NULL DEFAULT 0,
    samples         BIGINT NOT NULL DEFAULT 0,
    duplicates      BIGINT NOT NULL DEFAULT 0,
    refused         BIGINT NOT NULL DEFAULT 0,
    infra_failed    BIGINT NOT NULL DEFAULT 0
);

-- One row per known prompt group, with its newest attempt.
CREATE TABLE prompt_group (
    ledger      BIGINT NOT NULL REFERENCES ledger (id),
    position    BIGINT NOT NULL,            -- epoch * rows + index
    attempt     BIGINT NOT NULL,
    state       BIGINT NOT NULL,            -- rollout.buffer.v1.GroupState
    reason      TEXT COLLATE "C"    NOT NULL DEFAULT '',
    step        BIGINT NOT NULL DEFAULT 0,  -- step that leased, consumed, or passed it
    samples     BIGINT NOT NULL DEFAULT 0,
    pending     BIGINT NOT NULL DEFAULT 0,  -- samples whose weights digest is not recorded yet
    failures    BIGINT NOT NULL DEFAULT 0,  -- attempts that failed
    min_version BIGINT NOT NULL DEFAULT 0,  -- oldest weights of its samples
    arrival     BIGINT NOT NULL DEFAULT 0,  -- order of completion
    PRIMARY KEY (ledger, position)
);
CREATE INDEX prompt_group_step ON prompt_group (ledger, step) WHERE step > 0;
CREATE INDEX prompt_group_live ON prompt_group (ledger, state) WHERE state IN (1, 2, 3, 6);
CREATE INDEX prompt_group_arrival ON prompt_group (ledger, arrival) WHERE arrival > 0 AND step = 0;

-- One row per accepted sample of a group's newest attempt.
CREATE TABLE sample (
    ledger          BIGINT NOT NULL REFERENCES ledger (id),
    position        BIGINT NOT NULL,
    sample          BIGINT NOT NULL,
    part            BIGINT NOT NULL,
    attempt         BIGINT NOT NULL,
    segment         BIGINT NOT NULL,  -- 0: the payload is in the storage service under ref
    byte_offset     BIGINT NOT NULL,
    byte_length     BIGINT NOT NULL,
    crc32c          BIGINT NOT NULL,
    ref             TEXT COLLATE "C"    NOT NULL,
    reward          DOUBLE PRECISION    NOT NULL,
    outcome         BIGINT NOT NULL,
    min_version     BIGINT NOT NULL,
    receipt_version BIGINT NOT NULL,
    receipt_digest  TEXT COLLATE "C",              -- set until the digest of the version is recorded
    PRIMARY KEY (ledger, position, sample, part)
);
CREATE INDEX sample_pending ON sample (ledger, receipt_version) WHERE receipt_digest IS NOT NULL;

-- One row per leased step; it is committed if weights_digest is set.
CREATE TABLE step (
    ledger         BIGINT NOT NULL REFERENCES ledger (id),
    step           BIGINT NOT NULL,
    batch          TEXT COLLATE "C"    NOT NULL,
    group_count    BIGINT NOT NULL,
    sample_count   BIGINT NOT NULL,
    excluded_count BIGINT NOT NULL,
    weights_digest TEXT COLLATE "C"    NOT NULL DEFAULT '',
    chain          TEXT COLLATE "C"    NOT NULL DEFAULT '',
    PRIMARY KEY (ledger, step)
);

CREATE TABLE weights (
    ledger  BIGINT NOT NULL REFERENCES ledger (id),
    version BIGINT NOT NULL,
    digest  TEXT COLLATE "C"    NOT NULL,
    PRIMARY KEY (ledger, version)
);

CREATE TABLE segment (
    ledger  BIGINT NOT NULL REFERENCES ledger (id),
    number  BIGINT NOT NULL,
    bytes   BIGINT NOT NULL,            -- durable bytes; what follows them in the file does not count
    trimmed BOOLEAN NOT NULL DEFAULT FALSE,
    PRIMARY KEY (ledger, number)
);

-- +goose Down
DROP TABLE segment;
DROP TABLE weights;
DROP TABLE step;
DROP TABLE sample;
DROP TABLE prompt_group;
DROP TABLE ledger;
