"""Background tasks of an inference worker: throughput events and checks of the engine's weights."""

from __future__ import annotations

import asyncio
import logging
import time

from rollout_workers.inference.receipt import HeldWeightsMismatch, Holdings
from rollout_workers.inference.throughput import Throughput
from rollout_workers.worker.events import Events
from rollout_workers.worker.lifecycle import Lifecycle

log = logging.getLogger(__name__)

VERIFY_LEAST_SECONDS = 10.0
_VERIFY_SHARE = 0.002  # the largest share of time spent on verification


async def report_throughput(throughput: Throughput, events: Events, holdings: Holdings) -> None:
    """Emit the event ``sampling`` once a second while the engine works. Runs until cancelled."""
    while True:
        await asyncio.sleep(1)
        done = throughput.tick()
        if done.samples or done.busy:
            events.emit(
                "sampling",
                step=holdings.version,
                metrics={
                    "samples": done.samples,
                    "samples_per_second": done.samples / done.time,
                    "tokens_per_second": done.tokens / done.time,
                    "time/engine": done.busy,
                    "time/engine_forward": done.forward,
                },
            )


async def verify_weights(holdings: Holdings, lifecycle: Lifecycle) -> None:
    """Digest the engine's weights periodically. Fence the worker if they differ from the
    receipt."""
    pause = VERIFY_LEAST_SECONDS
    while True:
        await asyncio.sleep(pause)
        began = time.monotonic()
        try:
            await holdings.verify()
        except HeldWeightsMismatch as error:
            lifecycle.fence(str(error))
            return
        except Exception:  # an engine failure, which requests report too; the weights may still change
            log.warning("could not verify the engine's weights; retrying later", exc_info=True)
        pause = max(VERIFY_LEAST_SECONDS, (time.monotonic() - began) / _VERIFY_SHARE)
