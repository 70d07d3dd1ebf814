"""Rewards from a reward worker, which serves a trained model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import grpc

from rollout import names
from rollout.plugin import RewardError, RewardFailed, RewardTimeout, Score
from rollout.reward.v1.reward_pb2 import ScoreGroup, ScoreRequest, ScoreResponse
from rollout.reward.v1.reward_pb2_grpc import RewardWorkerServiceStub
from rollout_workers.rewards.rewards import RewardGroup
from rollout_workers.worker.discovery import Services, ServiceUnavailable

SERVICE = names.worker_service("reward")
_AGAIN_SECONDS = 0.2


class RewardUnavailable(RewardError):
    """No worker serves the reward model."""

    reason: ClassVar[str] = "REWARD_UNAVAILABLE"


class RewardWorker:
    """A :class:`RewardSource` for one reward worker. A call waits within its time limit for a
    worker that is being restarted."""

    def __init__(self, services: Services, run: str, worker: str, *, start_seconds: float) -> None:
        """worker: its id, `reward-0`. start_seconds: time limit for loading its model."""
        self._services, self._run, self._worker = services, run, worker
        self._start_seconds = start_seconds

    async def start(self) -> None:
        """Wait until the worker is registered. Raises :class:`RewardUnavailable`."""
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._stub()
        except TimeoutError:
            raise RewardUnavailable(
                f"{self._worker} has not registered after {self._start_seconds:g} s",
                fix="see the worker's log in the run's folder",
            ) from None

    async def call(self, groups: Sequence[RewardGroup], timeout: float) -> list[Score]:
        """The scores of all samples. Raises ``RewardError``."""
        request = ScoreRequest(run_id=self._run)
        for group in groups:
            ids = [sample.token_ids for sample in group.samples]
            request.groups.append(ScoreGroup(prompt_ids=group.samples[0].prompt_ids if ids else b"", completions=ids))
        samples = sum(len(group.samples) for group in groups)
        try:
            async with asyncio.timeout(timeout):
                response = await self._ask(request)
        except TimeoutError:
            raise RewardTimeout(
                f"{self._worker} did not score {samples} samples within {timeout:g} s",
                fix="raise `reward.timeout_seconds`, or check whether the worker is restarting",
            ) from None
        if len(response.results) != samples:
            raise RewardFailed(f"{self._worker} returned {len(response.results)} scores for {samples} samples")
        for result in response.results:
            if result.reason:
                raise RewardFailed(f"{self._worker}: {result.reason}: {result.message}")
        return [Score(result.score) for result in response.results]

    async def close(self) -> None:
        """Do nothing. The worker ends with its run."""

    async def _ask(self, request: ScoreRequest) -> ScoreResponse:
        """Retry the call until the worker answers or the time limit is reached."""
        while True:
            stub = await self._stub()
            try:
                return await stub.Score(request, metadata=self._services.peer_metadata())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise RewardFailed(f"{self._worker} refused: {error.details()}", fix="see the worker's log") from error
                self._services.forget(SERVICE, worker=(self._run, self._worker))
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _stub(self) -> Any:
        while True:
            try:
                return await self._services.stub(SERVICE, RewardWorkerServiceStub, worker=(self._run, self._worker))
            except ServiceUnavailable:
                await asyncio.sleep(_AGAIN_SECONDS)
