"""Adds a teacher's log-probabilities, from an endpoint, to each sample."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from rollout.config.v1.algorithm_pb2 import TeacherEndpointConfig
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.environment import Environment, Observation, Refusal, Result, Task, Turn, failed
from rollout.teacher import TeacherEndpoint, TeacherError
from rollout_workers.data.prompts import Text
from rollout_workers.worker.secret import read_secret

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.25  # before the first further try; each pause is twice the one before


class Taught:
    """An environment whose completed turns are shown to a teacher. It belongs to one event loop;
    calls are made in threads, which are there until ``shutdown``.

    A turn that the teacher can't be asked about, after ``retries`` further tries, is INFRA_FAILED
    with the teacher's reason.
    """

    def __init__(self, inner: Environment, teacher: TeacherEndpoint, *, retries: int, concurrency: int) -> None:
        """concurrency: calls that are open at a time."""
        self._inner, self._teacher, self._retries = inner, teacher, retries
        self._threads = ThreadPoolExecutor(concurrency, "teacher")
        self._told: set[str] = set()

    async def reset(self, tasks: Sequence[Task]) -> Sequence[Observation | Refusal]:
        """As the inner environment."""
        return await self._inner.reset(tasks)

    async def step(self, turns: Sequence[Turn]) -> list[Observation | Result]:
        """As the inner environment; where a turn ends its episode, with the teacher's
        log-probabilities."""
        answers, taught = await asyncio.gather(self._inner.step(turns), asyncio.gather(*(self._ask(turn) for turn in turns)))
        return [self._with(answer, logprobs) for answer, logprobs in zip(answers, taught, strict=True)]

    async def close(self, episodes: Sequence[tuple[str, int]]) -> None:
        """As the inner environment."""
        await self._inner.close(episodes)

    def shutdown(self) -> None:
        """Let the threads and their connections go; calls that wait for a thread are cancelled.
        Idempotent. Does not wait: a call that is open ends by the teacher's time limit."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._teacher.close()

    @staticmethod
    def _with(answer: Observation | Result, logprobs: tuple[float, ...] | TeacherError) -> Observation | Result:
        if not isinstance(answer, Result) or answer.outcome not in ("completed", "truncated"):
            return answer
        return failed(logprobs.reason) if isinstance(logprobs, TeacherError) else replace(answer, teacher_logprobs=logprobs)

    async def _ask(self, turn: Turn) -> tuple[float, ...] | TeacherError:
        ids = np.concatenate((turn.prompt_ids, turn.token_ids)).tolist()
        pause = _PAUSE_SECONDS
        for left in range(self._retries, -1, -1):
            try:
                loop = asyncio.get_running_loop()
                return tuple(await loop.run_in_executor(self._threads, self._teacher.logprobs, ids, len(turn.prompt_ids)))
            except TeacherError as error:
                if not left or not error.again:
                    self._tell(error)
                    return error
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    def _tell(self, error: TeacherError) -> None:
        if error.reason not in self._told:  # once a kind: the samples are counted by reason
            self._told.add(error.reason)
            log.warning("the teacher failed, its samples are INFRA_FAILED: %s", error)


def taught(config: RunConfig, inner: Environment, text: Text, closing: ExitStack) -> Environment:
    """The environment, with the teacher's answers where the run's config names an endpoint.
    closing: given what must be shut down with the worker. Raises ``SecretError``."""
    if not config.algorithm.HasField("distillation") or not config.algorithm.distillation.HasField("endpoint"):
        return inner
    endpoint = config.algorithm.distillation.endpoint
    made = Taught(inner, client(endpoint, text), retries=endpoint.retries, concurrency=endpoint.concurrency or 8)
    closing.callback(made.shutdown)
    return made


def client(endpoint: TeacherEndpointConfig, text: Text) -> TeacherEndpoint:
    """Raises ``SecretError``."""
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
