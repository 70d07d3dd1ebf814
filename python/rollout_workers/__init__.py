"""The Python workers of rollout: engines, environments, the learner, and the parts that connect
them to the services.

``python -m rollout_workers inference|learner`` (or ``rollout-worker``) is one worker of one run.
docs/wire.md describes its protocols.
"""
