"""What goes into a step and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class TrainSample:
    """One trajectory as the learner reads it, never changed. T tokens: the prompt, then the completion.

    Example: ``17+25=`` answered with ``42`` and the end of sequence: ``token_ids`` of 9, ``prompt_length`` 6,
    ``loss_mask`` [0, 0, 0, 0, 0, 0, 1, 1, 1].
    """

    group_key: str
    """Names the group; equal for the samples of one prompt. Decides the order within a batch, with ``sample``."""
    sample: int
    """Place in the group, from 0."""
    token_ids: NDArray[np.int32]
    """int32 [T]."""
    prompt_length: int
    """Tokens of the prompt, 0 .. T."""
    loss_mask: NDArray[np.uint8]
    """uint8 [T]: 1 where the token is trained on. Position 0 never is: nothing precedes it."""
    logprobs: NDArray[np.float32]
    """float32 [T]: what the engine sampled with; 0 for the prompt and for data. Never read for SFT."""
    reward: float = 0.0
    version: int = 0
    """Oldest weights version that sampled a token of it."""
    truncated: bool = False
    """Whether it was cut off at the longest completion."""
    token_rewards: NDArray[np.float32] | None = None
    """float32 [T]: process or token rewards, beside ``reward``."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """float32 [T]: logprobs of a teacher, for distillation."""
    prompt: str = ""
    completion: str = ""
    """Texts, for people: nothing is computed from them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers that the reward returned; told of, never trained on."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that was made."""

    step: int
    metrics: Mapping[str, float]
    """By the field's names; see ``rollout_workers.trainer.metrics``."""
    advantages: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """(group_key, sample) -> advantage, over a sample's tokens the mean; empty where the algorithm estimates none."""


class LearnerError(Exception):
    """Base of what the learner refuses. ``reason`` is for machines, the message says where and how to fix."""

    reason = "LEARNER"


class NonFiniteGradient(LearnerError):
    """Loss or gradient was infinite or not a number. The step was refused: weights, optimizer and step are as before."""

    reason = "NON_FINITE_GRADIENT"


class ExplodingGradient(LearnerError):
    """The norm of the gradient was beyond ``refuse_grad_norm``. The step was refused, as with ``NonFiniteGradient``."""

    reason = "EXPLODING_GRADIENT"


class StepOutOfTurn(LearnerError):
    """A step that doesn't follow the one the state stands at."""

    reason = "STEP_OUT_OF_TURN"


class BadBatch(LearnerError):
    """A batch that can't be trained on: empty, without a trained token, or with arrays that don't fit each other."""

    reason = "BAD_BATCH"


class BadSettings(LearnerError):
    """Settings that don't fit the model: the run can't begin, however often it is tried."""

    reason = "BAD_SETTINGS"
    permanent = True


class RankLost(LearnerError):
    """A rank of the learner died, hung or stands elsewhere than the others: new processes go on from the last state."""

    reason = "RANK_LOST"


class StateUnreadable(LearnerError):
    """A state folder that is missing, damaged, or of another model."""

    reason = "STATE_UNREADABLE"
