"""``python -m rollout_testing.sim.recorded KIND``: the real worker, whose engine writes each sample
to a journal, so that a test can compare trajectories with what the engine returned."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_testing.sim.journal import Journal
from rollout_workers.engines.base import Engine, GroupRequest, SampleDelta, SampleOutput, WeightsSource


class Recorded:
    """An ``Engine`` that writes each sample of another to ``journal`` before it returns it: the
    request, its seed, the tokens before the sample, the sampled tokens and logprobs, the finish
    reason, and version and digest of the weights that the sample ended with."""

    def __init__(self, engine: Engine, journal: Journal, digest: str = "") -> None:
        """digest: of the current weights; if empty, that of the first ``weights_digest``."""
        self._engine, self._journal = engine, journal
        self._digest, self._staged = digest, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncGenerator[SampleDelta | SampleOutput, None]:
        """See ``Engine.generate``."""
        requests = {request.request_id: request for request in batch}
        async with aclosing(self._engine.generate(batch)) as items:  # type: ignore[type-var]
            async for item in items:
                if isinstance(item, SampleOutput):
                    self._write(requests[item.request_id], item)
                yield item

    async def weights_digest(self) -> str:
        """See ``Engine.weights_digest``."""
        self._digest = await self._engine.weights_digest()
        return self._digest

    async def stage_weights(self, source: WeightsSource, expected: str | None = None) -> str:
        """See ``Engine.stage_weights``."""
        self._staged = await self._engine.stage_weights(source, expected)
        return self._staged

    async def swap_weights(self, version: int) -> None:
        """See ``Engine.swap_weights``."""
        await self._engine.swap_weights(version)
        self._digest, self._staged = self._staged or self._digest, ""

    def _write(self, request: GroupRequest, output: SampleOutput) -> None:
        self._journal.write(
            request=request.request_id,
            seed=request.seeds[output.sample],
            version=output.version_spans[-1].version if output.version_spans else None,
            digest=self._digest,
            prompt=[int(at) for at in (*request.prompt_ids, *request.continued)],
            tokens=output.token_ids.tolist(),
            logprobs=output.logprobs.tolist(),
            finish=output.finish_reason,
        )


def install() -> None:
    """Record the engine of the inference worker of this process. Imports torch."""
    from rollout_workers.inference import worker
    from rollout_workers.inference.model import Model, load

    def recorded(spec: WorkerSpec) -> Model:
        model = load(spec)
        model.engine = cast(Engine, Recorded(model.engine, Journal(spec.run_directory, spec.worker_id)))
        return model

    worker.load = recorded


if __name__ == "__main__":
    from rollout_workers.__main__ import main  # first: it sets variables that torch reads

    if sys.argv[1:2] == ["inference"]:
        install()
    main()
