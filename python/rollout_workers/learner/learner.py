"""Serializes all access to the trainer through one thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from blake3 import blake3

from rollout.buffer.v1.buffer_pb2 import Batch
from rollout.learner.v1 import learner_pb2 as pb
from rollout.snapshot.v1.snapshot_pb2 import SnapshotFile
from rollout.weights.v1.weights_pb2 import WeightsManifest, WeightsOffer
from rollout_workers.learner.completions import Keep
from rollout_workers.learner.held_out import HeldOut
from rollout_workers.learner.publication import Publication
from rollout_workers.trainer import StepOutOfTurn, Trainer
from rollout_workers.trainer.types import TrainSample
from rollout_workers.worker.status import EdgeError

log = logging.getLogger(__name__)
T = TypeVar("T")
Progress = Callable[[int, int], None]

_PREPARE_SECONDS = 0.02


class NotInitialized(EdgeError):
    """A call that needs the model came before ``Initialize``."""

    reason: ClassVar[str] = "LEARNER_NOT_INITIALIZED"


class StepMismatch(EdgeError):
    """The requested step is not the learner's current step."""

    reason: ClassVar[str] = "STEP_OUT_OF_TURN"


class NoHeldOut(EdgeError):
    """The plan has no held-out rows whose loss can be computed."""

    reason: ClassVar[str] = "NO_EVALUATION"


@dataclass(slots=True)
class _LastStep:
    """The result of the last step, for repeated calls."""

    step: int
    batch_id: str
    result: pb.TrainResult


class Learner:
    """Runs the trainer in its own thread. Call the methods from one event loop; concurrent calls
    run one after the other."""

    def __init__(
        self, publication: Publication, keep: Keep | None = None, held_out: Callable[[], HeldOut | None] = lambda: None
    ) -> None:
        """keep: selects the completions that a step's result contains; None: none. held_out: reads
        the rows for evaluations."""
        self._publication, self._keep = publication, keep
        self._read_held_out = held_out
        self._rows: HeldOut | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train")
        self._trainer: Trainer | None = None
        self._last: _LastStep | None = None
        self._current: tuple[int, str, asyncio.Task[pb.TrainResult]] | None = None
        self._listeners: list[Progress] = []
        self.initialized = False
        self.digest = ""
        self.activity = "loading the model"

    @property
    def step(self) -> int:
        """The current step."""
        return self._trainer.step if self._trainer else 0

    async def load(self, build: Callable[[], Trainer]) -> None:
        """Build the trainer. Call it once, before any other method."""
        self._trainer = await self._run(build)
        self.activity = "waiting for Initialize (learner-controller)"

    async def initialize(self, state_directory: str, step: int) -> None:
        """Start from the model or from a saved state. A learner that is at ``step`` or later keeps
        its state.

        Raises ``StateUnreadable``.
        """
        trainer = self._model()
        if state_directory and not (self.initialized and trainer.step >= step):
            self.activity = f"loading the state of step {step}"
            await self._run(lambda: trainer.load_state(state_directory))
            self._last = None
            if trainer.step != step:
                raise StepMismatch(f"{state_directory} is the state of step {trainer.step}, not {step}")
        self.digest = (await self._run(trainer.weights_digest)).root
        self.initialized = True
        self.activity = "waiting for a batch (learner-controller)"

    async def train(
        self, batch: Batch, publish: bool, read: Callable[[], asyncio.Future[list[TrainSample]]], progress: Progress
    ) -> pb.TrainResult:
        """Make the batch's step. A repeated call with the same batch returns the same result.

        read: reads the samples. progress: called on the event loop. Raises ``StepOutOfTurn``,
        ``BadBatch``, ``NonFiniteGradient``, and the errors of ``read``; then the step was not made.
        """
        if not self.initialized:
            raise NotInitialized("the learner has no model yet", fix="call Initialize first")
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
            result.weights.CopyFrom(await self.publish())
        return result

    async def evaluate(self, step: int) -> pb.EvaluateLossResponse:
        """The loss of the weights of ``step`` on the held-out rows, which are read on first use.
        Raises ``StepMismatch``, ``NoHeldOut``, ``BadBatch``, and the errors of reading them."""
        trainer = self._model()

        def evaluate() -> pb.EvaluateLossResponse:
            if trainer.step != step:
                raise StepMismatch(f"the learner is at step {trainer.step}, not {step}", fix="evaluate the current step")
            rows = self._held_out()
            metrics = trainer.evaluate(rows.samples) if rows.samples else {}
            return pb.EvaluateLossResponse(metrics=metrics, rows=rows.rows, refused=rows.refused)

        before, self.activity = self.activity, f"computing the loss of held-out rows after step {step}"
        try:
            return await self._run(evaluate)
        finally:
            self.activity = before

    async def publish(self) -> WeightsManifest:
        """Write the weights of the current step."""
        trainer = self._model()
        manifest = await self._run(lambda: self._publication.publish(trainer))
        self._prepare(trainer)
        self.digest = manifest.digest
        return manifest

    async def offers(self, digest: str, base_digest: str, *, whole: bool, store: bool) -> list[WeightsOffer]:
        """Ways to get a published version without access to its folder. Raises ``VersionNotFound``
        and the errors of storing."""
        if whole and self._publication.catalog.adapts(digest):
            trainer = self._model()
            await self._run(lambda: self._publication.make_whole(trainer))
        return await self._publication.catalog.offers(digest, base_digest, whole=whole, store=store)

    async def save(self, step: int, directory: str) -> tuple[list[SnapshotFile], str]:
        """Write the state of ``step`` to a folder. Returns its files with digests, and the digest
        of the weights."""
        trainer = self._model()

        def write() -> tuple[list[SnapshotFile], str]:
            if trainer.step != step:
                raise StepMismatch(f"the learner is at step {trainer.step}, not {step}", fix="save the current step")
            root = Path(directory)
            return [_described(root, path) for path in trainer.save_state(root)], trainer.weights_digest().root

        before, self.activity = self.activity, f"saving the state of step {step}"
        try:
            return await self._run(write)  # including the digest, before the next step changes the weights
        finally:
            self.activity = before

    def close(self) -> None:
        """Accept no more work. A running step finishes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def drain(self) -> None:
        """Wait until no step is running."""
        if self._current is not None:
            await asyncio.gather(self._current[2], return_exceptions=True)

    async def _make(self, batch: Batch, publish: bool, read: Callable[[], asyncio.Future[list[TrainSample]]]) -> pb.TrainResult:
        trainer, last = self._model(), self._last
        if last and (last.step, last.batch_id) == (batch.step, batch.batch_id) and trainer.step == batch.step:
            return last.result
        if batch.step != trainer.step + 1:
            raise StepOutOfTurn(
                f"step {batch.step} was requested, but the learner is at step {trainer.step}"
                + (f", made from batch {last.batch_id}" if last and last.step == batch.step else "")
            )
        loop = asyncio.get_running_loop()
        self.activity = f"reading the batch of step {batch.step}"
        try:
            began = time.perf_counter()
            samples = await read()
            read_seconds = time.perf_counter() - began
            self.activity = f"training step {batch.step} on {len(samples)} samples"
            progress = _throttled(loop, self._report_progress)
            result = await self._run(lambda: self._step(trainer, samples, batch.step, publish, progress))
            if publish:
                self._prepare(trainer)
            result.metrics["time/read"] = read_seconds
            self.digest = result.weights_digest
            self._last = _LastStep(batch.step, batch.batch_id, result)
            return result
        finally:
            self.activity = "waiting for a batch (learner-controller)"

    def _step(self, trainer: Trainer, samples: list[TrainSample], step: int, publish: bool, progress: Progress) -> pb.TrainResult:
        """Make a step and compute the digest of its weights, or write them. Runs in the trainer's
        thread."""
        made = trainer.train_step(samples, step, progress)
        result = pb.TrainResult(step=step, metrics=dict(made.metrics))
        if self._keep is not None:
            result.completions.extend(self._keep.of(step, samples, made.advantages))
        began = time.perf_counter()
        if publish:
            result.weights.CopyFrom(self._publication.publish(trainer))
            result.weights_digest = result.weights.digest
        else:
            result.weights_digest = trainer.weights_digest().root
        result.metrics["time/publish"] = time.perf_counter() - began
        return result

    def _held_out(self) -> HeldOut:
        if self._rows is None:
            self._rows = self._read_held_out()
        if self._rows is None:
            raise NoHeldOut("the plan has no held-out rows to compute the loss of", fix="set `data.eval` and `eval.every_steps`")
        return self._rows

    def _prepare(self, trainer: Trainer) -> None:
        """Reserve memory for the next weights in the trainer's thread, a moment later so that it
        does not delay this version."""

        def prepare() -> None:
            with contextlib.suppress(RuntimeError):  # closed
                self._thread.submit(self._publication.prepare, trainer).add_done_callback(_log_failure)

        asyncio.get_running_loop().call_later(_PREPARE_SECONDS, prepare)

    def _report_progress(self, done: int, total: int) -> None:
        for listener in list(self._listeners):
            listener(done, total)

    def _model(self) -> Trainer:
        if self._trainer is None:
            raise NotInitialized("the model is still being loaded", fix="wait until the worker is registered")
        return self._trainer

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _log_failure(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("could not prepare for the next weights: %s", error)


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


def _described(root: Path, path: Path) -> SnapshotFile:
    digest = blake3(max_threads=blake3.AUTO).update_mmap(str(root / path)).hexdigest()
    return SnapshotFile(path=path.as_posix(), digest=f"blake3-{digest}", bytes=(root / path).stat().st_size)
