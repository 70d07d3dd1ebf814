-- +goose Up
-- Who has changed data last, see libs/fence.
CREATE TABLE fence_leader (
    role  TEXT COLLATE "C" PRIMARY KEY,
    epoch BIGINT NOT NULL -- highest epoch of the role's lease
);
CREATE TABLE fence_run (
    run         TEXT COLLATE "C" PRIMARY KEY,
    incarnation BIGINT NOT NULL -- highest incarnation of the run
);
INSERT INTO fence_run (run, incarnation) SELECT run, incarnation FROM ledger WHERE incarnation > 0;
ALTER TABLE ledger DROP COLUMN incarnation;

-- +goose Down
ALTER TABLE ledger ADD COLUMN incarnation BIGINT NOT NULL DEFAULT 0;
UPDATE ledger SET incarnation = COALESCE((SELECT f.incarnation FROM fence_run f WHERE f.run = ledger.run), 0);
DROP TABLE fence_run;
DROP TABLE fence_leader;
