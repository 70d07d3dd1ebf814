"""The inference worker: pulls prompt groups, samples and scores them, streams trajectories; serves the policy meanwhile."""
