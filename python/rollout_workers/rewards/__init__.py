"""Rewards: batched calls with deadlines and retries, in a child process or from a reward worker.
Imports no torch."""
