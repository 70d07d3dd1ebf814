"""Adds the log-probabilities of a teacher endpoint to each sample."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from rollout.config.v1.algorithm_pb2 import TeacherEndpointConfig
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.environment import (
    Answer,
    ChildTurns,
    Environment,
    ManagedEnvironment,
    Observation,
    Refusal,
    Result,
    Task,
    Turn,
    failed,
)
from rollout.secret import read_secret
from rollout.teacher import TeacherBusy, TeacherEndpoint, TeacherError
from rollout_workers.data.prompts import Text
from rollout_workers.worker.calls import Call, Calls

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.25  # before the first retry; doubles with each further one
_LONGEST_PAUSE = 60.0  # seconds, whatever a busy server asks for


class TeacherEnvironment:
    """Wraps an environment and adds the teacher's log-probabilities to finished episodes. Belongs
    to one event loop. Calls of the teacher run in threads, which live until ``shutdown``.

    If the teacher fails after ``retries`` retries, the sample is INFRA_FAILED with the teacher's
    reason.
    """

    def __init__(
        self,
        inner: Environment,
        teacher: TeacherEndpoint,
        *,
        retries: int,
        concurrency: int,
        name: str = "",
        calls: Calls | None = None,
    ) -> None:
        """concurrency: number of concurrent calls. name: of the endpoint in calls, which records
        the open ones."""
        self._inner, self._teacher, self._retries = inner, teacher, retries
        self._name, self._calls = name, calls or Calls()
        self.batched = getattr(inner, "batched", True)
        self.waits_for_siblings = getattr(inner, "waits_for_siblings", False)
        self._threads = ThreadPoolExecutor(concurrency, "teacher")
        self._logged: set[tuple[str, str]] = set()

    async def start(self) -> None:
        """Start the inner environment, which may declare only then how it is called."""
        if isinstance(self._inner, ManagedEnvironment):
            await self._inner.start()
        self.batched = getattr(self._inner, "batched", True)
        self.waits_for_siblings = getattr(self._inner, "waits_for_siblings", False)

    async def reset(self, tasks: Sequence[Task]) -> Sequence[Observation | Refusal]:
        """Reset the inner environment."""
        return await self._inner.reset(tasks)

    async def step(self, turns: Sequence[Turn]) -> list[Answer]:
        """Step the inner environment. Results of finished episodes have the teacher's
        log-probabilities."""
        answers = await self._inner.step(turns)
        return await asyncio.gather(*(self._with(answer, turn) for answer, turn in zip(answers, turns, strict=True)))

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Close the episodes of the inner environment."""
        await self._inner.close(episodes)

    async def shutdown(self) -> None:
        """Stop the inner environment and the calls of the teacher."""
        self.stop()
        if isinstance(self._inner, ManagedEnvironment):
            await self._inner.shutdown()

    def stop(self) -> None:
        """Stop the threads and cancel the calls that wait for one. Idempotent. Does not wait for
        running calls, which end at the teacher's time limit."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._teacher.close()

    async def _with(self, answer: Answer, turn: Turn) -> Answer:
        if isinstance(answer, ChildTurns):
            return replace(failed("TEACHER_CHILD_SESSIONS"), message="a teacher endpoint scores no child sessions; use `teacher`")
        if not isinstance(answer, Result) or answer.outcome not in ("completed", "truncated"):
            return answer
        logprobs = await self._ask(turn)
        return failed(logprobs.reason) if isinstance(logprobs, TeacherError) else replace(answer, teacher_logprobs=logprobs)

    async def _ask(self, turn: Turn) -> tuple[float, ...] | TeacherError:
        """The log-probabilities of all tokens of the episode after the first observation."""
        context = turn.context_ids if len(turn.context_ids) else turn.prompt_ids
        ids = np.concatenate((context, turn.token_ids)).tolist()
        pause, began, answered = _PAUSE_SECONDS, time.time(), ""
        for left in range(self._retries, -1, -1):
            with self._calls.open(Call("TEACHER_CALL", self._name + answered, (turn.task.row_json,), 0.0, since=began)):
                try:
                    loop = asyncio.get_running_loop()
                    return tuple(await loop.run_in_executor(self._threads, self._teacher.logprobs, ids, len(turn.prompt_ids)))
                except TeacherError as error:
                    if not left or not error.again:
                        self._log_once(error)
                        return error
                    last = error
            after = min(last.after, _LONGEST_PAUSE) if isinstance(last, TeacherBusy) else 0.0
            if after:
                self._log_once(last, f"the teacher is busy; it is asked again after {after:g} s")
            answered = " (HTTP 429)" if after else f" ({last.reason})"
            with self._calls.open(Call("TEACHER_CALL", self._name + answered, (turn.task.row_json,), 0.0, since=began)):
                await asyncio.sleep(max(pause, after))
            pause *= 2
        raise AssertionError("unreachable")

    def _log_once(
        self, error: TeacherError, what: str = "the teacher failed; samples without its log-probabilities are INFRA_FAILED"
    ) -> None:
        if (error.reason, what) not in self._logged:  # once per reason; the samples are counted by reason
            self._logged.add((error.reason, what))
            log.warning("%s: %s", what, error)


def with_teacher(
    config: RunConfig, inner: Environment, text: Text, closing: ExitStack, calls: Calls | None = None
) -> Environment:
    """The environment with the teacher of the run's config, or ``inner`` if the config has no
    teacher endpoint. closing: receives the shutdown of the teacher. calls: where open calls of the
    teacher are recorded. Raises ``SecretError``."""
    if not config.algorithm.HasField("distillation") or not config.algorithm.distillation.HasField("endpoint"):
        return inner
    endpoint = config.algorithm.distillation.endpoint
    made = TeacherEnvironment(
        inner,
        client(endpoint, text),
        retries=endpoint.retries,
        concurrency=endpoint.concurrency or 8,
        name=endpoint.base_url,
        calls=calls,
    )
    closing.callback(made.stop)
    return made


def client(endpoint: TeacherEndpointConfig, text: Text) -> TeacherEndpoint:
    """A client for the teacher endpoint. Raises ``SecretError``."""
    tokenizer = text.tokenizer

    def pieces(token: int) -> list[str]:
        return [str(tokenizer.convert_ids_to_tokens(token)), tokenizer.decode([token], skip_special_tokens=False)]

    return TeacherEndpoint(
        endpoint.base_url,
        endpoint.model,
        api_key=read_secret(endpoint.api_key, "algorithm.distillation.endpoint.api_key", os.environ),
        protocol=endpoint.protocol or "echo",
        timeout_seconds=endpoint.timeout_seconds or 60.0,
        pieces=pieces,
    )
