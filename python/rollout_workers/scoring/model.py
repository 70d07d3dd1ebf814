"""A trained reward model: computes one score per completion from tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from rollout_workers.trainer.model.scorer import Scorer
from rollout_workers.trainer.objective.score import ending
from rollout_workers.trainer.packing import pack
from rollout_workers.trainer.types import BadSettings, TrainSample

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Scored:
    """A score, or the reason for a missing one."""

    score: float = 0.0
    reason: str = ""
    message: str = ""


class RewardModel:
    """Scores completions at the last token, the end of the sequence, like in training. Blocks; one
    call at a time."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype,
        end: int | None,
        tokens: int,
        alone: bool,
        device: str | None = None,
    ) -> None:
        """Load the model. Raises ``BadSettings`` for a folder without a trained head.

        end: id of the end-of-sequence token, which is appended to completions without it. tokens:
        maximum number of positions of a forward pass. alone: score each completion in a separate
        pass, so that its bits do not depend on others. device: None: the first GPU, else the CPU.
        """
        if not _has_head(Path(directory)):
            raise BadSettings(f"{os.fspath(directory)} is not a reward model: no file in it has the tensor `score.weight`")
        self._scorer = Scorer.load(directory, dtype=dtype, device=device)
        self._end, self._tokens, self._alone = end, tokens, alone
        config = self._scorer.model.config.get_text_config()
        self._longest = int(getattr(config, "max_position_embeddings", 0) or 0)
        self._vocabulary = int(config.vocab_size)

    @torch.no_grad()
    def score(self, groups: Sequence[tuple[Ids, Sequence[Ids]]], given_up: Callable[[], bool] = lambda: False) -> list[Scored]:
        """Score prompts int32[P] with their completions int32[N]. Returns one result per
        completion, in order.

        given_up: called between forward passes; after it returns True, the other completions are
        skipped.
        """
        samples: list[TrainSample] = []
        for number, (prompt, completions) in enumerate(groups):
            samples += [self._sample(str(number), place, prompt, ids) for place, ids in enumerate(completions)]
        problems = [self._problem(sample) for sample in samples]
        fine = [index for index, problem in enumerate(problems) if problem is None]
        ends = [ending(sample) for sample in samples]
        parts = [[index] for index in fine] if self._alone else [fine]
        scores = [0.0] * len(samples)
        for part in parts:
            if given_up():
                break
            for batch in pack(ends, part, tokens=self._tokens, share_prefixes=self._scorer.share_prefixes and not self._alone):
                for index, score in zip(batch.sample.tolist(), self._scorer.scores(batch).tolist(), strict=True):
                    scores[index] = score
        return [problem or _finite(score) for problem, score in zip(problems, scores, strict=True)]

    def _sample(self, group: str, place: int, prompt: Ids, completion: Ids) -> TrainSample:
        ids = np.concatenate((prompt, completion)).astype(np.int32)
        if self._end is not None and (not len(completion) or completion[-1] != self._end):
            ids = np.append(ids, np.int32(self._end))
        size = len(ids)
        return TrainSample(group, place, ids, len(prompt), np.zeros(size, np.uint8), np.zeros(size, np.float32))

    def _problem(self, sample: TrainSample) -> Scored | None:
        size = len(sample.token_ids)
        if not size:
            return Scored(reason="PROMPT_INVALID", message="the prompt and the completion are empty")
        if self._longest and size > self._longest:
            return Scored(
                reason="CONTEXT_OVERFLOW",
                message=f"prompt and completion have {size} tokens, but the model has {self._longest} positions",
            )
        if int(sample.token_ids.max()) >= self._vocabulary:
            return Scored(
                reason="VOCABULARY_MISMATCH", message=f"a token id is outside of the model's vocabulary of {self._vocabulary}"
            )
        return None


def _finite(score: float) -> Scored:
    return Scored(score) if math.isfinite(score) else Scored(reason="REWARD_BAD_RESULT", message=f"the model's score is {score}")


def _has_head(directory: Path) -> bool:
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if "score.weight" in set(file.keys()):
                return True
    return False
