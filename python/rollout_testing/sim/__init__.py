"""Workers without a model: a deterministic engine and learner behind the real shells, for tests of
everything around them.

    rolloutd --worker-command "python -m rollout_testing.sim"      # or [worker] command in its file

Sampling and training are hashes, so a worker starts in a second, a step takes milliseconds, and a
lost, repeated or swapped sample changes every weights digest after it. Nothing of a worker's shell
is replaced: pulling, publishing, receipts, payloads, weights folders and states are those of
production. Only the modules that import torch are (``install``).

Each process writes down what it did, apart from the mesh (``journal``), for a harness to compare
with the ledger. A run's config can't select it: the program itself must be named as the worker
command, and it refuses a model that is not its own.
"""
