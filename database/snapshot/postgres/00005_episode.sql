-- +goose Up
-- One row per open episode: a serialized rollout.snapshot.v1.Episode after its last completed turn.
CREATE TABLE episode (
    run_id  TEXT COLLATE "C" NOT NULL,
    epoch   BIGINT NOT NULL,
    idx     BIGINT NOT NULL, -- place in the epoch's order
    sample  BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    turns   BIGINT NOT NULL,
    record  BYTEA NOT NULL,
    PRIMARY KEY (run_id, epoch, idx, sample)
);

-- +goose Down
DROP TABLE episode;
