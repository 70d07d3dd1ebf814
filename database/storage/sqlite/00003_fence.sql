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

-- +goose Down
DROP TABLE fence_run;
DROP TABLE fence_leader;
