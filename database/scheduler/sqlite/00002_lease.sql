-- +goose Up
-- One row per task that one process may do at a time, see libs/lease.
CREATE TABLE lease (
    name    TEXT PRIMARY KEY,
    epoch   INTEGER NOT NULL, -- increases by one with each holder
    beat    INTEGER NOT NULL, -- increases with each renewal
    holder  TEXT NOT NULL, -- '': no holder
    address TEXT NOT NULL, -- gRPC, of the holder
    UNIQUE (name, epoch)
) STRICT;

-- +goose Down
DROP TABLE lease;
