"""The input and the result of a training step, and the trainer's errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.plugin import flaw
from rollout.trajectory.v1.trajectory_pb2 import EpisodeLink, Turn, VersionSpan


@dataclass(slots=True, eq=False)
class TrainSample:
    """One trajectory as the trainer reads it; do not change it. T tokens: the prompt, then the
    completion.

    Example: ``17+25=`` answered with ``42`` and the end of sequence: 9 ``token_ids``,
    ``prompt_length`` 6, ``loss_mask`` [0, 0, 0, 0, 0, 0, 1, 1, 1].
    """

    group_key: str
    """The group: equal for the samples of one prompt. A batch is ordered by ``group_key``, then
    ``sample``."""
    sample: int
    """Position in the group, from 0. The parts of a forked sample have one position each."""
    token_ids: NDArray[np.int32]
    """int32 [T]."""
    prompt_length: int
    """The number of prompt tokens, 0 .. T."""
    loss_mask: NDArray[np.uint8]
    """uint8 [T]: 1 for tokens that are trained on. Token 0 never is: no position predicts it."""
    logprobs: NDArray[np.float32]
    """float32 [T]: logprobs of the engine that sampled; 0 for the prompt and for data. SFT ignores
    them."""
    reward: float = 0.0
    version: int = 0
    """The oldest weights version that sampled one of the tokens."""
    truncated: bool = False
    """Whether the completion reached the maximum length."""
    token_rewards: NDArray[np.float32] | None = None
    """float32 [T]: process or token rewards, in addition to ``reward``."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """float32 [T]: logprobs of a teacher, for distillation."""
    prompt: str = ""
    completion: str = ""
    """Texts for display only."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other numbers that the reward function returned; reported, never trained on."""
    part: int = 0
    """Number of the part, from 0. Parts have the reward of their sample, and count once where the
    samples of a group are compared."""
    turns: Sequence[Turn] = ()
    spans: Sequence[VersionSpan] = ()
    """The turns of an episode with several, and the weights that sampled the completion; for
    display only."""
    parent: EpisodeLink | None = None
    """Of a child session, the episode that opened it."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """Of a policy that acts for many steps, torch tensors by name as in ``Trajectory.tensors``; it
    has no tokens."""

    @property
    def has_own_reward(self) -> bool:
        """Whether this part is compared by its reward with such parts of the group's other
        samples, and not with their first parts."""
        return self.parent is not None and self.parent.rewarded


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step."""

    step: int
    metrics: Mapping[str, float]
    """See ``rollout_workers.trainer.metrics``."""
    advantages: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """(group_key, sample) -> mean advantage of the sample's tokens; empty if the algorithm has no
    advantages."""


class LearnerError(Exception):
    """Base class of the trainer's errors. Programs branch on ``reason``; the message says what
    failed and how to fix it."""

    reason = "LEARNER"


class NonFiniteGradient(LearnerError):
    """The loss or gradient is infinite or NaN. The step was refused: weights, optimizer, and step
    are unchanged."""

    reason = "NON_FINITE_GRADIENT"


class ExplodingGradient(LearnerError):
    """The gradient's norm exceeds ``refuse_grad_norm``. The step was refused, as for
    ``NonFiniteGradient``."""

    reason = "EXPLODING_GRADIENT"


class StepOutOfTurn(LearnerError):
    """The requested step does not follow the trainer's current step."""

    reason = "STEP_OUT_OF_TURN"


class BadBatch(LearnerError):
    """The batch cannot be trained on: it is empty, has no trained token, or has arrays of different
    lengths."""

    reason = "BAD_BATCH"


def check_rewards(samples: Iterable[TrainSample]) -> None:
    """Raise ``BadBatch`` for a reward that is infinite, NaN, or too large for float32."""
    for sample in samples:
        if why := flaw(sample.reward):
            what = why if math.isfinite(sample.reward) else "infinite or NaN"
            raise BadBatch(
                f"a reward is {what} (sample {sample.sample} of group {sample.group_key}); exclude the sample from training"
            )


class BadSettings(LearnerError):
    """The settings do not fit the model. Retrying does not help."""

    reason = "BAD_SETTINGS"
    permanent = True


class RankLost(LearnerError):
    """A rank died, hung, or is at another step than the others. New processes must continue from
    the last state."""

    reason = "RANK_LOST"


class StateUnreadable(LearnerError):
    """The state folder is missing, damaged, or belongs to another model."""

    reason = "STATE_UNREADABLE"
