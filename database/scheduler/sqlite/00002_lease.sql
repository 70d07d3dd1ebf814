-- +goose Up
-- One row a thing that only one process may do at a time, see libs/lease.
CREATE TABLE lease (
    name    TEXT PRIMARY KEY,
    epoch   INTEGER NOT NULL, -- grows by one with each holder
    beat    INTEGER NOT NULL, -- grows with each renewal
    holder  TEXT NOT NULL, -- '': nobody
    address TEXT NOT NULL, -- gRPC, of the holder
    UNIQUE (name, epoch)
) STRICT;

-- +goose Down
DROP TABLE lease;
