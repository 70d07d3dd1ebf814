"""LearnerWorkerService: the learner-controller's calls to a learner worker."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import grpc

from rollout.learner.v1 import learner_pb2 as pb
from rollout.learner.v1.learner_pb2_grpc import LearnerWorkerServiceServicer
from rollout.wait.v1.wait_pb2 import Wait
from rollout_workers.learner.learner import Learner
from rollout_workers.learner.payload import read_batch
from rollout_workers.learner.trainer_thread import THREAD
from rollout_workers.trainer.types import TrainSample
from rollout_workers.weights.transfer.publish_folder import Superseded
from rollout_workers.worker.discovery import Services
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.status import Draining, InvalidRequest, RunMismatch
from rollout_workers.worker.telemetry import Meters

log = logging.getLogger(__name__)

_STDLIB = sysconfig.get_path("stdlib")
_SLOW_SECONDS = 10.0  # without a micro-batch, after which the learner counts as hanging


def _at() -> str:
    """The line of the trainer's thread that is not in Python's library, for people; empty if it
    computes nothing."""
    thread = next((thread for thread in threading.enumerate() if thread.name.startswith(THREAD)), None)
    if thread is None or thread.ident is None:
        return ""
    frame = sys._current_frames().get(thread.ident)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and os.path.dirname(frame.f_code.co_filename).startswith(_STDLIB) and frame.f_back is not None:
        if "site-packages" in frame.f_code.co_filename:
            break
        frame = frame.f_back
    if frame is None:
        return ""
    return f", and is at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"


class LearnerServer(LearnerWorkerServiceServicer):
    """The servicer. ``worker.serving`` authenticates and validates requests before, and maps errors
    after."""

    def __init__(
        self,
        who: Identity,
        learner: Learner,
        services: Services,
        lifecycle: Lifecycle,
        still: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
    ) -> None:
        """still: for how long the learner has finished no micro-batch of its step, and after how
        long it is restarted (:attr:`Watchdog.still`)."""
        self._still = still
        self._who, self._learner, self._services, self._lifecycle = who, learner, services, lifecycle
        self._meters = Meters()

    async def Initialize(self, request: pb.InitializeRequest, context: grpc.aio.ServicerContext) -> pb.InitializeResponse:
        self._check_run(request.run_id)
        await self._learner.initialize(request.state_directory, request.step, replace=request.replace)
        log.info("at step %d, %s", self._learner.step, self._learner.weights.digest)
        return pb.InitializeResponse(
            step=self._learner.step, weights_digest=self._learner.weights.digest, process_id=self._who.process
        )

    async def Train(self, request: pb.TrainRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.TrainResponse]:
        self._check_run(request.run_id)
        if request.batch.step != request.step:
            mismatch = f"the batch has step {request.batch.step}, but the request has step {request.step}"
            raise InvalidRequest(mismatch, violations=[("batch.step", mismatch)])
        if self._lifecycle.leaving:
            raise Draining("the worker is shutting down", retry_seconds=1.0)
        pieces: asyncio.Queue[pb.TrainProgress | None] = asyncio.Queue()

        def read() -> asyncio.Future[list[TrainSample]]:
            return asyncio.ensure_future(read_batch(request.batch, self._services))

        def progress(done: int, total: int) -> None:
            pieces.put_nowait(pb.TrainProgress(done=done, total=total))

        work = asyncio.create_task(self._learner.train(request.batch, request.publish, read, progress))
        work.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield pb.TrainResponse(progress=piece)
            with self._leaving_superseded():
                result = work.result()
        finally:
            work.cancel()
        self._meters.train_seconds.record(result.metrics["time/step"])
        yield pb.TrainResponse(result=result)

    async def PublishWeights(
        self, request: pb.PublishWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.PublishWeightsResponse:
        self._check_run(request.run_id)
        with self._leaving_superseded():
            return pb.PublishWeightsResponse(weights=await self._learner.weights.publish())

    async def OfferWeights(self, request: pb.OfferWeightsRequest, context: grpc.aio.ServicerContext) -> pb.OfferWeightsResponse:
        self._check_run(request.run_id)
        offers = await self._learner.weights.offers(request.digest, request.base_digest, whole=request.whole, store=request.store)
        return pb.OfferWeightsResponse(offers=offers)

    async def EvaluateLoss(self, request: pb.EvaluateLossRequest, context: grpc.aio.ServicerContext) -> pb.EvaluateLossResponse:
        self._check_run(request.run_id)
        return await self._learner.evaluate(request.step)

    async def SaveState(self, request: pb.SaveStateRequest, context: grpc.aio.ServicerContext) -> pb.SaveStateResponse:
        self._check_run(request.run_id)
        if request.copied:
            await self._learner.copy(request.step, request.directory)
            return pb.SaveStateResponse()
        files, digest = await self._learner.save(request.step, request.directory)
        return pb.SaveStateResponse(files=files, weights_digest=digest)

    async def GetLearnerStatus(
        self, request: pb.GetLearnerStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLearnerStatusResponse:
        return pb.GetLearnerStatusResponse(
            step=self._learner.step,
            initialized=self._learner.initialized,
            activity=self._learner.activity,
            process_id=self._who.process,
            weights_digest=self._learner.weights.digest,
            wait=self._wait(),
        )

    def _wait(self) -> Wait | None:
        """What the learner computes now."""
        if self._learner.wait is None:
            return None
        reason, what, since = self._learner.wait
        worker, logs = self._who.worker, f"`rollout logs worker {self._who.run} {self._who.worker}`"
        evidence, fix = f"{worker} is {what}, for {time.time() - since:.0f} s", f"it ends by itself; see its output with {logs}"
        still, limit = self._still()
        if still >= _SLOW_SECONDS:
            evidence += f"; its process {os.getpid()} has finished no micro-batch for {still:.0f} s{_at()}"
            fix = f"`kill -9 {os.getpid()}` restarts it now; after {limit:g} s (limits.stall_seconds) it logs the stacks of its "
            fix += f"threads and is restarted; see its output with {logs}"
        wait = Wait(
            owner=worker,
            reason=reason,
            evidence=evidence,
            fix=fix,
            subjects=[worker],
        )
        wait.since.FromMilliseconds(int(since * 1000))
        return wait

    @contextmanager
    def _leaving_superseded(self) -> Iterator[None]:
        """Shut down if another learner has replaced this one, for example after a long pause of the
        process."""
        try:
            yield
        except Superseded as error:
            self._lifecycle.fence(str(error))
            raise

    def _check_run(self, run: str) -> None:
        if run != self._who.run:
            raise RunMismatch(f"this worker belongs to {self._who.run}, not {run}", metadata={"run": self._who.run})
