"""The Python workers of rollout: engines, the environments around them, the learner, and their side
of the mesh.

``python -m rollout_workers inference|learner`` (or ``rollout-worker``) is one worker of one run;
docs/wire.md says how it talks to the rest.
"""
