-- +goose Up
-- One row per task that only one process may do at a time, see libs/lease.
CREATE TABLE lease (
    name    TEXT COLLATE "C" PRIMARY KEY,
    epoch   BIGINT NOT NULL, -- incremented by each holder
    beat    BIGINT NOT NULL, -- incremented by each renewal
    holder  TEXT COLLATE "C" NOT NULL, -- '': none
    address TEXT COLLATE "C" NOT NULL, -- gRPC address of the holder
    UNIQUE (name, epoch) -- makes the epoch a part of the key: who takes the lease waits for the holder's transactions, who renews it does not
);

-- +goose Down
DROP TABLE lease;
