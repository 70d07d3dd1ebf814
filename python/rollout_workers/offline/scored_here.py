"""Scores completions with a reward model that is loaded into this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.config.v1.run_config_pb2 import ScoringModelConfig
from rollout.plugin import RewardFailed, RewardImportError, RewardTimeout, Score
from rollout_workers.rewards.rewards import RewardGroup


class RewardModelHere:
    """A :class:`~rollout_workers.rewards.rewards.RewardSource` that scores each completion on
    its own, one call at a time."""

    def __init__(self, config: ScoringModelConfig, base_dir: str, end: int | None) -> None:
        """end: token ID that ends a sequence."""
        self._config, self._folder, self._end = config, os.path.join(base_dir, config.path), end
        self._model: Any = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Load the model. Raises :class:`RewardImportError`."""
        try:
            self._model = await asyncio.to_thread(self._load)
        except Exception as error:
            raise RewardImportError(
                f"can't load the reward model {self._folder}: {error}", fix="check `reward.model.path`"
            ) from error

    async def call(self, groups: Sequence[RewardGroup], timeout: float) -> list[Score]:
        """The scores of all samples. Raises :class:`RewardFailed`, :class:`RewardTimeout`."""
        asked = [
            (_ids(group.samples[0].prompt_ids if group.samples else b""), [_ids(s.token_ids) for s in group.samples])
            for group in groups
        ]
        loop = asyncio.get_running_loop()
        late = loop.time() + timeout
        async with self._turn:
            results = await asyncio.to_thread(self._model.score, asked, lambda: loop.time() > late)
        if loop.time() > late:
            raise RewardTimeout(f"the reward model took longer than {timeout:g} s", fix="raise `reward.timeout_seconds`")
        for result in results:
            if result.reason:
                raise RewardFailed(f"the reward model: {result.reason}: {result.message}")
        return [Score(result.score) for result in results]

    async def close(self) -> None:
        """Does nothing: the model is freed with the process."""

    def _load(self) -> Any:
        import torch

        from rollout_workers.scoring.model import RewardModel

        return RewardModel(
            self._folder,
            dtype=getattr(torch, self._config.dtype or "float32"),
            end=self._end,
            tokens=self._config.tokens_per_batch or 16_384,
            alone=True,
        )


def _ids(data: bytes) -> Any:
    return np.frombuffer(data, np.int32)
