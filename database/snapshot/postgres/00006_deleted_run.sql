-- +goose Up
-- Runs that were deleted, so that what arrives late is refused, see libs/fence.
CREATE TABLE fence_deleted (
    digest  TEXT COLLATE "C" PRIMARY KEY, -- of the id of the run, of which nothing is left
    expires BIGINT NOT NULL -- seconds since 1970
);

-- +goose Down
DROP TABLE fence_deleted;
