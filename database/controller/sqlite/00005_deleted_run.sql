-- +goose Up
-- Runs that were deleted, so that what arrives late is refused, see libs/fence.
CREATE TABLE fence_deleted (
    digest  TEXT PRIMARY KEY, -- of the id of the run, of which nothing is left
    expires INTEGER NOT NULL -- seconds since 1970
) STRICT;

-- +goose Down
DROP TABLE fence_deleted;
