module github.com/rollout-rl/rollout/database

go 1.26.7
