-- +goose Up
-- Who has changed data last, see libs/fence.
CREATE TABLE fence_leader (
    role  TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL -- highest epoch of the role's lease
) STRICT;
CREATE TABLE fence_run (
    run         TEXT PRIMARY KEY,
    incarnation INTEGER NOT NULL -- highest incarnation of the run
) STRICT;
INSERT INTO fence_run (run, incarnation) SELECT run, incarnation FROM ledger WHERE incarnation > 0;
ALTER TABLE ledger DROP COLUMN incarnation;

-- +goose Down
ALTER TABLE ledger ADD COLUMN incarnation INTEGER NOT NULL DEFAULT 0;
UPDATE ledger SET incarnation = COALESCE((SELECT f.incarnation FROM fence_run f WHERE f.run = ledger.run), 0);
DROP TABLE fence_run;
DROP TABLE fence_leader;
