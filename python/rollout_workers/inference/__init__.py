"""The inference worker: pulls prompt groups, samples and scores completions, publishes
trajectories, and answers requests for generation and evaluation."""
