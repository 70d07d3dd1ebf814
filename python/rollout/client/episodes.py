"""Episodes that an agent outside of a run plays: the run is trained on them.

    async with connect_async() as client:
        async for episode in client.episodes("guess"):
            async with episode:
                agent = openai.AsyncOpenAI(base_url=episode.base_url, api_key=key)
                ...  # any number of requests
                await episode.close(reward)

The prompts come from the run's data set. A run of such an agent has
`environment.kind = "external"`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any, Self, cast

import grpc

from rollout.client.connection import Server
from rollout.client.errors import RemoteError, remote_errors
from rollout.gateway.v1 import gateway_pb2 as pb
from rollout.gateway.v1.gateway_pb2_grpc import RolloutGatewayServiceStub
from rollout.trajectory.v1.trajectory_pb2 import OUTCOME_INFRA_FAILED, OUTCOME_UNSPECIFIED, Outcome

_WAIT_SECONDS, _RETRY_SECONDS = 20.0, 60.0


class Episode:
    """One sample of a prompt group, to be played in a session of the gateway and closed.

    In ``async with``, an exception closes it as ``INFRA_FAILED`` with the name of the exception,
    and the group is sampled again. Leaving it open has the same effect at its deadline.
    """

    def __init__(self, task: pb.SessionTask, stub: Any, server: Server) -> None:
        self.task = task
        """All that the gateway has sent."""
        self.end: pb.SessionEnd | None = None
        """How it ended; None while it is open."""
        self._stub, self._server = stub, server

    @property
    def session_id(self) -> str:
        """Id of the session."""
        return self.task.session_id

    @property
    def base_url(self) -> str:
        """Base URL for clients of the OpenAI API, whose requests are then in the session."""
        return self.task.base_url

    @property
    def model(self) -> str:
        """Name of the policy."""
        return self.task.model

    @property
    def group(self) -> tuple[int, int, int]:
        """Epoch, index, and attempt of the prompt group: equal for its samples, which are
        compared."""
        return self.task.key.epoch, self.task.key.index, self.task.key.attempt

    @property
    def sample(self) -> int:
        """Number in the group, from 0 to ``task.group_size`` - 1."""
        return self.task.key.sample

    @property
    def row(self) -> dict[str, Any]:
        """The row of the data set."""
        return json.loads(self.task.row_json or b"{}")

    @property
    def prompt(self) -> Any:
        """The prompt of the row: a text, or a list of messages."""
        return json.loads(self.task.prompt_json or b"null")

    async def close(
        self,
        reward: float = 0.0,
        *,
        metrics: Mapping[str, float] | None = None,
        outcome: Outcome.ValueType = OUTCOME_UNSPECIFIED,
        reason: str = "",
    ) -> pb.SessionEnd:
        """End the session with a reward, and return when its trajectories are durable.

        outcome: default: ``COMPLETED``, or ``TRUNCATED`` if the last completion reached its token
        limit. ``INFRA_FAILED`` with a reason if a tool failed: such a sample has no reward. A
        second call with the same values has no effect. Raises ``RemoteError``.
        """
        request = pb.CloseSessionRequest(
            session_id=self.session_id,
            reward=reward,
            metrics=metrics or {},
            outcome=outcome,
            reason=reason,
            run_id=self.task.key.run_id,
        )
        answer: pb.CloseSessionResponse = await _retried(self._stub.CloseSession, request, self._server)
        self.end = answer.end
        return answer.end

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self.end is None:
            await self.close(outcome=OUTCOME_INFRA_FAILED, reason=_reason(error))


def _reason(error: BaseException) -> str:
    """The reason of a domain error, or the name of an exception, such as ``TIMEOUT_ERROR``."""
    if isinstance(reason := getattr(error, "reason", None), str) and reason:
        return reason[:128]
    name = type(error).__name__
    return "".join(f"_{c}" if c.isupper() and at else c for at, c in enumerate(name)).upper()[:128]


async def episodes(channel: Any, server: Server, run: str, groups: int) -> AsyncGenerator[Episode, None]:
    """Yield the samples of prompt groups until the run has ended. See ``AsyncClient.episodes``."""
    stub = cast(Any, RolloutGatewayServiceStub(channel))
    request = pb.NextPromptsRequest(model=run, max_groups=groups, wait_seconds=_WAIT_SECONDS)
    while True:
        answer = await _retried(stub.NextPrompts, request, server)
        for task in answer.sessions:
            yield Episode(task, stub, server)
        if answer.ended:
            return


async def _retried(call: Any, request: Any, server: Server) -> Any:
    """The answer of a call, which is repeated for up to ``_RETRY_SECONDS`` while the gateway is
    away."""
    until = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            with remote_errors():
                return await call(request, metadata=server.metadata)
        except RemoteError as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                raise
            await asyncio.sleep(error.retry_seconds or 0.5)
