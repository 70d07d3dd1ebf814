"""``rollout infer batch``: writes completions and scores for the rows of a dataset to a file. An
interrupted run can be resumed. See ``offline.process``."""
