"""Policies that act in environments for many steps: RLinf's multi-step rollout worker.

docs/multistep.md has an example.
"""

from rollout_workers.multistep.channel import Channel, MemoryChannel
from rollout_workers.multistep.errors import (
    BatchInvalid,
    ChannelClosed,
    ChannelFull,
    EnvironmentSilent,
    KeyInvalid,
    PeerLost,
    SettingsInvalid,
    WeightsMismatch,
)
from rollout_workers.multistep.nats_channel import NatsChannel
from rollout_workers.multistep.policy import Policy, Prediction
from rollout_workers.multistep.ranks import Peer, channel_key, mapped_ranks
from rollout_workers.multistep.weights import ActorWeights, MemoryWeights, Receipt, WeightSource
from rollout_workers.multistep.worker import MultiStepRolloutWorker

__all__ = [
    "ActorWeights",
    "BatchInvalid",
    "Channel",
    "ChannelClosed",
    "ChannelFull",
    "EnvironmentSilent",
    "KeyInvalid",
    "MemoryChannel",
    "MemoryWeights",
    "MultiStepRolloutWorker",
    "NatsChannel",
    "Peer",
    "PeerLost",
    "Policy",
    "Prediction",
    "Receipt",
    "SettingsInvalid",
    "WeightSource",
    "WeightsMismatch",
    "channel_key",
    "mapped_ranks",
]
