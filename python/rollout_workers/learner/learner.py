"""The learner of a run: its trainer, steps, weights, and states."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from blake3 import blake3

from rollout.buffer.v1.buffer_pb2 import Batch
from rollout.learner.v1 import learner_pb2 as pb
from rollout.snapshot.v1.snapshot_pb2 import SnapshotFile
from rollout_workers.learner.base import Base
from rollout_workers.learner.completions import Keep
from rollout_workers.learner.held_out import HeldOut, HeldOutLoss
from rollout_workers.learner.publication import Publication
from rollout_workers.learner.published import PublishedWeights
from rollout_workers.learner.steps import Progress, ReadSamples, Steps
from rollout_workers.learner.trainer_thread import TrainerThread
from rollout_workers.trainer import Trainer
from rollout_workers.weights import read_manifest
from rollout_workers.worker.status import EdgeError

if TYPE_CHECKING:  # it imports torch, which workers without a model lack
    from rollout_workers.trainer.state import Saving

log = logging.getLogger(__name__)


class NotInitialized(EdgeError):
    """A call that needs the model came before ``Initialize``."""

    reason: ClassVar[str] = "LEARNER_NOT_INITIALIZED"


class StepMismatch(EdgeError):
    """The requested step is not the learner's current step."""

    reason: ClassVar[str] = "STEP_OUT_OF_TURN"


class Learner:
    """Answers the calls of the learner-controller. Call the methods from one event loop; concurrent
    calls run one after the other."""

    def __init__(
        self,
        thread: TrainerThread,
        publication: Publication,
        keep: Keep | None = None,
        held_out: Callable[[], HeldOut | None] = lambda: None,
        base: Base | None = None,
        *,
        digests: bool = True,
    ) -> None:
        """keep: selects the completions that a step's result contains; None: none. held_out: reads
        the rows for evaluations. base: the model, if the run trains adapters. digests: as in
        ``Steps``."""
        self._thread, self._base = thread, base
        self.weights = PublishedWeights(thread, publication)
        self._steps = Steps(thread, self.weights, keep, digests=digests)
        self._held_out = HeldOutLoss(held_out)
        self._saves: dict[tuple[int, str], asyncio.Task[tuple[list[SnapshotFile], str]]] = {}
        self.initialized = False

    @property
    def step(self) -> int:
        """The current step."""
        return self._thread.step

    @property
    def trained(self) -> tuple[int, int] | None:
        """``Steps.trained``."""
        return self._steps.trained

    @property
    def activity(self) -> str:
        """What the learner does now."""
        return self._thread.activity

    @property
    def wait(self) -> tuple[str, str, float] | None:
        """``TrainerThread.wait``."""
        return self._thread.wait

    async def initialize(self, state_directory: str, step: int, *, replace: bool = False) -> None:
        """Start from the model or from a saved state. A learner that is at ``step`` or later keeps
        its state, after the step that an earlier controller requested, if one is being made.

        replace: load the state in any case, and continue with it as the state of ``step``, whatever
        step saved it. Raises ``StateUnreadable``.
        """
        await self._steps.drain()
        if replace:
            with self._thread.doing("LOAD_STATE", f"restoring a state after step {step}"):
                await self._thread.run(lambda trainer: trainer.load_state(state_directory, step))
            self._steps.forget()
        elif state_directory and not (self.initialized and self.step >= step):
            with self._thread.doing("LOAD_STATE", f"loading the state of step {step}"):
                await self._thread.run(lambda trainer: trainer.load_state(state_directory))
            self._steps.forget()
            if self.step != step:
                raise StepMismatch(f"{state_directory} is the state of step {self.step}, not {step}")
        await self.weights.read_digest()
        self.initialized = True
        self._thread.ready_for_batches()

    async def train(self, batch: Batch, publish: bool, read: ReadSamples, progress: Progress) -> pb.TrainResult:
        """``Steps.train``. Raises :class:`NotInitialized`."""
        if not self.initialized:
            raise NotInitialized("the learner has no model yet", fix="call Initialize first")
        return await self._steps.train(batch, publish, read, progress)

    async def evaluate(self, step: int) -> pb.EvaluateLossResponse:
        """The loss of the weights of ``step`` on the held-out rows, which are read on first use.
        Raises ``StepMismatch``, ``NoHeldOut``, ``BadBatch``, and the errors of reading them."""

        def evaluate(trainer: Trainer) -> pb.EvaluateLossResponse:
            _require_step(trainer, step, "evaluate")
            return self._held_out.of(trainer)

        with self._thread.doing("EVALUATE_LOSS", f"computing the loss of held-out rows after step {step}"):
            return await self._thread.run(evaluate)

    async def save(self, step: int, directory: str) -> tuple[list[SnapshotFile], str]:
        """Write the state of ``step`` to a folder, or wait for the write that ``copy`` began.
        Returns its files with digests, and the digest of the weights. Raises what ``copy`` raises,
        and ``OSError``."""
        with contextlib.ExitStack() as shown:
            if (step, directory) not in self._saves:
                await self.copy(step, directory)
                shown.enter_context(self._thread.doing("SAVE_STATE", f"saving the state of step {step}"))
            write = self._saves[step, directory]
            try:
                return await asyncio.shield(write)
            finally:
                if write.done():
                    self._saves.pop((step, directory), None)

    async def copy(self, step: int, directory: str) -> None:
        """Copy the state of ``step`` in memory, compute the digest of merged adapters if the step
        has none yet, and begin to write it to a folder. The next step may begin when this returns.
        Raises ``StepMismatch``, ``BaseModelChanged``."""
        if (step, directory) in self._saves and not self._saves[step, directory].done():
            return
        root = Path(directory)

        def begin(trainer: Trainer) -> tuple[Saving, str]:
            _require_step(trainer, step, "save")
            saving = trainer.begin_save(root)
            return saving, (self.weights.digest or self.weights.compute_digest(trainer)) if trainer.adapts else ""

        with self._thread.doing("SAVE_STATE", f"copying the state of step {step}"):
            saving, merged = await self._thread.run(begin)
        write = asyncio.create_task(self._write(step, root, saving, merged))
        write.add_done_callback(_log_failure)
        self._saves[step, directory] = write

    async def _write(self, step: int, root: Path, saving: Saving, merged: str) -> tuple[list[SnapshotFile], str]:
        def end() -> tuple[list[SnapshotFile], str]:
            files = [_described(root, path) for path in saving.result()]
            return files, merged or read_manifest(root / "weights").digest

        files, digest = await asyncio.to_thread(end)
        return files + (await self._base.stage(root) if self._base is not None else []), digest

    async def drain(self) -> None:
        """Wait until no step is running and no state is being written, and remove temporary
        files."""
        await self._steps.drain()
        await asyncio.gather(*self._saves.values(), return_exceptions=True)
        if self._base is not None:
            await self._base.close()


def _require_step(trainer: Trainer, step: int, action: str) -> None:
    if trainer.step != step:
        raise StepMismatch(f"the learner is at step {trainer.step}, not {step}", fix=f"{action} the current step")


def _log_failure(write: asyncio.Task[tuple[list[SnapshotFile], str]]) -> None:
    if not write.cancelled() and (error := write.exception()) is not None:
        log.warning("a state was not written: %s", error)


def _described(root: Path, path: Path) -> SnapshotFile:
    digest = blake3(max_threads=blake3.AUTO).update_mmap(str(root / path)).hexdigest()
    return SnapshotFile(path=path.as_posix(), digest=f"blake3-{digest}", bytes=(root / path).stat().st_size)
