"""rollout: contracts, reward plugins and the client side of the mesh. Imports no torch.

Generated messages live below (``rollout.run.v1.run_pb2`` and its sisters); :mod:`rollout.plugin` is what a reward is
written against, :mod:`rollout.errors` holds the reasons that Go and Python share.
"""
