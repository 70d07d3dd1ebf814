"""``rollout-worker inference|learner|reward|sinks``: one worker of one run, started by the
scheduler (docs/wire.md).

``rollout-worker KIND --join ADDRESS --token FILE``: a place for workers of a kind, started by an
operator (docs/external-workers.md).
``rollout-worker environment``: environments for rollout workers (docs/multistep.md).
``rollout-worker replay``: train a run's recorded batches again, for ``rollout replay``.
``rollout-worker merge``: merge adapters into their model, for ``rollout export weights``.
``rollout-worker export``: write a run's metrics to trackers, for ``rollout export metrics``.
``rollout-worker push``: upload weights to a hub, for ``rollout export push``.
``rollout-worker infer``: completions and scores for a dataset, for ``rollout infer batch``.
``rollout-worker plugin``: the interpreter of an environment, for ``rollout plugin install``."""

from __future__ import annotations

import os

# Set before torch is imported: spinning OpenMP threads of two processes would starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Set before MKL's first product, because its bits otherwise depend on the alignment of its
# operands: on AMD processors the same row of an attention differed between batches with two
# threads.
os.environ.setdefault("MKL_CBWR", "AUTO")
# Set before cuBLAS is used, so that its products have the same bits each time.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("USE_TF", "0")

import argparse
import asyncio
import logging
import sys
from typing import TYPE_CHECKING

from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.kinds import COMMANDS, WORKERS, DetachedKind, Link, LinkedKind, Process
from rollout_workers.worker.credential import of_server
from rollout_workers.worker.events import EventHandler, Events
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.lifecycle import (
    EXIT_CRASH,
    EXIT_REFUSED,
    LEAVE_SECONDS,
    Lifecycle,
    leave_now,
    prepare_process,
)
from rollout_workers.worker.spec import Identity, SpecError, identity, load_spec
from rollout_workers.worker.telemetry import configure, flush

if TYPE_CHECKING:
    from rollout_workers.worker.join import Joining

log = logging.getLogger("rollout_workers")

EXIT_USAGE = 64
EXIT_NO_INPUT = 66


def main() -> None:
    """Run one worker, or one command, until it ends."""
    parser = argparse.ArgumentParser(prog="rollout-worker", description=__doc__)
    parser.add_argument("kind", choices=(*WORKERS, *COMMANDS))
    parser.add_argument("--spec", help="the worker's spec (default: $ROLLOUT_WORKER_SPEC)")
    places = parser.add_argument_group("places for external workers (docs/external-workers.md)")
    places.add_argument("--join", metavar="ADDRESS", help="host:port of the scheduler; of several replicas, a comma list")
    places.add_argument("--token", metavar="FILE", help="the mesh token (0600)")
    places.add_argument("--ca-file", metavar="FILE", default="", help="PEM authority of the mesh, if it uses TLS")
    places.add_argument("--cert-file", metavar="FILE", default="", help="PEM certificate of a worker")
    places.add_argument("--key-file", metavar="FILE", default="", help="PEM key of that certificate")
    places.add_argument(
        "--insecure", action="store_true", help="send the token without TLS beyond loopback; use only on a private network"
    )
    arguments = parser.parse_args()
    joining = _joining(parser, arguments) if arguments.join else None
    prepare_process()
    # seconds: the thread that dispatches tensor operations must not wait 5 ms for the event loop's
    # thread
    sys.setswitchinterval(0.0003)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "httpx2"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # torch warns about faster settings that we do not use
    if joining:
        from rollout_workers.worker.join import join

        leave_now(asyncio.run(join(joining)))
    if command := COMMANDS.get(arguments.kind):
        command(arguments.spec or "")
    try:
        spec = load_spec(arguments.spec, kinds=WORKERS)
    except SpecError as error:
        print(f"rollout-worker: {error}", file=sys.stderr)
        sys.exit(EXIT_NO_INPUT)
    if spec.kind != arguments.kind:
        print(f"rollout-worker: the spec has the kind `{spec.kind}`, not `{arguments.kind}`", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    if spec.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads))
    kind = WORKERS[spec.kind]
    if isinstance(kind, LinkedKind) and kind.follow and os.environ.get("RANK", "0") != "0":  # torchrun started several ranks
        leave_now(kind.follow(spec))
    who = identity(spec)
    configure(spec.otlp_endpoint, who)
    asyncio.run(_run(kind, spec, who))


def _joining(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Joining:
    """The options of a place for workers. Exits with the usage if they can't work."""
    from rollout_workers.worker.join import KINDS, Joining
    from rollout_workers.worker.tls import PemFiles

    if arguments.kind not in KINDS:
        parser.error(f"--join: {arguments.kind} is not a kind of worker that can join; the kinds are {', '.join(KINDS)}")
    if not arguments.token:
        parser.error("--join: name the file of the mesh token with --token")
    if bool(arguments.cert_file) != bool(arguments.key_file) or (arguments.cert_file and not arguments.ca_file):
        parser.error("--join: --ca-file, --cert-file, and --key-file belong together")
    addresses = [address for address in arguments.join.split(",") if address]
    tls = PemFiles(arguments.ca_file, arguments.cert_file, arguments.key_file)
    joining = Joining(arguments.kind, addresses, arguments.token, tls, insecure=arguments.insecure)
    if address := joining.exposed():
        parser.error(
            f"--join: {address} is not loopback, and the token would be sent in plain text; name the authority of the mesh"
            " with --ca-file, or permit it on a private network with --insecure"
        )
    return joining


async def _run(kind: LinkedKind | DetachedKind, spec: WorkerSpec, who: Identity) -> None:
    """Run the worker, and exit without waiting for threads that load a model or compute."""
    lifecycle = Lifecycle(exit_after=LEAVE_SECONDS)
    lifecycle.watch()
    process = Process(spec, who, lifecycle)
    if isinstance(kind, DetachedKind):
        await kind.run(process)
        leave_now(lifecycle.exit_code)
    heartbeat = Heartbeat(
        spec.nats_url,
        of_server(spec, spec.nats_token),
        name=who.registration,
        run=who.run,
        access=spec.nats,
        leaving=lambda: lifecycle.leaving,
    )
    heartbeat.start()
    events = Events(who, heartbeat)
    events.start()
    logging.getLogger().addHandler(EventHandler(events))
    try:
        await kind.run(process, Link(heartbeat, events))
    except Exception as error:
        if getattr(error, "permanent", False):
            log.error("the %s can't start: %s", who.service, error)
            lifecycle.crash(str(error))
            lifecycle.exit_code = EXIT_REFUSED
        else:
            log.exception("the %s failed", who.service)
            lifecycle.crash("the error above")
            lifecycle.exit_code = lifecycle.exit_code or EXIT_CRASH
    log.info("exiting with code %d%s", lifecycle.exit_code, f": {lifecycle.reason}" if lifecycle.reason else "")
    await asyncio.to_thread(events.close)
    heartbeat.stop()
    await asyncio.to_thread(flush)
    sys.stdout.flush()
    leave_now(lifecycle.exit_code)


if __name__ == "__main__":
    main()
