-- +goose Up
-- Payloads in the storage service that samples may no longer need: their samples were dropped,
-- refused, or trimmed. A row is deleted after the payload.
CREATE TABLE unused_payload (
    ledger BIGINT NOT NULL REFERENCES ledger (id),
    ref    TEXT NOT NULL,
    PRIMARY KEY (ledger, ref)
);
CREATE INDEX sample_ref ON sample (ledger, ref) WHERE ref <> '';

-- +goose Down
DROP INDEX sample_ref;
DROP TABLE unused_payload;
