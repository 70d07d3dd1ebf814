"""The process of a learner worker: creates, starts, and stops its parts."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from dataclasses import replace
from pathlib import Path

from rollout.learner.v1 import learner_pb2
from rollout.learner.v1.learner_pb2_grpc import add_LearnerWorkerServiceServicer_to_server
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout.weights.v1.weights_pb2_grpc import add_WeightsServiceServicer_to_server
from rollout_workers.learner.base import base_of
from rollout_workers.learner.completions import keep_of
from rollout_workers.learner.feed import feeding
from rollout_workers.learner.held_out import held_out_of
from rollout_workers.learner.learner import Learner
from rollout_workers.learner.publication import Publication
from rollout_workers.learner.ranks import Team
from rollout_workers.learner.server import LearnerServer
from rollout_workers.learner.settings import lasting, refusals, trainer_config
from rollout_workers.learner.trainer_thread import TrainerThread
from rollout_workers.weights.transfer import service as delivery
from rollout_workers.weights.transfer.artifacts import StoredWeights
from rollout_workers.weights.transfer.catalog import Catalog
from rollout_workers.weights.transfer.publish_folder import Superseded
from rollout_workers.weights.transfer.shared_memory import SharedMemory
from rollout_workers.worker.credential import of_server, own
from rollout_workers.worker.discovery import Services
from rollout_workers.worker.events import Events
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.registration import Registration
from rollout_workers.worker.serving import Server
from rollout_workers.worker.spec import Identity, is_deterministic, model_directory
from rollout_workers.worker.tls import of_agent, of_mesh
from rollout_workers.worker.watchdog import LIMIT_SECONDS, Watchdog

log = logging.getLogger(__name__)

SERVICE = learner_pb2.DESCRIPTOR.services_by_name["LearnerWorkerService"].full_name
_GRACE_SECONDS = 30.0


async def run_learner_worker(
    spec: WorkerSpec, who: Identity, lifecycle: Lifecycle, heartbeat: Heartbeat, events: Events, team: Team | None = None
) -> None:
    """Load the model, register, and serve until ``lifecycle`` ends; a running step is finished
    first.

    team: the learner's ranks if they were already started; they end with this worker.
    """
    services = Services(
        spec.consul_address,
        own(spec),
        services_key=spec.services_key,
        peer_token=spec.peer_token,
        consul_token=of_server(spec, spec.consul_token),
        agent_files=of_agent(spec),
        tls=of_mesh(spec),
    )
    stored = Path(spec.run_directory) / "weights" / "stored"
    catalog = Catalog(StoredWeights(spec.run_id, stored, services, spec.incarnation))
    try:
        publication = Publication(
            spec.run_id,
            spec.run_directory,
            lasting=lambda step: lasting(spec.plan.config, step),
            memory=SharedMemory(spec.run_id),
            catalog=catalog,
            incarnation=spec.incarnation,
        )
    except Superseded as error:
        lifecycle.fence(str(error))
        if team is not None:
            await asyncio.to_thread(team.close)
        await services.close()
        return
    team = team or Team(spec.plan.config, lifecycle.lost)
    thread: TrainerThread | None = None
    try:
        began = time.monotonic()
        settings = replace(
            trainer_config(spec.plan.config, spec.threads, spec.base_dir),
            refusals=refusals(spec.plan.config, spec.run_directory, events),
        )
        loading = asyncio.create_task(TrainerThread.start(lambda: team.trainer(model_directory(spec), settings)))
        thread = await lifecycle.unless_leaving(loading)
        if thread is None or lifecycle.leaving:
            return
        log.info("loaded %s in %.1f s", model_directory(spec), time.monotonic() - began)
        gc.collect()
        gc.freeze()  # a full collection over the imported libraries would take 100 ms, in the middle of a step
        base = base_of(spec, services)
        if base is not None:
            base.keep()
        learner = Learner(
            thread,
            publication,
            keep_of(spec.plan.config),
            lambda: held_out_of(spec),
            base,
            digests=is_deterministic(spec.plan.config),
        )
        server = Server(spec.peer_token, tls=of_mesh(spec))
        watchdog = _watchdog(spec, learner)
        learners = LearnerServer(who, learner, services, lifecycle, lambda: watchdog.still)
        add_LearnerWorkerServiceServicer_to_server(learners, server.grpc)
        add_WeightsServiceServicer_to_server(delivery.WeightsServer(who, catalog), server.grpc)
        address = await server.start([SERVICE, delivery.SERVICE])
        registration = Registration.of(spec, who, address, lifecycle)
        await asyncio.to_thread(registration.start)
        log.info("serving on %s", address)

        watchdog.start()
        async with feeding(spec, who, lifecycle, heartbeat, services):
            await lifecycle.wait()
        watchdog.stop()
        await learner.drain()
        await asyncio.to_thread(registration.stop)
        await server.stop(_GRACE_SECONDS)
    finally:
        if thread is not None:
            thread.close()
        await catalog.close(keep=not publication.mine)
        await asyncio.to_thread(team.close)
        await asyncio.to_thread(publication.close)
        await services.close()


def _watchdog(spec: WorkerSpec, learner: Learner) -> Watchdog:
    config = spec.plan.config
    # with several ranks, the others first report a rank that blocks them
    least = config.limits.rank_timeout_seconds if config.train.ranks > 1 else 0.0
    watchdog = Watchdog(max(config.limits.stall_seconds or LIMIT_SECONDS, least))
    watchdog.add("the learner finished no micro-batch of its step", lambda: learner.trained)
    return watchdog
