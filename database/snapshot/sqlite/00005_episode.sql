-- +goose Up
-- One row per open episode: a serialized rollout.snapshot.v1.Episode after its last completed turn.
CREATE TABLE episode (
    run_id  TEXT NOT NULL,
    epoch   INTEGER NOT NULL,
    idx     INTEGER NOT NULL, -- place in the epoch's order
    sample  INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    turns   INTEGER NOT NULL,
    record  BLOB NOT NULL,
    PRIMARY KEY (run_id, epoch, idx, sample)
) STRICT;

-- +goose Down
DROP TABLE episode;
