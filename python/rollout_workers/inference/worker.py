"""The process of an inference worker: starts its parts, serves, and drains."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nats.aio.client import Client

from rollout import algorithm
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.inference.v1 import inference_pb2
from rollout.inference.v1.inference_pb2_grpc import add_InferenceWorkerServiceServicer_to_server
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout.weights.v1.weights_pb2_grpc import add_WeightsServiceServicer_to_server
from rollout_workers.data.prompts import PromptReader
from rollout_workers.engines.base import Engine
from rollout_workers.environments import registry as environments
from rollout_workers.environments.limits import Limits
from rollout_workers.inference.admission import Admission
from rollout_workers.inference.evaluation import HELD_OUT, Evaluation, Suite
from rollout_workers.inference.generation import Generation
from rollout_workers.inference.in_flight import InFlight
from rollout_workers.inference.model import Model, load
from rollout_workers.inference.monitor import Answers, progress_of, report_throughput, verify_weights
from rollout_workers.inference.params import of_run
from rollout_workers.inference.pipeline import Pipeline, SamplingContext, ServedContext
from rollout_workers.inference.receipt import EngineReceipts, Verification
from rollout_workers.inference.server import InferenceServer
from rollout_workers.inference.sharing import Sharing
from rollout_workers.inference.updates import Pauses, WeightsUpdates
from rollout_workers.rewards.config import scorer_of
from rollout_workers.rewards.pinned import Pinned
from rollout_workers.rewards.rewards import RewardSource, Scorer
from rollout_workers.rewards.worker_client import RewardWorker
from rollout_workers.weights.transfer import service as delivery
from rollout_workers.weights.transfer.cache import WeightsCache
from rollout_workers.weights.transfer.fetch import Fetcher
from rollout_workers.weights.transfer.publish_folder import versions
from rollout_workers.worker.bus import Reconnects, connect_worker
from rollout_workers.worker.calls import Calls
from rollout_workers.worker.credential import of_server, own
from rollout_workers.worker.discovery import Services
from rollout_workers.worker.events import Events
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.publisher import Publisher
from rollout_workers.worker.registration import Registration
from rollout_workers.worker.serving import Server
from rollout_workers.worker.spec import Identity, held_out_file, suite_file
from rollout_workers.worker.stream import WorkQueue
from rollout_workers.worker.tls import of_agent, of_mesh
from rollout_workers.worker.watchdog import LoopBeat, Observe, Watchdog

if TYPE_CHECKING:
    from rollout_workers.inference.policy_sampling import Policy

log = logging.getLogger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceWorkerService"].full_name
_GRACE_SECONDS = 10.0
"""How long open requests may continue during a drain. ``drainGrace`` in
services/scheduler/workers.go is slightly longer."""


async def run_inference_worker(
    spec: WorkerSpec,
    who: Identity,
    lifecycle: Lifecycle,
    heartbeat: Heartbeat,
    events: Events,
    model: Model | Policy | None = None,
) -> None:
    """Load the model, serve, and sample until ``lifecycle`` ends; then drain. model: for tests;
    None: load it."""
    async with AsyncExitStack() as cleanup:
        reconnects = Reconnects()
        connecting = asyncio.create_task(connect_worker(spec, who, lifecycle, reconnects))
        services = Services(
            spec.consul_address,
            own(spec),
            services_key=spec.services_key,
            peer_token=spec.peer_token,
            consul_token=of_server(spec, spec.consul_token),
            agent_files=of_agent(spec),
            tls=of_mesh(spec),
        )
        cleanup.push_async_callback(services.close)
        weights_cache = WeightsCache(spec.run_id, spec.run_directory, spec.worker_id, Fetcher(spec.run_id, services))
        cleanup.callback(weights_cache.close)
        calls = Calls()
        rewards = _rewards(spec, services, lifecycle, calls)
        if rewards is not None:
            cleanup.push_async_callback(rewards.close)
        cleanup.push_async_callback(_disconnect, connecting)
        clients = cleanup.enter_context(ExitStack())

        starting = asyncio.create_task(rewards.start() if rewards else asyncio.sleep(0))
        loading = asyncio.create_task(_load(spec, model, cleanup))
        model, _ = await asyncio.gather(lifecycle.unless_leaving(loading), lifecycle.unless_leaving(starting))
        client = await lifecycle.unless_leaving(connecting)
        if model is None or client is None or lifecycle.leaving:
            return
        receipts = await _read_weights(model, Verification.of(spec.plan.config))
        admission = None
        if isinstance(model, Model) and (spec.plan.config.weights.update == "rolling" or who.reserved):
            admission = Admission(model.engine)
            model = replace(model, engine=cast(Engine, admission))
        publisher = Publisher(client, who.trajectory_subject, who.trajectory_stream, who.process)
        updates = WeightsUpdates(receipts, weights_cache, lifecycle, admission)
        if isinstance(model, Model):
            parts = _environment_context(spec, model, lifecycle, rewards, calls)
            environment = await cleanup.enter_async_context(environments.opened(parts))
            context = SamplingContext.build(who, parts, environment, model, receipts)
            pipeline = Pipeline.build(context, publisher, services, calls, clients)
            pauses = Pauses(model.engine, pipeline.puller)
            suites = await _suites(spec, who, context, parts, services, lifecycle, cleanup)
            servicer = _servicer(spec, context, pipeline, calls, lifecycle, rewards, updates, pauses, suites)
            computes = "the engine has samples and computed no token", partial(progress_of, model.engine)
        else:
            from rollout_workers.inference import policy_serving as serving

            given = serving.Parts(client, publisher, services, lifecycle)
            context, pipeline, played = await serving.open_pipeline(spec, who, model, receipts, given, cleanup)
            pauses = Pauses(model.engine, pipeline.puller)
            in_flight = InFlight(
                who,
                pipeline.puller,
                pipeline.consumer,
                calls,
                serving.limits_of(spec.plan.config),
                speed=lambda: context.throughput.rates()[1],
                version=lambda: receipts.version,
                held_out=played.doing if played else list,
            )
            servicer = InferenceServer(
                context, serving.NoGeneration(), played, pipeline.puller, in_flight, lifecycle, None, updates, pauses
            )
            computes = "the policy chose no actions", model.engine.progress
        if _starts_paused(spec.plan.config) and not who.reserved:
            await pauses.pause(0)

        server = Server(spec.peer_token, tls=of_mesh(spec))
        cleanup.push_async_callback(server.stop, 0)
        registration = await _serve(spec, who, lifecycle, server, servicer, delivery.WeightsServer(who, weights_cache))
        queue = await pipeline.start(client, heartbeat, who, reconnects)
        beat, answers = LoopBeat(), Answers(model.engine)
        watchdog = _watchdog(spec, computes, beat, answers)
        cleanup.callback(watchdog.stop)
        watchdog.start()
        background = [
            *((asyncio.create_task(_sharing(context, client, pipeline, queue).run(), name="sharing"),) if pipeline.pulls else ()),
            asyncio.create_task(report_throughput(context.throughput, events, receipts), name="throughput"),
            asyncio.create_task(verify_weights(receipts, lifecycle), name="verify"),
            asyncio.create_task(beat.run(), name="beat"),
            asyncio.create_task(answers.run(), name="answers"),
        ]

        await lifecycle.wait()
        watchdog.stop()
        for task in background:
            task.cancel()
        await asyncio.to_thread(registration.stop)
        leaves_at = time.monotonic() + _GRACE_SECONDS
        await pipeline.drain(lifecycle)
        await server.stop(max(0.0, leaves_at - time.monotonic()))


def _watchdog(spec: WorkerSpec, computes: tuple[str, Observe], beat: LoopBeat, answers: Answers) -> Watchdog:
    watchdog = Watchdog(spec.plan.config.limits.stall_seconds)
    watchdog.add(*computes)
    watchdog.add("the engine answered no request", lambda: answers.count)
    watchdog.add("the event loop of the worker was blocked", lambda: beat.count)
    return watchdog


async def _disconnect(connecting: asyncio.Task[Client]) -> None:
    connecting.cancel()
    if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
        await connecting.result().close()


async def _load(spec: WorkerSpec, model: Model | Policy | None, cleanup: AsyncExitStack) -> Model | Policy:
    while model is None:
        try:
            model = await asyncio.to_thread(_policy if spec.plan.config.HasField("multistep") else load, spec)
        except Exception:
            newer = _newer(spec)
            if newer is None:
                raise
            log.info(
                "version %d was removed while it was loaded; loading version %d", spec.initial_version, newer.initial_version
            )
            spec = newer
    cleanup.push_async_callback(model.engine.shutdown)
    return model


def _policy(spec: WorkerSpec) -> Policy:
    from rollout_workers.inference.policy_sampling import load as load_policy

    return load_policy(spec)


def _newer(spec: WorkerSpec) -> WorkerSpec | None:
    """The spec with the newest version, if the learner has removed the one that the spec names: it
    keeps two, and a load may take longer than two steps."""
    folder = Path(spec.initial_weights)
    if not spec.initial_weights or folder.exists():
        return None
    version, newest = max((found for found in versions(folder.parent) if found[1].exists()), default=(0, folder))
    if version <= spec.initial_version:
        return None
    newer = WorkerSpec()
    newer.CopyFrom(spec)
    newer.initial_version, newer.initial_weights = version, str(newest)
    return newer


async def _read_weights(model: Model | Policy, verification: Verification) -> EngineReceipts:
    receipts = EngineReceipts(model.engine, model.merge, verification)
    receipt = await receipts.read_back()
    log.info("loaded weights version %d, %s", receipt.version, receipt.digest)
    gc.collect()
    gc.freeze()  # a full collection over the imported libraries would take 100 ms in the middle of a step
    return receipts


def _starts_paused(config: RunConfig) -> bool:
    """Whether the engine samples nothing until the controller has brought it to the version of the
    other workers and resumes it."""
    return config.weights.update == "atomic" and not algorithm.traits(algorithm.name_of(config)).scores


def _rewards(
    spec: WorkerSpec, services: Services, lifecycle: Lifecycle, calls: Calls, config: RunConfig | None = None
) -> Scorer | None:
    """The scorer of the run, or of the configuration of a suite; None without a reward."""
    of_suite, config = config is not None, config or spec.plan.config
    if not config.HasField("reward"):
        return None

    def worker(number: int) -> RewardSource:
        return RewardWorker(services, spec.run_id, f"reward-{number}", start_seconds=config.limits.worker_start_seconds or 300.0)

    pinned = Pinned(spec.plan.inputs, spec.base_dir, lifecycle.crash, plugins=spec.plan.plugins)
    return scorer_of(config.reward, spec.base_dir, worker, pinned, calls, evaluates=of_suite)


def _environment_context(
    spec: WorkerSpec, model: Model, lifecycle: Lifecycle, rewards: Scorer | None, calls: Calls
) -> environments.Context:
    config = spec.plan.config
    pinned = Pinned(spec.plan.inputs, spec.base_dir, lifecycle.crash, environment=True, plugins=spec.plan.plugins)
    prompts = PromptReader.of_samples(config, model.text)
    return environments.Context(
        config, prompts, rewards, model.text, spec.base_dir, pinned.verify_running, spec.plan.tools, lifecycle.crash, calls
    )


def _servicer(
    spec: WorkerSpec,
    context: SamplingContext,
    pipeline: Pipeline,
    calls: Calls,
    lifecycle: Lifecycle,
    rewards: Scorer | None,
    updates: WeightsUpdates,
    pauses: Pauses,
    suites: Mapping[str, Suite],
) -> InferenceServer:
    config, engine, text = context.config, context.model.engine, context.model.text
    evaluation = None
    if suites:
        limits = Limits.of(config)
        evaluation = Evaluation(engine, text, context.receipts, suites, limits=limits, chat=config.model.chat_template)
    generation = Generation(context.model, context.params, config.engine.max_model_len, family=config.model.chat_family)
    in_flight = InFlight(
        context.who,
        pipeline.puller,
        pipeline.consumer,
        calls,
        Limits.of(config),
        speed=lambda: context.throughput.rates()[1],
        version=lambda: context.receipts.version,
        held_out=evaluation.doing if evaluation else list,
    )
    return InferenceServer(context, generation, evaluation, pipeline.puller, in_flight, lifecycle, rewards, updates, pauses)


async def _suites(
    spec: WorkerSpec,
    who: Identity,
    context: SamplingContext,
    parts: environments.Context,
    services: Services,
    lifecycle: Lifecycle,
    cleanup: AsyncExitStack,
) -> dict[str, Suite]:
    """The held-out rows and the suites that this worker may be asked to evaluate."""
    config = context.config
    suites: dict[str, Suite] = {}
    if algorithm.rewarded(config) and (rows := held_out_file(spec)):
        suites[HELD_OUT] = Suite(rows, context.environment, context.params)
    if config.eval.workers and not who.reserved:
        return suites
    for name, suite in sorted(spec.suites.items()):
        rewards = parts.rewards
        if suite.reward != config.reward:
            rewards = _rewards(spec, services, lifecycle, parts.calls, suite)
            if rewards is not None:
                cleanup.push_async_callback(rewards.close)
                await rewards.start()
        environment = context.environment
        if rewards is not parts.rewards or suite.sampling.max_tokens != config.sampling.max_tokens:
            prompts = PromptReader.of_samples(suite, parts.text)
            opened = environments.opened(replace(parts, config=suite, prompts=prompts, rewards=rewards))
            environment = await cleanup.enter_async_context(opened)
        cluster = config.eval.suites[name].cluster
        suites[name] = Suite(suite_file(spec, name), environment, of_run(suite.sampling), cluster)
    return suites


async def _serve(
    spec: WorkerSpec,
    who: Identity,
    lifecycle: Lifecycle,
    server: Server,
    inference: InferenceServer,
    weights: delivery.WeightsServer,
) -> Registration:
    """Start the gRPC server and register its address."""
    add_InferenceWorkerServiceServicer_to_server(inference, server.grpc)
    add_WeightsServiceServicer_to_server(weights, server.grpc)
    address = await server.start([SERVICE, delivery.SERVICE])
    registration = Registration.of(spec, who, address, lifecycle)
    await asyncio.to_thread(registration.start)
    log.info("serving on %s", address)
    return registration


def _sharing(context: ServedContext, client: Client, pipeline: Pipeline, queue: WorkQueue) -> Sharing:
    group_slots = min(context.config.engine.slots, context.config.sampling.group_size) or 1
    return Sharing(client, context.who.idle_subject, pipeline.puller, queue, group_slots, lambda: context.receipts.version)
