"""Rank 0 leads: it forwards each call of its trainer to the trainers of the other ranks."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rollout_workers.trainer.distributed.fsdp import Group
from rollout_workers.trainer.refusal import Refusals
from rollout_workers.trainer.state import Saving
from rollout_workers.trainer.trainer import Trainer, TrainerConfig
from rollout_workers.trainer.types import LearnerError, RankLost, StepResult, TrainSample
from rollout_workers.weights import WeightsDigest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that every rank's trainer makes."""

    method: str
    """The name of the method."""
    arguments: tuple[Any, ...]
    step: int
    """The step of the trainers before the call. A trainer at another step has missed a call."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments of the other ranks' trainers."""

    model_dir: str
    config: TrainerConfig


class LeadingTrainer(Trainer):
    """The trainer of rank 0, with the interface of a single trainer.

    If a rank dies, hangs longer than the group's time limit, or fails alone, the call and each
    later one raise ``RankLost``: the ranks are no longer in the same state, and the processes must
    be restarted.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        config: TrainerConfig,
        group: Group,
        *,
        lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """lost: called once, from any thread, when the ranks cannot continue."""
        others = replace(config, refusals=Refusals(config.refusals.action))  # only rank 0 saves batches and notifies
        group.send(Setup(os.fspath(model_dir), others))
        super().__init__(model_dir, config, group)
        self._group, self._lost, self._failure = group, lost, ""

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
        """The gathered weights under their Hugging Face names. Later steps do not change them."""
        with self._together("named_weights"):
            return iter(list(super().named_weights()))

    def weights_digest(self) -> WeightsDigest:
        """See ``Trainer``. The other ranks hash nothing."""
        with self._together("named_weights"):
            return super().weights_digest()

    def adapted(self) -> tuple[Mapping[str, Tensor], tuple[WeightsDigest, Mapping[str, Tensor]]]:
        """See ``Trainer``. The other ranks hash nothing."""
        with self._together("gather_adapted"):
            return super().adapted()

    def begin_save(self, directory: str | os.PathLike[str]) -> Saving:
        """See ``Trainer``. An error of the disk, which ``result`` raises, leaves the ranks as they
        are."""
        with self._together("begin_save", os.fspath(directory)):
            return super().begin_save(directory)

    def restore_point(self) -> None:
        """See ``Trainer``."""
        with self._together("mark"):
            self.mark()

    def load_state(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        """See ``Trainer``; every rank reads the folder."""
        with self._together("load_state", os.fspath(directory), step):
            super().load_state(directory, step)

    @contextmanager
    def _together(self, method: str, *arguments: Any) -> Iterator[None]:
        if self._failure:
            raise RankLost(self._failure)
        try:
            self._group.send(Call(method, arguments, self.step))
            yield
        except LearnerError:
            raise  # on all ranks
        except Exception as error:
            self._failure = (
                f"`{method}` at step {self.step} failed on some ranks of the learner: {error}. The learner restarts "
                "from its last state; see the log of the rank that exited"
            )
            self._lost(self._failure)
            raise RankLost(self._failure) from error


def follow(group: Group) -> None:
    """Make the calls that rank 0 makes, until it exits. Raises ``RankLost`` if this rank has missed
    one."""
    setup: Setup = group.receive()
    trainer = Trainer(setup.model_dir, setup.config, group)
    while True:
        try:
            call: Call = group.receive()
        except RuntimeError as error:
            log.info("rank 0 has exited: %s", str(error).splitlines()[0])
            return
        if call.step != trainer.step:
            raise RankLost(f"rank 0 is at step {call.step}, rank {group.rank} at step {trainer.step}")
        try:
            result = getattr(trainer, call.method)(*call.arguments)
            if isinstance(result, Iterator):
                deque(result, maxlen=0)
        except LearnerError as error:
            log.info("refused on every rank: %s", error)
