"""rollout: contracts, reward plugins and the client side of the mesh. Imports no torch.

Generated messages are in ``rollout.run.v1.run_pb2`` and similar modules; :mod:`rollout.plugin` is
what a reward is written with, :mod:`rollout.errors` has the errors with reasons that Go and Python
share.
"""
