"""``rollout infer batch``: completions and scores for the rows of a dataset, in a file; resumable. See ``batch.process``."""
