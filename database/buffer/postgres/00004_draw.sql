-- +goose Up
ALTER TABLE ledger ADD COLUMN skipped BIGINT NOT NULL DEFAULT 0; -- excluded groups that a step has passed
ALTER TABLE prompt_group ADD COLUMN token_rewards BOOLEAN NOT NULL DEFAULT FALSE; -- samples with equal rewards may differ
ALTER TABLE step ADD COLUMN zero_count BIGINT NOT NULL DEFAULT 0; -- excluded groups with equal rewards
ALTER TABLE step ADD COLUMN zero_reward DOUBLE PRECISION NOT NULL DEFAULT 0; -- mean reward of those
ALTER TABLE step ADD COLUMN end_position BIGINT NOT NULL DEFAULT 0; -- position at which the next step begins

-- +goose Down
ALTER TABLE step DROP COLUMN end_position;
ALTER TABLE step DROP COLUMN zero_reward;
ALTER TABLE step DROP COLUMN zero_count;
ALTER TABLE prompt_group DROP COLUMN token_rewards;
ALTER TABLE ledger DROP COLUMN skipped;
