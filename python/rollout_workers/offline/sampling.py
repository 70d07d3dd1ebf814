"""Samples and scores the rows that are not in the journal yet, many rows at a time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.environment import Task
from rollout_workers.engines.base import SampleOutput
from rollout_workers.environments.episode import Episode, EpisodeRunner, FinishedGroup, sample_seed
from rollout_workers.offline.journal import Journal

_IN_FLIGHT = 3  # concurrent parts: one decoding, one being scored, one waiting
_REPORT_SECONDS = 0.5


@dataclass(slots=True)
class Tally:
    """Counts of the samples of this process. rows: all rows in the journal, including those of
    earlier processes."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    scored: int = 0
    total: float = 0.0
    failures: Counter[str] = field(default_factory=Counter[str])
    began: float = field(default_factory=time.monotonic)

    def take(self, samples: Sequence[dict[str, Any]]) -> None:
        """Count the samples of a row."""
        self.rows += 1
        for sample in samples:
            self.samples += 1
            self.tokens += sample["completion_tokens"]
            if sample["score"] is not None:
                self.scored += 1
                self.total += sample["score"]
            if sample["status"] == "INFRA_FAILED":
                self.failures[sample["reason"]] += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.scored if self.scored else None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


async def sample(
    runner: EpisodeRunner,
    rows: Sequence[bytes],
    journal: Journal,
    *,
    seed: int,
    samples: int,
    slots: int,
    scores: bool,
    stop: asyncio.Event,
    report: Callable[[Tally], None],
) -> Tally:
    """Return when every row is in the journal, or soon after ``stop`` is set, which drops
    unfinished rows.

    scores: whether completions are scored. report: called twice a second with the progress. Raises
    ``CannotWrite``.
    """
    missing = [row for row in range(len(rows)) if row not in journal.done]
    tally = Tally(rows=len(rows) - len(missing))
    size = max(1, slots // samples)
    parts = iter([missing[at : at + size] for at in range(0, len(missing), size)])

    async def work(parts: Iterator[list[int]]) -> None:
        for part in parts:
            tasks = [_task(row, rows[row], seed, samples) for row in part]
            async for groups in runner.run(tasks):
                for group in groups:
                    kept = _kept(group, scores=scores)
                    journal.append(group.task.row, kept)
                    tally.take(kept)

    working = [asyncio.create_task(work(parts), name="batch") for _ in range(_IN_FLIGHT)]
    stopping = asyncio.create_task(stop.wait())
    try:
        left: set[asyncio.Task[None]] = set(working)
        while left and not stop.is_set():
            finished, _ = await asyncio.wait({*left, stopping}, timeout=_REPORT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in finished & left:
                task.result()
            left -= finished
            report(tally)
    finally:
        for task in (*working, stopping):
            task.cancel()
        await asyncio.wait({*working, stopping})
        journal.sync()
    return tally


def _task(row: int, row_json: bytes, seed: int, samples: int) -> Task:
    seeds = tuple(sample_seed(seed, 0, row, number) for number in range(samples))
    return Task(f"batch/{row}", row_json, tuple(range(samples)), seeds, row)


def _kept(group: FinishedGroup, *, scores: bool) -> list[dict[str, Any]]:
    return [_sample(episode, scores=scores) for episode in group.episodes]


def _sample(episode: Episode, *, scores: bool) -> dict[str, Any]:
    result = episode.result
    assert result is not None
    outputs = [part for part in episode.parts if isinstance(part, SampleOutput)]
    last = outputs[-1].finish_reason if outputs else None
    fine = result.outcome in ("completed", "truncated")
    return {
        "sample": episode.sample,
        "prompt": episode.prompt.text,
        "completion": "".join(episode.texts),
        "prompt_tokens": len(episode.prompt.token_ids),
        "completion_tokens": sum(len(output.token_ids) for output in outputs),
        "finish_reason": last if last in ("stop", "length") else None,
        "status": result.outcome.upper() if fine else "INFRA_FAILED",
        "reason": None if fine else result.reason,
        "score": result.reward if fine and scores else None,
        "score_parts": dict(result.metrics) if fine else {},
        "seed": episode.task.seeds[episode.place],
    }
