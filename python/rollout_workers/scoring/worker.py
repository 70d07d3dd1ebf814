"""The process of a reward worker: creates, starts, and stops its parts."""

from __future__ import annotations

import asyncio
import logging
import time

from rollout.reward.v1 import reward_pb2
from rollout.reward.v1.reward_pb2_grpc import add_RewardWorkerServiceServicer_to_server
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.data.prompts import Text
from rollout_workers.devices import devices_of
from rollout_workers.rewards.config import models_of
from rollout_workers.scoring.model import RewardModel
from rollout_workers.scoring.server import RewardServer
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.registration import Registration
from rollout_workers.worker.serving import Server
from rollout_workers.worker.spec import Identity, SpecError, is_deterministic, model_directory, resolve
from rollout_workers.worker.tls import of_mesh

log = logging.getLogger(__name__)

SERVICE = reward_pb2.DESCRIPTOR.services_by_name["RewardWorkerService"].full_name
_GRACE_SECONDS = 10.0


async def run_reward_worker(spec: WorkerSpec, who: Identity, lifecycle: Lifecycle) -> None:
    """Load the model for this worker's number, register, and serve until ``lifecycle`` ends."""
    model = await lifecycle.unless_leaving(asyncio.create_task(asyncio.to_thread(load, spec)))
    if model is None or lifecycle.leaving:
        return
    servicer = RewardServer(who, model)
    server = Server(spec.peer_token, tls=of_mesh(spec))
    add_RewardWorkerServiceServicer_to_server(servicer, server.grpc)
    address = await server.start([SERVICE])
    registration = Registration.of(spec, who, address, lifecycle)
    await asyncio.to_thread(registration.start)
    log.info("serving on %s", address)
    await lifecycle.wait()
    await asyncio.to_thread(registration.stop)
    await server.stop(_GRACE_SECONDS)
    servicer.close()


def load(spec: WorkerSpec) -> RewardModel:
    """The worker's model. Blocks. Raises ``BadSettings``, and :class:`SpecError` if the plan has no
    reward model with the worker's number."""
    import torch

    models = models_of(spec.plan.config.reward)
    number = int(spec.worker_id.rpartition("-")[2])
    if number >= len(models):
        raise SpecError(f"the plan has {len(models)} reward models, but none for worker {spec.worker_id}")
    model = models[number]
    if threads := model.threads or spec.threads:
        torch.set_num_threads(threads)
    began = time.monotonic()
    folder = resolve(spec, model.path)
    loaded = RewardModel(
        folder,
        dtype=getattr(torch, model.dtype or "float32"),
        end=Text.load(model_directory(spec)).eos_id,
        tokens=model.tokens_per_batch or 16_384,
        alone=is_deterministic(spec.plan.config),
        device=devices_of(spec)[0],
    )
    log.info("loaded %s in %.1f s", folder, time.monotonic() - began)
    return loaded
