-- +goose Up
ALTER TABLE ledger ADD COLUMN lineage BIGINT NOT NULL DEFAULT 0; -- newest lineage of the weights
ALTER TABLE step ADD COLUMN lineage BIGINT NOT NULL DEFAULT 0;   -- lineage of the weights that the step made

-- One row per version and lineage.
ALTER TABLE weights ADD COLUMN lineage BIGINT NOT NULL DEFAULT 0;
ALTER TABLE weights ADD COLUMN retrained BIGINT NOT NULL DEFAULT 0; -- last committed step when it was retrained; 0: it was not
ALTER TABLE weights DROP CONSTRAINT weights_pkey;
ALTER TABLE weights ADD PRIMARY KEY (ledger, version, lineage);

-- One row per lineage, without the first one.
CREATE TABLE lineage (
    ledger        BIGINT NOT NULL REFERENCES ledger (id),
    lineage       BIGINT NOT NULL,
    first_version BIGINT NOT NULL,
    step          BIGINT NOT NULL, -- last committed step when it began
    old_lineage   BIGINT NOT NULL, -- rollout.buffer.v1.OldLineage
    PRIMARY KEY (ledger, lineage)
);

-- +goose Down
DROP TABLE lineage;
DELETE FROM weights WHERE lineage > 0;
ALTER TABLE weights DROP CONSTRAINT weights_pkey;
ALTER TABLE weights ADD PRIMARY KEY (ledger, version);
ALTER TABLE weights DROP COLUMN retrained;
ALTER TABLE weights DROP COLUMN lineage;
ALTER TABLE step DROP COLUMN lineage;
ALTER TABLE ledger DROP COLUMN lineage;
