"""Concurrent calls of the learner run one after the other."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollout.buffer.v1.buffer_pb2 import Batch
from rollout.weights.v1.weights_pb2 import WeightsManifest
from rollout_workers.learner.learner import Learner
from rollout_workers.learner.trainer_thread import TrainerThread
from rollout_workers.trainer import StepResult, TrainSample


class SlowTrainer:
    """A trainer whose writes of states and steps wait until ``go`` and ``train`` are set."""

    adapts = False

    def __init__(self) -> None:
        self.step, self.saving, self.go, self.train = 0, threading.Event(), threading.Event(), threading.Event()

    def begin_save(self, directory: Path) -> Any:
        copied = {"version": self.step, "digest": f"of step {self.step}", "tensors": [], "files": []}

        def result() -> list[Path]:
            self.saving.set()
            assert self.go.wait(60)
            (directory / "weights").mkdir(exist_ok=True)
            (directory / "weights" / "rollout_weights.json").write_text(json.dumps(copied))
            return []

        return SimpleNamespace(result=result)

    def train_step(self, samples: Sequence[TrainSample], step: int, on_progress: object = None) -> StepResult:
        assert self.train.wait(60)
        self.step = step
        return StepResult(step, {})

    def weights_digest(self) -> Any:
        return SimpleNamespace(root=f"of step {self.step}")


async def test_a_saved_state_has_the_digest_of_its_weights(tmp_path: Path) -> None:
    """Also if a step is made while the state is written."""
    trainer = SlowTrainer()
    thread = await TrainerThread.start(lambda: cast(Any, trainer))
    learner = Learner(thread, cast(Any, None))
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
        trainer.train.set()
        assert (await trained).weights_digest == "of step 1"
    assert not saved.done() and learner.activity.startswith("saving the state of step 0")
    trainer.go.set()
    assert (await saved)[1] == "of step 0"
    thread.close()


async def test_a_learner_reports_its_state_after_the_step_that_is_being_made() -> None:
    """The step was requested by a controller that died. Its successor must not see the state
    before, which the learner is about to leave."""
    trainer = SlowTrainer()
    trainer.train.set()
    thread = await TrainerThread.start(lambda: cast(Any, trainer))
    learner = Learner(thread, cast(Any, None))
    await learner.initialize("", 0)
    read: asyncio.Future[list[TrainSample]] = asyncio.get_running_loop().create_future()
    batch = Batch(run_id="run", step=1, batch_id="b")
    trained = asyncio.create_task(learner.train(batch, False, lambda: read, lambda *_: None))
    async with asyncio.timeout(60):
        while not learner.activity.startswith("reading the batch of step 1"):
            await asyncio.sleep(0)
        gone = asyncio.create_task(learner.initialize("", 0))
        successor = asyncio.create_task(learner.initialize("", 0))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        for _ in range(3):  # calls of the trainer, which the successor could have made
            await thread.run(lambda _: None)
        assert not successor.done() and not trained.done()
        read.set_result([])
        await successor
        assert learner.step == 1
        assert (await trained).weights_digest == "of step 1"
    thread.close()


async def test_a_save_of_adapters_hashes_the_model_only_if_the_step_has_no_digest(tmp_path: Path) -> None:
    class Adapting(SlowTrainer):
        adapts, digests = True, 0

        def weights_digest(self) -> Any:
            self.digests += 1
            return super().weights_digest()

    async def nothing() -> list[TrainSample]:
        return []

    trainer = Adapting()
    trainer.go.set()
    trainer.train.set()
    thread = await TrainerThread.start(lambda: cast(Any, trainer))
    learner = Learner(thread, cast(Any, FullDisk(0)), digests=False)
    await learner.initialize("", 0)
    for step, publish, hashed in ((1, True, 1), (2, False, 2), (3, True, 2)):
        batch = Batch(run_id="run", step=step, batch_id=f"b{step}")
        await learner.train(batch, publish, lambda: asyncio.ensure_future(nothing()), lambda *_: None)
        folder = tmp_path / str(step)
        folder.mkdir()
        for _ in range(2):
            assert (await learner.save(step, str(folder)))[1] == f"of step {step}"
        assert trainer.digests == hashed
    thread.close()


class FullDisk:
    """A publication whose first attempts find a full disk."""

    def __init__(self, attempts: int) -> None:
        self.attempts = attempts

    def publish(self, trainer: SlowTrainer) -> WeightsManifest:
        self.attempts -= 1
        if self.attempts >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return WeightsManifest(version=trainer.step, digest=f"of step {trainer.step}")

    def prepare(self, trainer: SlowTrainer) -> None: ...


async def test_a_step_whose_weights_found_a_full_disk_is_published_later() -> None:
    """The step is made once. A repeated call publishes its weights when there is space."""
    trainer = SlowTrainer()
    trainer.train.set()
    thread = await TrainerThread.start(lambda: cast(Any, trainer))
    learner = Learner(thread, cast(Any, FullDisk(2)))
    await learner.initialize("", 0)
    batch = Batch(run_id="run", step=1, batch_id="b")

    async def train() -> Any:
        async def nothing() -> list[TrainSample]:
            return []

        return await learner.train(batch, True, lambda: asyncio.ensure_future(nothing()), lambda *_: None)

    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            await train()
        assert trainer.step == 1
    assert (await train()).weights.digest == "of step 1"
    assert learner.weights.digest == "of step 1"
    thread.close()


async def test_weights_that_are_not_published_are_digested_only_if_every_step_has_a_digest() -> None:
    class Counted(SlowTrainer):
        digests = 0

        def weights_digest(self) -> Any:
            self.digests += 1
            return super().weights_digest()

    async def nothing() -> list[TrainSample]:
        return []

    trainer = Counted()
    trainer.train.set()
    thread = await TrainerThread.start(lambda: cast(Any, trainer))
    learner = Learner(thread, cast(Any, FullDisk(0)), digests=False)
    await learner.initialize("", 0)
    before = trainer.digests

    async def train(step: int, publish: bool) -> Any:
        batch = Batch(run_id="run", step=step, batch_id=f"b{step}")
        return await learner.train(batch, publish, lambda: asyncio.ensure_future(nothing()), lambda *_: None)

    assert (await train(1, False)).weights_digest == ""
    assert (await train(1, False)).weights_digest == "" and trainer.step == 1, "a repeated call makes no step"
    again = await train(1, True)
    assert (again.weights_digest, again.weights.digest) == ("of step 1", "of step 1")
    assert (await train(2, True)).weights_digest == "of step 2"
    assert trainer.digests == before
    thread.close()
