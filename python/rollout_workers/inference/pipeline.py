"""The parts through which work items pass in an inference worker: a puller and a sampler or row
sender."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

from nats.aio.client import Client

from rollout.algorithm import turns
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.environment import Environment
from rollout_workers.data.prompts import PromptReader
from rollout_workers.data.rows import Rows, rows_of
from rollout_workers.engines.base import Engine, SamplingParams
from rollout_workers.environments import registry as environments
from rollout_workers.environments.episode import EpisodeRunner
from rollout_workers.environments.limits import Limits
from rollout_workers.environments.teacher import with_teacher
from rollout_workers.inference.checkpoints import Checkpoints
from rollout_workers.inference.model import Model
from rollout_workers.inference.params import of_run
from rollout_workers.inference.puller import Puller, capacity
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.inference.sampler import Outlet, RowSender, Sampler
from rollout_workers.inference.throughput import Throughput
from rollout_workers.worker.bus import Reconnects
from rollout_workers.worker.calls import Calls
from rollout_workers.worker.discovery import Services
from rollout_workers.worker.heartbeat import Heartbeat
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.publisher import Publisher
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.stream import WorkItem, WorkQueue

_ACTIVE_ROWS = 1024
_DRAIN_SECONDS = 2.0
"""How long a drain waits for active groups. Another worker samples the others again."""


class Served(Protocol):
    """The model of a worker, as far as its service needs it."""

    @property
    def engine(self) -> Engine: ...


class ServedContext(Protocol):
    """The parts of a worker that its service needs."""

    @property
    def who(self) -> Identity: ...
    @property
    def config(self) -> RunConfig: ...
    @property
    def model(self) -> Served: ...
    @property
    def receipts(self) -> EngineReceipts: ...
    @property
    def throughput(self) -> Throughput: ...


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """The parts that sampling, generation, and evaluation share."""

    who: Identity
    config: RunConfig
    model: Model
    receipts: EngineReceipts
    prompts: PromptReader
    environment: Environment
    params: SamplingParams
    throughput: Throughput

    @classmethod
    def build(
        cls, who: Identity, context: environments.Context, environment: Environment, model: Model, receipts: EngineReceipts
    ) -> SamplingContext:
        config = context.config
        throughput = Throughput(model.engine.stats)
        return cls(who, config, model, receipts, context.prompts, environment, of_run(config.sampling), throughput)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The puller and the consumer of its work items."""

    puller: Puller
    consumer: Sampler | RowSender
    pulls: bool = True
    """False: an agent outside of the run takes the work items from the gateway, or the worker is
    reserved for evaluations."""

    @classmethod
    def build(
        cls, context: SamplingContext, publisher: Publisher, services: Services, calls: Calls, cleanup: ExitStack
    ) -> Pipeline:
        """calls: where open calls of the teacher are recorded. cleanup: receives the shutdown of
        the teacher's client. Raises ``SecretError``."""
        config, text = context.config, context.model.text
        rows = rows_of(config, text, PromptReader.of_rows(config, text))
        if rows is not None:
            made = cls.of_rows(context.who, rows, publisher, services, context.throughput)
            return replace(made, pulls=not context.who.reserved)

        def tokenize(items: list[WorkItem]) -> None:
            if config.HasField("reward"):  # else the environment reads the rows
                context.prompts.read([item.group.row_json for item in items])  # the reader caches them

        episodes = config.engine.slots
        if turns(config):  # slots stay busy while environments compute
            episodes = ceil(episodes * config.environment.concurrency)
        puller = Puller(
            context.receipts,
            capacity=capacity(episodes, config.sampling.group_size),
            slots=episodes,
            group_size=config.sampling.group_size,
            prepare=tokenize,
        )
        environment = with_teacher(config, context.environment, text, cleanup, calls)
        checkpoints = Checkpoints(context.who, services, context.receipts)
        runner = EpisodeRunner(
            context.model.engine,
            environment,
            text,
            context.params,
            puller.sampled,
            limits=Limits.of(config),
            chat=config.model.chat_template,
            keep=checkpoints.keep,
        )
        outlet = Outlet(publisher, services, context.throughput, puller, checkpoints)
        least = config.limits.min_group_size
        sampler = Sampler(context.who, runner, context.receipts, outlet, services, puller, least, checkpoints)
        return cls(puller, sampler, pulls=config.environment.kind != environments.EXTERNAL and not context.who.reserved)

    @classmethod
    def of_rows(cls, who: Identity, rows: Rows, publisher: Publisher, services: Services, throughput: Throughput) -> Pipeline:
        """The path of rows, which become examples."""
        puller = Puller(None, capacity=_ACTIVE_ROWS, prepare=_no_preparation)
        return cls(puller, RowSender(who, rows, Outlet(publisher, services, throughput, puller)))

    async def start(self, client: Client, heartbeat: Heartbeat, who: Identity, reconnects: Reconnects) -> WorkQueue:
        """Pull from the work stream of the run from now on, unless agents do."""
        queue = WorkQueue(client, heartbeat, who.work_stream, self.puller.deliver)
        reconnects.subscribe(queue.reconnected)
        await queue.start()
        if self.pulls:
            self.puller.start(queue, self.consumer.begin)
        return queue

    async def drain(self, lifecycle: Lifecycle) -> None:
        """Give back groups that were not started, finish active groups for up to two seconds, and
        stop the others. A worker with a nonzero exit code stops all at once."""
        await self.puller.stop()
        if lifecycle.exit_code:
            await self.consumer.stop()
        finishing = asyncio.create_task(self.consumer.drain(), name="drain")
        await asyncio.wait({finishing}, timeout=_DRAIN_SECONDS)
        if not finishing.done():
            await self.consumer.stop()
        await finishing


def _no_preparation(items: list[WorkItem]) -> None:
    pass
