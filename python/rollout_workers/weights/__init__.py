"""Weights: digests, files on disk, and the names of tensors that all processes agree on."""

from rollout_workers.weights.digest import WeightsDigest, streamed_digest, weights_digest
from rollout_workers.weights.naming import LiveWeights, named_weights
from rollout_workers.weights.store import (
    WeightsManifest,
    complete_folder,
    read_manifest,
    read_weights,
    seal,
    stage_folder,
    write_adapter,
    write_weights,
)

__all__ = [
    "LiveWeights",
    "WeightsDigest",
    "WeightsManifest",
    "complete_folder",
    "named_weights",
    "read_manifest",
    "read_weights",
    "seal",
    "stage_folder",
    "streamed_digest",
    "weights_digest",
    "write_adapter",
    "write_weights",
]
