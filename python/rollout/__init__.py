"""rollout: the contracts, plugins for rewards and environments, and clients of the services.
Imports no torch.

Generated messages are in ``rollout.run.v1.run_pb2`` and similar modules. :mod:`rollout.plugin` is
for writing rewards. :mod:`rollout.errors` has the errors with reasons that Go and Python share.
"""
