"""The inference worker: pulls prompt groups, samples and scores them, streams trajectories, and
serves the policy."""
