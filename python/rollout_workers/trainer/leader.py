"""Rank 0 leads: what is asked of its trainer, the other ranks' trainers are told to do with it."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout_workers.trainer.distributed.fsdp import Group
from rollout_workers.trainer.refusal import Refusals
from rollout_workers.trainer.state import write_state
from rollout_workers.trainer.trainer import Trainer, TrainerConfig
from rollout_workers.trainer.types import LearnerError, RankLost, StepResult, TrainSample

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """A call that every rank's trainer makes."""

    call: str
    """Name of the method."""
    arguments: tuple[Any, ...]
    step: int
    """What the trainers stand at before the call; one that doesn't has missed something."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What the other ranks' trainers are made from."""

    model_dir: str
    config: TrainerConfig


class LeadingTrainer(Trainer):
    """The trainer of rank 0, which is used as a trainer alone is.

    Where a rank dies, hangs past the group's time limit, or fails alone, the call raises ``RankLost``, and so does each one after
    it: the ranks no longer stand at the same place, and only new processes do.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        config: TrainerConfig,
        group: Group,
        *,
        lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """lost: told once that the ranks can't go on, from the thread that noticed."""
        others = replace(config, refusals=Refusals(config.refusals.action))  # rank 0 alone keeps batches and tells
        group.tell(Setup(os.fspath(model_dir), others))
        super().__init__(model_dir, config, group)
        self._group, self._lost, self._end = group, lost, ""

    def train_step(
        self, samples: Sequence[TrainSample], step: int, on_progress: Callable[[int, int], None] | None = None
    ) -> StepResult:
        """See ``Trainer``."""
        with self._together("train_step", list(samples), step):
            return super().train_step(samples, step, on_progress)

    def evaluate(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """See ``Trainer``."""
        with self._together("evaluate", list(samples)):
            return super().evaluate(samples)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, gathered; they stay as they are when the trainer goes on."""
        with self._together("named_weights"):
            return iter(list(super().named_weights()))

    @property
    def adapts(self) -> bool:
        """Never: over several ranks merged weights travel, whole."""
        return False

    def save_state(self, directory: str | os.PathLike[str]) -> list[Path]:
        """See ``Trainer``; this rank alone writes."""
        with self._together("capture"):
            state = self.capture()
        files = write_state(Path(directory), state)
        self.restore_point()
        return files

    def restore_point(self) -> None:
        """See ``Trainer``."""
        with self._together("mark"):
            self.mark()

    def load_state(self, directory: str | os.PathLike[str]) -> None:
        """See ``Trainer``; every rank reads the folder."""
        with self._together("load_state", os.fspath(directory)):
            super().load_state(directory)

    @contextmanager
    def _together(self, call: str, *arguments: Any) -> Iterator[None]:
        if self._end:
            raise RankLost(self._end)
        try:
            self._group.tell(Order(call, arguments, self.step))
            yield
        except LearnerError:
            raise  # on all ranks
        except Exception as error:
            self._end = (
                f"`{call}` at step {self.step} failed between the ranks of the learner: {error}. It begins anew from its last "
                "state; the log of the rank that left says why"
            )
            self._lost(self._end)
            raise RankLost(self._end) from error


def follow(group: Group) -> None:
    """Do what rank 0 does, for as long as it is there. Raises ``RankLost`` where this rank can't follow."""
    setup: Setup = group.hear()
    trainer = Trainer(setup.model_dir, setup.config, group)
    while True:
        try:
            order: Order = group.hear()
        except RuntimeError as error:
            log.info("rank 0 is gone: %s", str(error).splitlines()[0])
            return
        if order.step != trainer.step:
            raise RankLost(f"rank 0 stands at step {order.step}, rank {group.rank} at step {trainer.step}")
        try:
            result = getattr(trainer, order.call)(*order.arguments)
            if isinstance(result, Iterator):
                deque(result, maxlen=0)
        except LearnerError as error:
            log.info("refused, as on every rank: %s", error)
