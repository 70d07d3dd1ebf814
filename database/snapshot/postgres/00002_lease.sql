-- +goose Up
-- One row per lease, see libs/lease.
CREATE TABLE lease (
    name    TEXT COLLATE "C" PRIMARY KEY,
    epoch   BIGINT NOT NULL, -- grows by one with each holder
    beat    BIGINT NOT NULL, -- grows with each renewal
    holder  TEXT COLLATE "C" NOT NULL, -- '': no holder
    address TEXT COLLATE "C" NOT NULL, -- gRPC address of the holder
    UNIQUE (name, epoch) -- part of the key: taking the lease waits for the holder's transactions, renewing it does not
);

-- +goose Down
DROP TABLE lease;
