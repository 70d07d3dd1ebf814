"""Rewards: batched calls with time limits and retries, in a child process or on a reward worker.
Imports no torch."""
