-- +goose Up
CREATE TABLE ledger (
    id              INTEGER PRIMARY KEY,
    run             TEXT    NOT NULL UNIQUE,
    config          BLOB    NOT NULL,            -- rollout.buffer.v1.LedgerConfig, canonical JSON
    closed          INTEGER NOT NULL DEFAULT 0,
    revision        INTEGER NOT NULL DEFAULT 0,  -- incremented by every transaction
    step            INTEGER NOT NULL DEFAULT 0,  -- last committed step
    chain           TEXT    NOT NULL DEFAULT '', -- chain digest of that step
    arrivals        INTEGER NOT NULL DEFAULT 0,  -- groups that were completed or excluded
    trimmed         INTEGER NOT NULL DEFAULT 0,  -- payloads of steps up to this one may be deleted
    weights_version INTEGER NOT NULL DEFAULT 0,
    weights_digest  TEXT    NOT NULL DEFAULT '',
    open            INTEGER NOT NULL DEFAULT 0,  -- groups by state
    ready           INTEGER NOT NULL DEFAULT 0,
    leased          INTEGER NOT NULL DEFAULT 0,
    consumed        INTEGER NOT NULL DEFAULT 0,
    excluded        INTEGER NOT NULL DEFAULT 0,
    dissolved       INTEGER NOT NULL DEFAULT 0,
    samples         INTEGER NOT NULL DEFAULT 0,
    duplicates      INTEGER NOT NULL DEFAULT 0,
    refused         INTEGER NOT NULL DEFAULT 0,
    infra_failed    INTEGER NOT NULL DEFAULT 0
) STRICT;

-- One row per known prompt group, with its newest attempt.
CREATE TABLE prompt_group (
    ledger      INTEGER NOT NULL REFERENCES ledger (id),
    position    INTEGER NOT NULL,            -- epoch * rows + index
    attempt     INTEGER NOT NULL,
    state       INTEGER NOT NULL,            -- rollout.buffer.v1.GroupState
    reason      TEXT    NOT NULL DEFAULT '',
    step        INTEGER NOT NULL DEFAULT 0,  -- step that leased, consumed, or passed it
    samples     INTEGER NOT NULL DEFAULT 0,
    pending     INTEGER NOT NULL DEFAULT 0,  -- samples whose weights digest is not recorded yet
    failures    INTEGER NOT NULL DEFAULT 0,  -- attempts that failed
    min_version INTEGER NOT NULL DEFAULT 0,  -- oldest weights of its samples
    arrival     INTEGER NOT NULL DEFAULT 0,  -- order of completion
    PRIMARY KEY (ledger, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX prompt_group_step ON prompt_group (ledger, step) WHERE step > 0;
CREATE INDEX prompt_group_live ON prompt_group (ledger, state) WHERE state IN (1, 2, 3, 6);
CREATE INDEX prompt_group_arrival ON prompt_group (ledger, arrival) WHERE arrival > 0 AND step = 0;

-- One row per accepted sample of a group's newest attempt.
CREATE TABLE sample (
    ledger          INTEGER NOT NULL REFERENCES ledger (id),
    position        INTEGER NOT NULL,
    sample          INTEGER NOT NULL,
    part            INTEGER NOT NULL,
    attempt         INTEGER NOT NULL,
    segment         INTEGER NOT NULL,  -- 0: the payload is in the storage service under ref
    byte_offset     INTEGER NOT NULL,
    byte_length     INTEGER NOT NULL,
    crc32c          INTEGER NOT NULL,
    ref             TEXT    NOT NULL,
    reward          REAL    NOT NULL,
    outcome         INTEGER NOT NULL,
    min_version     INTEGER NOT NULL,
    receipt_version INTEGER NOT NULL,
    receipt_digest  TEXT,              -- set until the digest of the version is recorded
    PRIMARY KEY (ledger, position, sample, part)
) STRICT, WITHOUT ROWID;
CREATE INDEX sample_pending ON sample (ledger, receipt_version) WHERE receipt_digest IS NOT NULL;

-- One row per leased step; it is committed if weights_digest is set.
CREATE TABLE step (
    ledger         INTEGER NOT NULL REFERENCES ledger (id),
    step           INTEGER NOT NULL,
    batch          TEXT    NOT NULL,
    group_count    INTEGER NOT NULL,
    sample_count   INTEGER NOT NULL,
    excluded_count INTEGER NOT NULL,
    weights_digest TEXT    NOT NULL DEFAULT '',
    chain          TEXT    NOT NULL DEFAULT '',
    PRIMARY KEY (ledger, step)
) STRICT, WITHOUT ROWID;

CREATE TABLE weights (
    ledger  INTEGER NOT NULL REFERENCES ledger (id),
    version INTEGER NOT NULL,
    digest  TEXT    NOT NULL,
    PRIMARY KEY (ledger, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE segment (
    ledger  INTEGER NOT NULL REFERENCES ledger (id),
    number  INTEGER NOT NULL,
    bytes   INTEGER NOT NULL,            -- durable bytes; what follows them in the file does not count
    trimmed INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (ledger, number)
) STRICT, WITHOUT ROWID;

-- +goose Down
DROP TABLE segment;
DROP TABLE weights;
DROP TABLE step;
DROP TABLE sample;
DROP TABLE prompt_group;
DROP TABLE ledger;
