"""The process of a learner worker: everything is made, started and stopped here."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from dataclasses import replace

from rollout.learner.v1 import learner_pb2
from rollout.learner.v1.learner_pb2_grpc import add_LearnerWorkerServiceServicer_to_server
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.learner import Trainer
from rollout_workers.learning.learner import Learner
from rollout_workers.learning.publication import Publication
from rollout_workers.learning.server import LearnerServer
from rollout_workers.learning.settings import lasting, refusals, trainer_config
from rollout_workers.learning.shelf import Shelf
from rollout_workers.mesh.discovery import Services
from rollout_workers.mesh.events import Events
from rollout_workers.mesh.lifecycle import Lifecycle
from rollout_workers.mesh.pulse import Pulse
from rollout_workers.mesh.registration import Registration
from rollout_workers.mesh.serving import Server
from rollout_workers.mesh.spec import Identity, model_directory

log = logging.getLogger(__name__)

SERVICE = learner_pb2.DESCRIPTOR.services_by_name["LearnerWorkerService"].full_name
_GRACE_SECONDS = 30.0


async def run_learner_worker(spec: WorkerSpec, who: Identity, lifecycle: Lifecycle, pulse: Pulse, events: Events) -> None:
    """Load the model, register and serve until ``lifecycle`` says to leave; a step that runs is finished first."""
    publication = Publication(
        spec.run_id, spec.run_directory, lasting=lambda step: lasting(spec.plan.config, step), shelf=Shelf(spec.run_id)
    )
    learner = Learner(publication)
    services = Services(spec.consul_address, spec.token, consul_token=spec.consul_token, ca_file=spec.consul_ca_file)
    try:
        began = time.monotonic()
        settings = replace(
            trainer_config(spec.plan.config, spec.threads, spec.base_dir),
            refusals=refusals(spec.plan.config, spec.run_directory, events),
        )
        loading = asyncio.create_task(learner.load(lambda: Trainer(model_directory(spec), settings)))
        leaving = asyncio.create_task(lifecycle.wait())
        await asyncio.wait({loading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if lifecycle.leaving:
            return
        await loading
        log.info("loaded %s in %.1f s", model_directory(spec), time.monotonic() - began)
        gc.collect()
        gc.freeze()  # a full collection over the imported libraries would take 100 ms, in the middle of a step
        server = Server(spec.token)
        add_LearnerWorkerServiceServicer_to_server(LearnerServer(who, learner, services, lifecycle), server.grpc)
        address = await server.start([SERVICE])
        registration = Registration(
            who,
            agent=spec.consul_address,
            address=address,
            consul_token=spec.consul_token,
            ca_file=spec.consul_ca_file,
            superseded=lifecycle.superseded,
        )
        await asyncio.to_thread(registration.start)
        log.info("serving on %s", address)

        await lifecycle.wait()
        await learner.drain()
        await asyncio.to_thread(registration.stop)
        await server.stop(_GRACE_SECONDS)
    finally:
        learner.close()
        await asyncio.to_thread(publication.close)
        await services.close()
