"""The process of an inference worker: everything is made, started and stopped here."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass

from nats.aio.client import Client

from rollout.inference.v1 import inference_pb2
from rollout.inference.v1.inference_pb2_grpc import add_InferenceWorkerServiceServicer_to_server
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout.weights.v1.weights_pb2_grpc import add_WeightsServiceServicer_to_server
from rollout_workers.data.prompts import PromptReader
from rollout_workers.data.rows import rows_of
from rollout_workers.environments import registry as environments
from rollout_workers.environments.episode import EpisodeRunner
from rollout_workers.environments.teacher import taught
from rollout_workers.inference.evaluation import Evaluation
from rollout_workers.inference.generation import Generation
from rollout_workers.inference.model import Model, load
from rollout_workers.inference.params import of_run
from rollout_workers.inference.puller import Puller, capacity
from rollout_workers.inference.receipt import HeldWeightsMismatch, Holdings
from rollout_workers.inference.sampler import Outlet, RowSender, Sampler
from rollout_workers.inference.server import InferenceServer
from rollout_workers.inference.sharing import Sharing
from rollout_workers.inference.throughput import Throughput
from rollout_workers.rewards.config import scorer_of
from rollout_workers.rewards.rewards import RewardSource, Scorer
from rollout_workers.rewards.worker_client import RewardWorker
from rollout_workers.weights.transfer import service as delivery
from rollout_workers.weights.transfer.cache import WeightsCache
from rollout_workers.weights.transfer.fetch import Fetcher
from rollout_workers.worker.bus import connect
from rollout_workers.worker.discovery import Services
from rollout_workers.worker.events import Events
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.publisher import Publisher
from rollout_workers.worker.registration import Registration
from rollout_workers.worker.serving import Server
from rollout_workers.worker.spec import Identity, resolve
from rollout_workers.worker.stream import WorkItem, WorkQueue
from rollout_workers.worker.tls import of_agent, of_mesh

log = logging.getLogger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceWorkerService"].full_name
_ROWS_IN_HAND = 1024
_GRACE_SECONDS = 10.0
"""For requests in hand, from the beginning of a drain; ``drainGrace`` of
services/scheduler/workers.go is a little more."""
_GROUPS_SECONDS = 2.0
"""For groups in hand, which others sample again."""
VERIFY_LEAST_SECONDS = 10.0
_VERIFY_SHARE = 0.002  # most of the time that goes into verifying


async def run_inference_worker(
    spec: WorkerSpec, who: Identity, lifecycle: Lifecycle, heartbeat: Heartbeat, events: Events, model: Model | None = None
) -> None:
    """Load, serve and sample until ``lifecycle`` says to leave; then drain. model: given by tests,
    else loaded."""
    config = spec.plan.config
    connecting = asyncio.create_task(_connect(spec, who, lifecycle))
    services = Services(
        spec.consul_address, spec.token, consul_token=spec.consul_token, agent_files=of_agent(spec), tls=of_mesh(spec)
    )
    rewards = _rewards(spec, services)
    starting = asyncio.create_task(rewards.start() if rewards else asyncio.sleep(0))
    link: _Link | None = None
    server: Server | None = None
    closing = ExitStack()
    weights_cache = WeightsCache(spec.run_id, spec.run_directory, spec.worker_id, Fetcher(spec.run_id, services))
    try:
        loading = asyncio.create_task(_loaded(spec, model))
        model, _ = await asyncio.gather(lifecycle.unless_leaving(loading), lifecycle.unless_leaving(starting))
        link = await lifecycle.unless_leaving(connecting)
        if model is None or link is None or lifecycle.leaving:
            return
        holdings = Holdings(model.engine, model.merge)
        receipt = await holdings.read_back()
        log.info("holds weights version %d, %s", receipt.version, receipt.digest)
        gc.collect()
        gc.freeze()  # a full collection over the imported libraries would take 100 ms, in the middle of a step

        throughput = Throughput(model.engine.stats)
        prompts = PromptReader(model.text, prompt_field=config.data.prompt_field, chat_template=config.model.chat_template)
        environment = environments.build(environments.Context(config, prompts, rewards, model.text))
        params = of_run(config.sampling)
        outlet = Outlet(Publisher(link.client, who.trajectory_subject, who.trajectory_stream, who.process), services, throughput)
        worker: Sampler | RowSender
        rows = rows_of(config, model.text, prompts)
        if rows is not None:
            worker = RowSender(who, rows, outlet)
            puller = Puller(heartbeat, None, capacity=_ROWS_IN_HAND, prepare=_nothing, begin=worker.begin)
        else:
            runner = EpisodeRunner(model.engine, taught(config, environment, model.text, closing), model.text, params)
            worker = Sampler(who, runner, holdings, outlet, services)
            puller = Puller(
                heartbeat,
                holdings,
                capacity=capacity(config.engine.slots, config.sampling.group_size),
                slots=config.engine.slots,
                group_size=config.sampling.group_size,
                prepare=lambda items: _prepare(prompts, items),
                begin=worker.begin,
            )
            runner.sampled = puller.sampled
        outlet.puller = puller
        evaluation = None
        if rewards is not None and config.data.eval:
            held_out = resolve(spec, config.data.eval)
            evaluation = Evaluation(model.engine, environment, model.text, params, holdings, held_out)
        limit = config.engine.max_model_len
        servicer = InferenceServer(
            who,
            config.name,
            model.engine,
            holdings,
            Generation(model.engine, model.text, params, limit),
            evaluation,
            puller,
            throughput,
            lifecycle,
            limit,
            rewards,
            weights_cache,
        )
        server = Server(spec.token, tls=of_mesh(spec))
        add_InferenceWorkerServiceServicer_to_server(servicer, server.grpc)
        add_WeightsServiceServicer_to_server(delivery.WeightsServer(who, weights_cache), server.grpc)
        address = await server.start([SERVICE, delivery.SERVICE])
        registration = Registration.of(spec, who, address, lifecycle)
        await asyncio.to_thread(registration.start)
        queue = WorkQueue(link.client, heartbeat, who.work_stream, puller.deliver)
        link.queue = queue
        await queue.start()
        puller.start(queue)
        log.info("serving on %s", address)
        group_slots = min(config.engine.slots, config.sampling.group_size) or 1
        sharing = Sharing(link.client, who.idle_subject, puller, queue, group_slots)
        background = [
            asyncio.create_task(sharing.run(), name="sharing"),
            asyncio.create_task(_tell(throughput, events, holdings), name="tell"),
            asyncio.create_task(_verify(holdings, lifecycle), name="verify"),
        ]

        await lifecycle.wait()
        for task in background:
            task.cancel()
        await asyncio.to_thread(registration.stop)
        leaves_at = time.monotonic() + _GRACE_SECONDS
        await puller.stop()
        if lifecycle.exit_code:
            await worker.stop()
        finishing = asyncio.create_task(worker.drain(), name="drain")
        await asyncio.wait({finishing}, timeout=_GROUPS_SECONDS)
        if not finishing.done():
            await worker.stop()
        await finishing
        await server.stop(max(0.0, leaves_at - time.monotonic()))
    finally:
        if server is not None:
            await server.stop(0)
        if model is not None:
            await model.engine.shutdown()
        closing.close()
        connecting.cancel()
        if link is not None:
            await link.client.close()
        if rewards is not None:
            await rewards.close()
        weights_cache.close()
        await services.close()


async def _loaded(spec: WorkerSpec, model: Model | None) -> Model:
    return model or await asyncio.to_thread(load, spec)


@dataclass(slots=True)
class _Link:
    """The connection for work and trajectories, and the objects that are notified when it
    reconnects."""

    client: Client
    queue: WorkQueue | None = None


async def _connect(spec: WorkerSpec, who: Identity, lifecycle: Lifecycle) -> _Link:
    links: list[_Link] = []

    async def reconnected() -> None:
        for link in links:
            if link.queue is not None:
                link.queue.reconnected()

    client = await connect(
        spec.nats_url,
        spec.nats_token,
        name=who.registration,
        access=spec.nats,
        reconnected=reconnected,
        leaving=lambda: lifecycle.leaving,
    )
    links.append(_Link(client))
    return links[0]


def _rewards(spec: WorkerSpec, services: Services) -> Scorer | None:
    config = spec.plan.config
    if not config.HasField("reward"):
        return None

    def worker(number: int) -> RewardSource:
        return RewardWorker(services, spec.run_id, f"reward-{number}", start_seconds=config.limits.worker_start_seconds or 300.0)

    return scorer_of(config.reward, spec.base_dir, worker)


def _prepare(prompts: PromptReader, items: list[WorkItem]) -> None:
    """Tokenise while the weights may still be on their way; the reader remembers."""
    prompts.read([item.group.row_json for item in items])


def _nothing(items: list[WorkItem]) -> None:
    pass


async def _tell(throughput: Throughput, events: Events, holdings: Holdings) -> None:
    """Once a second, while something is sampled: the event ``sampling``."""
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


async def _verify(holdings: Holdings, lifecycle: Lifecycle) -> None:
    """Now and then digest what the engine holds; tensors that have changed by themselves fence the
    worker."""
    pause = VERIFY_LEAST_SECONDS
    while True:
        await asyncio.sleep(pause)
        began = time.monotonic()
        try:
            await holdings.verify()
        except HeldWeightsMismatch as error:
            lifecycle.fence(str(error))
            return
        except Exception:  # the engine reports it to the samples; the tensors may change all the same
            log.warning("what the engine holds could not be verified; it is tried again", exc_info=True)
        pause = max(VERIFY_LEAST_SECONDS, (time.monotonic() - began) / _VERIFY_SHARE)
