"""Background tasks of an inference worker: throughput events and checks of the engine's weights."""

from __future__ import annotations

import asyncio
import logging
import time

from rollout_workers.engines.base import Engine
from rollout_workers.inference.receipt import CurrentWeightsMismatch, EngineReceipts
from rollout_workers.inference.throughput import Throughput
from rollout_workers.worker.events import Events
from rollout_workers.worker.lifecycle import Lifecycle

log = logging.getLogger(__name__)

VERIFY_LEAST_SECONDS = 10.0
_VERIFY_SHARE = 0.002  # the largest share of time spent on verification


async def report_throughput(throughput: Throughput, events: Events, receipts: EngineReceipts) -> None:
    """Emit the event ``sampling`` once a second while the engine computes. Runs until cancelled."""
    while True:
        await asyncio.sleep(1)
        done = throughput.tick()
        if done.samples or done.busy:
            events.emit(
                "sampling",
                step=receipts.version,
                metrics={
                    "samples": done.samples,
                    "samples_per_second": done.samples / done.time,
                    "tokens_per_second": done.tokens / done.time,
                    "time/engine": done.busy,
                    "time/engine_forward": done.forward,
                },
            )


def progress_of(engine: Engine) -> tuple[int, ...] | None:
    """A value that changes when the engine computes; None while it has no samples or is paused.
    Thread-safe."""
    stats = engine.stats()
    if stats.paused or not stats.active + stats.queued:
        return None
    return (stats.steps, stats.generated_tokens, stats.prefilled_tokens, stats.cache_epoch)


class Answers:
    """Sends a request without effect to the engine again and again. An engine that is stuck outside
    of decoding, for example in a swap, does not answer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.count = 0

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                await self._engine.abort(())
            except Exception:  # closed or failed, which requests report
                log.debug("the engine refuses requests", exc_info=True)
            self.count += 1
            await asyncio.sleep(1)


async def verify_weights(receipts: EngineReceipts, lifecycle: Lifecycle) -> None:
    """Compute the digest of the engine's weights periodically, and fence the worker if it differs
    from the receipt."""
    pause = VERIFY_LEAST_SECONDS
    while True:
        await asyncio.sleep(pause)
        began = time.monotonic()
        try:
            await receipts.verify()
        except CurrentWeightsMismatch as error:
            lifecycle.fence(str(error))
            return
        except Exception:  # an engine failure, which requests also report; the weights may still be replaced
            log.warning("could not verify the engine's weights; retrying later", exc_info=True)
        pause = max(VERIFY_LEAST_SECONDS, (time.monotonic() - began) / _VERIFY_SHARE)
