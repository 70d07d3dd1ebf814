-- +goose Up
-- One row per lease, see libs/lease.
CREATE TABLE lease (
    name    TEXT PRIMARY KEY,
    epoch   INTEGER NOT NULL, -- grows by one with each holder
    beat    INTEGER NOT NULL, -- grows with each renewal
    holder  TEXT NOT NULL, -- '': no holder
    address TEXT NOT NULL, -- gRPC address of the holder
    UNIQUE (name, epoch)
) STRICT;

-- +goose Down
DROP TABLE lease;
