"""Samples and scores completions of held-out rows, and of the rows of suites, with one version of
the weights."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

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
_T = TypeVar("_T")
HELD_OUT = ""
"""The name of the held-out rows of a run among its suites."""


class WeightsVersionMismatch(EdgeError):
    """The engine uses another version of the weights than the requested one."""

    reason: ClassVar[str] = "WEIGHTS_VERSION_MISMATCH"


class NoEvaluation(EdgeError):
    """The plan has no held-out rows or no reward, or no such suite."""

    reason: ClassVar[str] = "NO_EVALUATION"


@dataclass(frozen=True, slots=True)
class Suite:
    """Rows (JSON Lines), and what answers are sampled with and scored by. params: an evaluation
    sets the temperature. cluster: field of related rows; "": every row is alone."""

    rows_file: str
    environment: Environment
    params: SamplingParams
    cluster: str = ""


class Evaluation:
    """Answers Evaluate requests. Belongs to the worker's event loop."""

    def __init__(
        self,
        engine: Engine,
        text: Text,
        receipts: EngineReceipts,
        suites: Mapping[str, Suite],
        *,
        limits: Limits | None = None,
        chat: bool = False,
    ) -> None:
        """suites: by name, with ``HELD_OUT``. limits, chat: of episodes; the reward of one is the
        sum of its rewards."""
        self._engine, self._text, self._receipts, self._suites = engine, text, receipts, suites
        self._limits, self._chat = replace(limits or Limits(), credit="episode"), chat
        self._rows: dict[str, list[bytes]] = {}  # by file
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
        suite = self._suites.get(request.suite)
        if suite is None:
            what = f"suite `{request.suite}`" if request.suite else "held-out rows or no reward"
            raise NoEvaluation(f"the plan has no {what}", fix="set `data.eval` and `[reward]`, or `[eval.suites.*]`")
        self._check_version(request.version)
        rows = await self._read(suite.rows_file)
        wanted = rows[: request.max_prompts] if request.max_prompts else rows
        params = replace(suite.params, temperature=request.temperature)
        runner = EpisodeRunner(self._engine, suite.environment, self._text, params, limits=self._limits, chat=self._chat)
        parts = max(1, request.parts)
        prefix = f"eval/{next(self._serial)}"
        samples = tuple(range(max(1, request.samples)))
        tasks = [
            Task(f"{prefix}/{row}", row_json, samples, tuple(sample_seed(request.seed, 0, row, s) for s in samples), row)
            for row, row_json in enumerate(wanted)
            if row % parts == request.part
        ]
        scored: dict[int, list[pb.EvalSample]] = {}
        sent = 0
        run = runner, {task.key: task.row_json for task in tasks}
        self._runs.append(run)
        try:
            async with aclosing(runner.run(tasks)) as finished:
                async for groups in finished:
                    for group in groups:
                        sampled = [each for episode in group.episodes for each in (episode, *episode.children.values())]
                        if any(span.version != request.version for each in sampled for span in each.spans()):
                            raise self._wrong_version(request.version)
                        cluster = _cluster(group.task.row_json, suite.cluster)
                        scored[group.task.row // parts] = [
                            _sample(group.task.row, episode, cluster) for episode in group.episodes
                        ]
                    while chunk := take_chunk(scored, sent, len(tasks)):
                        sent += len(chunk)
                        yield pb.EvaluateResponse(samples=[sample for row in chunk for sample in row])
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

    async def _read(self, file: str) -> list[bytes]:
        if file not in self._rows:
            lines = (await asyncio.to_thread(Path(file).read_bytes)).splitlines()
            self._rows[file] = [line for line in lines if line.strip()]
        return self._rows[file]


def take_chunk(scored: dict[int, _T], sent: int, total: int) -> list[_T]:
    """Remove and return the next chunk of rows from position ``sent`` on if all of them are scored;
    else return nothing."""
    rows = range(sent, min(sent + _CHUNK, total))
    return [scored.pop(row) for row in rows] if all(row in scored for row in rows) else []


def _cluster(row_json: bytes, field: str) -> str:
    """The value of a field as JSON; "" without the field."""
    fields = json.loads(row_json) if field else {}
    return json.dumps(fields[field], ensure_ascii=False, sort_keys=True) if field in fields else ""


def _sample(row: int, episode: Episode, cluster: str) -> pb.EvalSample:
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
        sample=episode.sample,
        cluster=cluster,
    )
