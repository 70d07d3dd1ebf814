-- +goose Up
ALTER TABLE ledger ADD COLUMN lineage INTEGER NOT NULL DEFAULT 0; -- newest lineage of the weights
ALTER TABLE step ADD COLUMN lineage INTEGER NOT NULL DEFAULT 0;   -- lineage of the weights that the step made

-- One row per version and lineage.
CREATE TABLE lineage_weights (
    ledger      INTEGER NOT NULL REFERENCES ledger (id),
    version     INTEGER NOT NULL,
    lineage     INTEGER NOT NULL,
    digest      TEXT    NOT NULL,
    retrained   INTEGER NOT NULL, -- last committed step when it was retrained; 0: it was not
    PRIMARY KEY (ledger, version, lineage)
) STRICT, WITHOUT ROWID;
INSERT INTO lineage_weights (ledger, version, lineage, digest, retrained) SELECT ledger, version, 0, digest, 0 FROM weights;
DROP TABLE weights;
ALTER TABLE lineage_weights RENAME TO weights;

-- One row per lineage, without the first one.
CREATE TABLE lineage (
    ledger        INTEGER NOT NULL REFERENCES ledger (id),
    lineage       INTEGER NOT NULL,
    first_version INTEGER NOT NULL,
    step          INTEGER NOT NULL, -- last committed step when it began
    old_lineage   INTEGER NOT NULL, -- rollout.buffer.v1.OldLineage
    PRIMARY KEY (ledger, lineage)
) STRICT, WITHOUT ROWID;

-- +goose Down
CREATE TABLE single_weights (
    ledger  INTEGER NOT NULL REFERENCES ledger (id),
    version INTEGER NOT NULL,
    digest  TEXT    NOT NULL,
    PRIMARY KEY (ledger, version)
) STRICT, WITHOUT ROWID;
INSERT INTO single_weights (ledger, version, digest) SELECT ledger, version, digest FROM weights WHERE lineage = 0;
DROP TABLE weights;
ALTER TABLE single_weights RENAME TO weights;
DROP TABLE lineage;
ALTER TABLE step DROP COLUMN lineage;
ALTER TABLE ledger DROP COLUMN lineage;
