-- +goose Up
-- One row per task that only one process may do at a time, see libs/lease.
CREATE TABLE lease (
    name    TEXT PRIMARY KEY,
    epoch   INTEGER NOT NULL, -- incremented by each holder
    beat    INTEGER NOT NULL, -- incremented by each renewal
    holder  TEXT NOT NULL, -- '': none
    address TEXT NOT NULL, -- gRPC address of the holder
    UNIQUE (name, epoch)
) STRICT;

-- +goose Down
DROP TABLE lease;
