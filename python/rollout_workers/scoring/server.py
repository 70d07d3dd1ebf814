"""RewardWorkerService: the calls of inference workers to a reward worker."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from rollout.reward.v1 import reward_pb2 as pb
from rollout.reward.v1.reward_pb2_grpc import RewardWorkerServiceServicer
from rollout_workers.scoring.model import Ids, RewardModel
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.status import RunMismatch


class RewardServer(RewardWorkerServiceServicer):
    """The servicer. One thread, separate from the event loop, scores one request after the
    other."""

    def __init__(self, who: Identity, model: RewardModel) -> None:
        self._who, self._model = who, model
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        if request.run_id != self._who.run:
            raise RunMismatch(f"this worker scores for {self._who.run}, not {request.run_id}", metadata={"run": self._who.run})
        groups = [(_ids(group.prompt_ids), [_ids(ids) for ids in group.completions]) for group in request.groups]
        given_up = threading.Event()  # stop when the caller's time limit has passed, because its next call waits for this one
        try:
            scored = await asyncio.get_running_loop().run_in_executor(self._thread, self._model.score, groups, given_up.is_set)
        finally:
            given_up.set()
        return pb.ScoreResponse(results=[pb.ScoreResult(score=s.score, reason=s.reason, message=s.message) for s in scored])

    def close(self) -> None:
        """Accept no more requests."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _ids(raw: bytes) -> Ids:
    return np.frombuffer(raw, "<i4")
