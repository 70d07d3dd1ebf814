"""``rollout-worker inference|learner``: one worker of one run, started by the scheduler (docs/wire.md).

``rollout-worker replay``: train a run's recorded batches again, for ``rollout replay``."""

from __future__ import annotations

import os

# Before torch: spinning OpenMP threads of two processes starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("USE_TF", "0")

import argparse
import asyncio
import logging
import sys

from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.mesh.events import EventHandler, Events
from rollout_workers.mesh.lifecycle import EXIT_CRASH, LEAVE_SECONDS, Lifecycle, leave_now, prepare_process
from rollout_workers.mesh.pulse import Pulse
from rollout_workers.mesh.spec import SPEC_VARIABLE, Identity, SpecError, identity, load_spec
from rollout_workers.mesh.telemetry import configure, flush

log = logging.getLogger("rollout_workers")

EXIT_USAGE = 64
EXIT_NO_INPUT = 66


def main() -> None:
    """Run a worker until it is told to leave."""
    parser = argparse.ArgumentParser(prog="rollout-worker", description=__doc__)
    parser.add_argument("kind", choices=("inference", "learner", "replay"))
    parser.add_argument("--spec", help="the worker's spec (default: $ROLLOUT_WORKER_SPEC)")
    arguments = parser.parse_args()
    prepare_process()
    sys.setswitchinterval(0.0003)  # seconds: what dispatches tensor operations must not wait 5 ms for the event loop's thread
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if arguments.kind == "replay":
        from rollout_workers.learning.replay import replay

        sys.exit(replay(arguments.spec or os.environ.get(SPEC_VARIABLE, "")))
    try:
        spec = load_spec(arguments.spec)
    except SpecError as error:
        print(f"rollout-worker: {error}", file=sys.stderr)
        sys.exit(EXIT_NO_INPUT)
    if spec.kind != arguments.kind:
        print(f"rollout-worker: the spec is of kind `{spec.kind}`, not `{arguments.kind}`", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    if spec.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads))
    who = identity(spec)
    configure(spec.otlp_endpoint, who)
    asyncio.run(_run(spec, who))


async def _run(spec: WorkerSpec, who: Identity) -> None:
    """Does not return: threads that load a model or compute need no farewell."""
    lifecycle = Lifecycle(patience=LEAVE_SECONDS)
    lifecycle.watch()
    pulse = Pulse(spec.nats_url, spec.nats_token, name=who.registration, access=spec.nats, leaving=lambda: lifecycle.leaving)
    pulse.start()
    events = Events(who, pulse)
    events.start()
    logging.getLogger().addHandler(EventHandler(events))
    try:
        if spec.kind == "inference":
            from rollout_workers.inference.worker import run_inference_worker

            await run_inference_worker(spec, who, lifecycle, pulse, events)
        else:
            from rollout_workers.learning.worker import run_learner_worker

            await run_learner_worker(spec, who, lifecycle, pulse, events)
    except Exception:
        log.exception("the %s failed", who.service)
        lifecycle.crash("an error that the log names")
        lifecycle.exit_code = lifecycle.exit_code or EXIT_CRASH
    log.info("leaving with exit code %d%s", lifecycle.exit_code, f": {lifecycle.reason}" if lifecycle.reason else "")
    await asyncio.to_thread(events.close)
    pulse.stop()
    await asyncio.to_thread(flush)
    sys.stdout.flush()
    leave_now(lifecycle.exit_code)


if __name__ == "__main__":
    main()
