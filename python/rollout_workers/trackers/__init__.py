"""Hands a run's metrics, evaluations and completions to trackers: TensorBoard, Weights & Biases, MLflow.

A process of its own reads the public event log and writes with each tracker's own library. What was written is read back from the
tracker itself when the process starts, so that one that was killed goes on without a step doubled or skipped. Imports no torch.
"""
