"""Sends a run's metrics, evaluations, and completions to trackers: TensorBoard, Weights & Biases,
MLflow.

A separate process reads the public event log and writes with each tracker's library. When it
starts, it reads from the tracker which steps are stored, so a restarted process neither repeats nor
skips a step. Does not import torch.
"""
