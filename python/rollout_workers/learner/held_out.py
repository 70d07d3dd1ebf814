"""The loss on the held-out rows of a run that trains on data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from rollout.environment import Refusal
from rollout.learner.v1 import learner_pb2 as pb
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.data.prompts import PromptReader, Text
from rollout_workers.data.rows import Rows, rows_of
from rollout_workers.data.supervised import Example
from rollout_workers.trainer import Trainer
from rollout_workers.trainer.types import TrainSample
from rollout_workers.worker.spec import held_out_file, model_directory
from rollout_workers.worker.status import EdgeError


class NoHeldOut(EdgeError):
    """The plan has no held-out rows whose loss can be computed."""

    reason: ClassVar[str] = "NO_EVALUATION"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The samples of an evaluation."""

    samples: Sequence[TrainSample]
    """In the order of the rows; the two samples of a pair share a group."""
    rows: int
    refused: int
    """The number of rows that cannot be used, such as too long ones."""


class HeldOutLoss:
    """Computes the loss on the held-out rows, which it reads on first use."""

    def __init__(self, read: Callable[[], HeldOut | None]) -> None:
        """read: reads the rows; None: the plan has none."""
        self._read = read
        self._rows: HeldOut | None = None

    def of(self, trainer: Trainer) -> pb.EvaluateLossResponse:
        """The loss of the trainer's current weights; blocks. Raises :class:`NoHeldOut`,
        ``BadBatch``, and the errors of reading the rows."""
        if self._rows is None:
            self._rows = self._read()
        if self._rows is None:
            raise NoHeldOut("the plan has no held-out rows to compute the loss of", fix="set `data.eval` and `eval.every_steps`")
        metrics = trainer.evaluate(self._rows.samples) if self._rows.samples else {}
        return pb.EvaluateLossResponse(metrics=metrics, rows=self._rows.rows, refused=self._rows.refused)


def held_out_of(spec: WorkerSpec) -> HeldOut | None:
    """Read and tokenize the plan's held-out rows; None if it has none, or if evaluations sample
    answers to them.

    Raises ``OSError`` if model or data cannot be read, ``PromptInvalid`` if the tokenizer has no
    end-of-sequence token.
    """
    config = spec.plan.config
    file = held_out_file(spec)
    if not config.eval.every_steps or not file or config.HasField("reward"):
        return None
    text = Text.load(model_directory(spec))
    made_by = rows_of(config, text, PromptReader.of_rows(config, text))
    if made_by is None:
        return None
    return read_rows(Path(file), made_by, config.eval.max_prompts)


def read_rows(path: Path, made_by: Rows, most: int) -> HeldOut:
    """The first ``most`` rows of a file (JSON Lines; 0: all)."""
    rows = [line for line in path.read_bytes().splitlines() if line.strip()]
    rows = rows[:most] if most else rows
    samples: list[TrainSample] = []
    refused = 0
    for row, examples in enumerate(made_by.examples(rows)):
        if isinstance(examples, Refusal):
            refused += 1
            continue
        several = [examples] if isinstance(examples, Example) else examples
        samples += [_sample(f"{row:012}", number, example) for number, example in enumerate(several)]
    return HeldOut(samples, len(rows), refused)


def _sample(group: str, number: int, example: Example) -> TrainSample:
    return TrainSample(
        group_key=group,
        sample=number,
        token_ids=example.token_ids.astype(np.int32),
        prompt_length=example.prompt_tokens,
        loss_mask=example.loss_mask,
        logprobs=np.zeros(len(example.token_ids), np.float32),
        reward=example.reward,
    )
