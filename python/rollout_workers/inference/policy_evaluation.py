"""Plays episodes of held-out rows with the most likely actions of one version of the weights."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.inference.v1 import inference_pb2 as pb
from rollout.outcomes import OUTCOMES
from rollout_workers.environments.episode import sample_seed
from rollout_workers.inference.evaluation import HELD_OUT, NoEvaluation, WeightsVersionMismatch, take_chunk
from rollout_workers.inference.policy_sampling import Row, play_row, read_row
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.multistep.player import Played, Player

if TYPE_CHECKING:
    from rollout_workers.inference.policy_sampling import Playing

_EPOCH = (1 << 64) - 1
"""Of the seeds: none of the training's."""


class PlayEvaluation:
    """Answers Evaluate requests of a run whose policy acts in environments. Belongs to the worker's
    event loop."""

    def __init__(
        self, rows_file: str, receipts: EngineReceipts, start: Callable[[], Awaitable[Playing]], player: Player | None = None
    ) -> None:
        """rows_file: JSON Lines. start: makes the environments of evaluations, for the first one,
        unless there is a player already."""
        self._file, self._receipts, self._start, self._player = rows_file, receipts, start, player
        self._starting = asyncio.Lock()
        self._serial = itertools.count()
        self._rows: dict[str, bytes] = {}  # of the episodes in progress, by key
        self.running = 0
        """Number of requests in progress."""

    def doing(self) -> list[tuple[tuple[str, float], bytes]]:
        """What is done for each held-out row in progress, since when, and the row (JSON)."""
        episodes = self._player.open() if self._player else []
        return [(("ENVIRONMENT_STEP", episode.since), self._rows[episode.key]) for episode in episodes]

    async def evaluate(self, request: pb.EvaluateRequest) -> AsyncGenerator[pb.EvaluateResponse, None]:
        """The returns of episodes in the order of the rows, sent as soon as all earlier episodes
        have ended."""
        if request.suite != HELD_OUT:
            raise NoEvaluation(f"the plan has no suite `{request.suite}`", fix="set `data.eval`")
        self._check(request.version, self._receipts.version)
        lines = (await asyncio.to_thread(Path(self._file).read_bytes)).splitlines()
        rows = [line for line in lines if line.strip()]
        player = await self._started()
        prefix, parts = f"eval/{next(self._serial)}", max(1, request.parts)
        tasks: dict[asyncio.Task[Played], int] = {}
        wanted = [row for row in range(min(len(rows), request.max_prompts or len(rows))) if row % parts == request.part]
        scored: dict[int, list[pb.EvalSample]] = {}
        sent = 0
        self.running += 1
        try:
            for place, row in enumerate(wanted):
                seed = sample_seed(request.seed, _EPOCH, row, 0)
                tasks[asyncio.create_task(self._play(player, f"{prefix}/{row}", rows[row], seed))] = place
            open_ = set(tasks)
            while open_:
                done, open_ = await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    place, played = tasks[task], task.result()
                    for version in played.versions:
                        self._check(request.version, version)
                    scored[place] = [_sample(wanted[place], rows[wanted[place]], played)]
                while chunk := take_chunk(scored, sent, len(wanted)):
                    sent += len(chunk)
                    yield pb.EvaluateResponse(samples=[sample for row in chunk for sample in row])
        finally:
            self.running -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _started(self) -> Player:
        async with self._starting:
            if self._player is None:
                self._player = (await self._start()).player
            return self._player

    async def _play(self, player: Player, key: str, row_json: bytes, seed: int) -> Played:
        try:
            row: Row | str = read_row(row_json)
        except ValueError as error:
            row = str(error)
        self._rows[key] = row_json
        try:
            return await play_row(player, key, 0, seed, row)
        finally:
            del self._rows[key]

    def _check(self, wanted: int, version: int) -> None:
        if version != wanted:
            raise WeightsVersionMismatch(
                f"the evaluation is for weights version {wanted}, but the engine uses {version}",
                fix="load this version first",
                metadata={"version": str(wanted), "current": str(version)},
            )


def _sample(row: int, row_json: bytes, played: Played) -> pb.EvalSample:
    result = played.result
    assert result is not None
    return pb.EvalSample(
        row=row,
        prompt=row_json.decode(errors="replace"),
        completion=f"{played.steps} steps, return {result.reward:g}",
        reward=result.reward,
        metrics=result.metrics,
        outcome=OUTCOMES[result.outcome],
        reason=result.reason,
    )
