"""A simulated engine whose samples take time. Import this after ``rollout_testing.sim.install``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rollout_testing.sim import engine as simulated
from rollout_workers.engines.base import GroupRequest, SampleOutput


class PacedEngine(simulated.SimEngine):
    """Decodes the samples of all requests at once, as far as it has slots."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._free = asyncio.Semaphore(self._slots)

    def seconds(self, request: GroupRequest, sample: int, output: SampleOutput) -> float:
        """How long a sample uses its slot."""
        raise NotImplementedError

    async def decode(self, request: GroupRequest, sample: int) -> SampleOutput:
        """Make a sample, in its slot."""
        output = await self._sample(request, sample)
        await asyncio.sleep(self.seconds(request, sample, output))
        return output

    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncIterator[SampleOutput]:  # type: ignore[override]
        """See ``SimEngine``."""
        self._running |= {request.request_id: False for request in batch}
        samples = [asyncio.create_task(self._queue(request, n)) for request in batch for n in range(len(request.seeds))]
        try:
            for sample in asyncio.as_completed(samples):
                yield await sample
        finally:
            for sample in samples:
                sample.cancel()
            for request in batch:
                self._running.pop(request.request_id, None)

    async def _queue(self, request: GroupRequest, sample: int) -> SampleOutput:
        async with self._free:
            return await self.decode(request, sample)


def use(engine: type[PacedEngine]) -> None:
    """Have the worker of this process use an engine."""
    simulated.SimEngine = engine  # type: ignore[misc]
