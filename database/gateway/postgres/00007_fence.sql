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

-- +goose Down
DROP TABLE fence_run;
DROP TABLE fence_leader;
