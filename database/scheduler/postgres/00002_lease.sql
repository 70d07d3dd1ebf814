-- +goose Up
-- One row per task that one process may do at a time, see libs/lease.
CREATE TABLE lease (
    name    TEXT COLLATE "C" PRIMARY KEY,
    epoch   BIGINT NOT NULL, -- increases by one with each holder
    beat    BIGINT NOT NULL, -- increases with each renewal
    holder  TEXT COLLATE "C" NOT NULL, -- '': no holder
    address TEXT COLLATE "C" NOT NULL, -- gRPC, of the holder
    UNIQUE (name, epoch) -- puts the epoch into a key: taking the lease waits for the holder's transactions, renewing it does not
);

-- +goose Down
DROP TABLE lease;
