"""Makes training steps, each batch once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rollout.buffer.v1.buffer_pb2 import Batch
from rollout.learner.v1 import learner_pb2 as pb
from rollout_workers.learner.completions import Keep
from rollout_workers.learner.published import PublishedWeights
from rollout_workers.learner.trainer_thread import TrainerThread
from rollout_workers.trainer import StepOutOfTurn, Trainer
from rollout_workers.trainer.types import TrainSample

Progress = Callable[[int, int], None]
ReadSamples = Callable[[], asyncio.Future[list[TrainSample]]]


@dataclass(frozen=True, slots=True)
class _LastStep:
    """The result of the last step, for repeated calls. finished: its weights are written."""

    step: int
    batch_id: str
    result: pb.TrainResult
    finished: bool


class Steps:
    """Makes the step of each batch once. Calls for the same batch share the step and its result."""

    def __init__(self, thread: TrainerThread, weights: PublishedWeights, keep: Keep | None, *, digests: bool = True) -> None:
        """keep: selects the completions that a step's result contains; None: none. digests: the
        weights of every step are digested, also of those that are not published."""
        self._thread, self._weights, self._keep, self._digests = thread, weights, keep, digests
        self._last: _LastStep | None = None
        self._current: tuple[int, str, asyncio.Task[pb.TrainResult]] | None = None
        self._listeners: list[Progress] = []
        self.trained: tuple[int, int] | None = None
        """Step and finished micro-batches of the step that is being made; None: there is none. May
        be read in any thread."""

    async def train(self, batch: Batch, publish: bool, read: ReadSamples, progress: Progress) -> pb.TrainResult:
        """Make the batch's step. A repeated call with the same batch returns the same result.

        read: reads the samples. progress: called on the event loop. Raises ``StepOutOfTurn``,
        ``BadBatch``, ``NonFiniteGradient``, and the errors of ``read``; then the step was not made.
        """
        if self._current and not self._current[2].done():
            step, batch_id, task = self._current
            if (step, batch_id) != (batch.step, batch.batch_id):
                raise StepOutOfTurn(f"step {batch.step} was requested while step {step} is being made")
        else:
            task = asyncio.create_task(self._make(batch, publish, read), name=f"step {batch.step}")
            self._current = (batch.step, batch.batch_id, task)
        self._listeners.append(progress)
        try:
            result = await asyncio.shield(task)  # the step continues if the caller disconnects
        finally:
            self._listeners.remove(progress)
        if publish and not result.HasField("weights"):
            result.weights.CopyFrom(await self._weights.publish())
            result.weights_digest = result.weights.digest
        return result

    def forget(self) -> None:
        """Drop the result of the last step, because the trainer has loaded another state."""
        self._last = None

    async def drain(self) -> None:
        """Wait until no step is running. A step continues if the caller is canceled."""
        if self._current is not None:
            await asyncio.wait([self._current[2]])

    async def _make(self, batch: Batch, publish: bool, read: ReadSamples) -> pb.TrainResult:
        step, last = self._thread.step, self._last
        if last and (last.step, last.batch_id) == (batch.step, batch.batch_id) and step == batch.step:
            if not last.finished:  # the disk was full when the weights were written
                await self._finish(last.result, publish)
            return last.result
        if batch.step != step + 1:
            raise StepOutOfTurn(
                f"step {batch.step} was requested, but the learner is at step {step}"
                + (f", made from batch {last.batch_id}" if last and last.step == batch.step else "")
            )
        began = time.perf_counter()
        with self._thread.doing("READ_BATCH", f"reading the batch of step {batch.step}"):
            samples = await read()
        read_seconds = time.perf_counter() - began
        progress = _throttled(asyncio.get_running_loop(), self._report_progress)
        with self._thread.doing("TRAIN", f"training step {batch.step} on {len(samples)} samples"):
            result = await self._thread.run(lambda trainer: self._step(trainer, samples, batch.step, progress))
            result.metrics["time/read"] = read_seconds
            self._last = _LastStep(batch.step, batch.batch_id, result, finished=False)  # also if its weights can't be written
            await self._finish(result, publish)
        return result

    async def _finish(self, result: pb.TrainResult, publish: bool) -> None:
        """Publish the weights of a step that was made, or only compute their digest if every step
        has one."""

        def finish(trainer: Trainer) -> None:
            began = time.perf_counter()
            if publish:
                result.weights.CopyFrom(self._weights.write(trainer))
                result.weights_digest = result.weights.digest
            elif self._digests:
                result.weights_digest = self._weights.compute_digest(trainer)
            result.metrics["time/publish"] = time.perf_counter() - began

        await self._thread.run(finish)
        if publish:
            self._weights.prepare()
        self._last = replace(self._last, finished=True) if self._last else None

    def _step(self, trainer: Trainer, samples: list[TrainSample], step: int, progress: Progress) -> pb.TrainResult:
        """Make a step. Runs in the trainer's thread."""

        def trained(done: int, total: int) -> None:
            self.trained = (step, done)
            progress(done, total)

        self.trained = (step, 0)
        try:
            made = trainer.train_step(samples, step, trained)
        finally:
            self.trained = None
        result = pb.TrainResult(step=step, metrics=dict(made.metrics))
        if self._keep is not None:
            result.completions.extend(self._keep.of(step, samples, made.advantages))
        return result

    def _report_progress(self, done: int, total: int) -> None:
        for listener in list(self._listeners):
            listener(done, total)


def _throttled(loop: asyncio.AbstractEventLoop, report: Progress, seconds: float = 0.2) -> Progress:
    """``report`` on the loop, at most every ``seconds``."""
    last = time.monotonic()

    def on_progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            loop.call_soon_threadsafe(report, done, total)

    return on_progress
