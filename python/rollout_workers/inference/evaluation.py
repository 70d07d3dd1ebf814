"""Samples and scores completions of held-out rows with one version of the weights."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rollout.environment import Environment, Task
from rollout.inference.v1 import inference_pb2 as pb
from rollout.outcomes import OUTCOMES
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import Engine, SamplingParams
from rollout_workers.environments.episode import Episode, EpisodeRunner, sample_seed
from rollout_workers.environments.limits import Limits
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.worker.status import EdgeError

_CHUNK = 128


class WeightsVersionMismatch(EdgeError):
    """The engine uses another version of the weights than the requested one."""

    reason: ClassVar[str] = "WEIGHTS_VERSION_MISMATCH"


class NoEvaluation(EdgeError):
    """The plan has no held-out rows or no reward."""

    reason: ClassVar[str] = "NO_EVALUATION"


class Evaluation:
    """Answers Evaluate requests. Belongs to the worker's event loop."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        text: Text,
        params: SamplingParams,
        receipts: EngineReceipts,
        rows_file: str,
        *,
        limits: Limits | None = None,
        chat: bool = False,
    ) -> None:
        """params: of the run; an evaluation only sets the temperature. rows_file: JSON Lines.
        limits, chat: of episodes; the reward of one is the sum of its rewards."""
        self._engine, self._environment, self._text, self._params = engine, environment, text, params
        self._receipts, self._file = receipts, rows_file
        self._limits, self._chat = replace(limits or Limits(), credit="episode"), chat
        self._rows: list[bytes] | None = None
        self._serial = itertools.count()
        self._runs: list[tuple[EpisodeRunner, dict[str, bytes]]] = []  # of the requests in progress, with the rows by task

    @property
    def running(self) -> int:
        """Number of requests in progress."""
        return len(self._runs)

    def doing(self) -> list[tuple[tuple[str, float], bytes]]:
        """What is done for each held-out row in progress (:meth:`EpisodeRunner.doing`), and the row
        (JSON)."""
        return [(doing, rows[key]) for runner, rows in self._runs for key, doing in runner.doing().items()]

    async def evaluate(self, request: pb.EvaluateRequest) -> AsyncGenerator[pb.EvaluateResponse, None]:
        """Scored samples in the order of the rows, sent as soon as all earlier rows are scored."""
        self._check_version(request.version)
        rows = await self._read()
        wanted = rows[: request.max_prompts] if request.max_prompts else rows
        params = replace(self._params, temperature=request.temperature)
        runner = EpisodeRunner(self._engine, self._environment, self._text, params, limits=self._limits, chat=self._chat)
        parts = max(1, request.parts)
        prefix = f"eval/{next(self._serial)}"
        tasks = [
            Task(f"{prefix}/{row}", row_json, (0,), (sample_seed(request.seed, 0, row, 0),), row)
            for row, row_json in enumerate(wanted)
            if row % parts == request.part
        ]
        scored: dict[int, pb.EvalSample] = {}
        sent = 0
        run = runner, {task.key: task.row_json for task in tasks}
        self._runs.append(run)
        try:
            async with aclosing(runner.run(tasks)) as finished:
                async for groups in finished:
                    for group in groups:
                        [episode] = group.episodes
                        sampled = (episode, *episode.children.values())
                        if any(span.version != request.version for each in sampled for span in each.spans()):
                            raise self._wrong_version(request.version)
                        scored[group.task.row // parts] = _sample(group.task.row, episode)
                    while chunk := take_chunk(scored, sent, len(tasks)):
                        sent += len(chunk)
                        yield pb.EvaluateResponse(samples=chunk)
        finally:
            self._runs.remove(run)

    def _check_version(self, version: int) -> None:
        if self._receipts.version != version:
            raise self._wrong_version(version)

    def _wrong_version(self, version: int) -> WeightsVersionMismatch:
        current = self._receipts.version
        return WeightsVersionMismatch(
            f"the evaluation is for weights version {version}, but the engine uses {current}",
            fix="load this version first",
            metadata={"version": str(version), "current": str(current)},
        )

    async def _read(self) -> list[bytes]:
        if self._rows is None:
            lines = (await asyncio.to_thread(Path(self._file).read_bytes)).splitlines()
            self._rows = [line for line in lines if line.strip()]
        return self._rows


def take_chunk(scored: dict[int, pb.EvalSample], sent: int, total: int) -> list[pb.EvalSample]:
    """Remove and return the next chunk of samples from position ``sent`` on if all of them are
    scored; else return nothing."""
    rows = range(sent, min(sent + _CHUNK, total))
    return [scored.pop(row) for row in rows] if all(row in scored for row in rows) else []


def _sample(row: int, episode: Episode) -> pb.EvalSample:
    result = episode.result
    assert result is not None
    return pb.EvalSample(
        row=row,
        prompt=episode.prompt.text,
        completion="".join(episode.texts),
        reward=result.reward,
        metrics=result.metrics,
        outcome=OUTCOMES[result.outcome],
        reason=result.reason,
    )
