-- +goose Up
-- One row a thing that only one process may do at a time, see libs/lease.
CREATE TABLE lease (
    name    TEXT COLLATE "C" PRIMARY KEY,
    epoch   BIGINT NOT NULL, -- grows by one with each holder
    beat    BIGINT NOT NULL, -- grows with each renewal
    holder  TEXT COLLATE "C" NOT NULL, -- '': nobody
    address TEXT COLLATE "C" NOT NULL, -- gRPC, of the holder
    UNIQUE (name, epoch) -- makes the epoch a part of the key: who takes the lease waits for the holder's transactions, who renews it does not
);

-- +goose Down
DROP TABLE lease;
