"""Calls that overlap take turns at the trainer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rollout.buffer.v1.buffer_pb2 import Batch
from rollout_workers.learner.learner import Learner
from rollout_workers.trainer import StepResult, TrainSample


class SlowToSave:
    """A trainer whose state takes until ``go`` to be written."""

    def __init__(self) -> None:
        self.step, self.saving, self.go = 0, threading.Event(), threading.Event()

    def save_state(self, directory: Path) -> list[Path]:
        self.saving.set()
        assert self.go.wait(60)
        return []

    def train_step(self, samples: Sequence[TrainSample], step: int, on_progress: object = None) -> StepResult:
        self.step = step
        return StepResult(step, {})

    def weights_digest(self) -> Any:
        return SimpleNamespace(root=f"of step {self.step}")


async def test_a_state_has_the_digest_of_its_own_weights(tmp_path: Path) -> None:
    """A step that is asked for while the state is written comes after the digest."""
    trainer, learner = SlowToSave(), Learner(cast(Any, None))
    await learner.load(lambda: cast(Any, trainer))
    await learner.initialize("", 0)
    saved = asyncio.create_task(learner.save(0, str(tmp_path)))
    assert await asyncio.to_thread(trainer.saving.wait, 60)

    async def nothing() -> list[TrainSample]:
        return []

    batch = Batch(run_id="run", step=1, batch_id="b")
    trained = asyncio.create_task(learner.train(batch, False, lambda: asyncio.ensure_future(nothing()), lambda *_: None))
    async with asyncio.timeout(60):
        while not learner.activity.startswith("training step 1"):
            await asyncio.sleep(0)
    trainer.go.set()
    assert (await saved)[1] == "of step 0"
    assert (await trained).weights_digest == "of step 1"
    learner.close()
