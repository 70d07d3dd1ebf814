"""Workers without a model: a deterministic engine and a deterministic trainer inside the real
workers, for tests of everything else.

Start the services with ``rolloutd --worker-command "python -m rollout_testing.sim"``, or set
[worker] command in the config file.

Sampling and training are hashes, so a worker starts in a second, a step takes milliseconds, and a
lost, repeated, or swapped sample changes every later weights digest. Everything else is the code of
production: pulling, publishing, receipts, payloads, weights folders, and states. Only the modules
that import torch are replaced (``install``).

Each process writes a journal of its work (``journal``), which tests compare with the ledger. A
run's config can't select these workers: they must be the worker command, and they reject models of
another type.
"""
