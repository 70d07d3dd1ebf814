"""What an inference worker consists of if its policy acts for many steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from nats.aio.client import Client

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.inference.v1 import inference_pb2 as pb
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.engines.base import Ids
from rollout_workers.environments.limits import Limits
from rollout_workers.inference.pipeline import Pipeline
from rollout_workers.inference.policy_evaluation import PlayEvaluation
from rollout_workers.inference.policy_sampling import Playing, PlayRunner, PlaySampler, Policy, start_playing, turn_seconds
from rollout_workers.inference.puller import Puller, capacity
from rollout_workers.inference.receipt import EngineReceipts
from rollout_workers.inference.sampler import Outlet
from rollout_workers.inference.throughput import Throughput
from rollout_workers.multistep.engine import NoLanguageModel
from rollout_workers.multistep.worker import Mode
from rollout_workers.rewards.pinned import Pinned
from rollout_workers.worker.discovery import Services
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.publisher import Publisher
from rollout_workers.worker.spec import Identity, held_out_file
from rollout_workers.worker.stream import WorkItem


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What ``SamplingContext`` is for a language model."""

    who: Identity
    config: RunConfig
    model: Policy
    receipts: EngineReceipts
    throughput: Throughput


@dataclass(frozen=True, slots=True)
class Parts:
    """What the process of a worker has before its pipeline. client: of the run's NATS."""

    client: Client
    publisher: Publisher
    services: Services
    lifecycle: Lifecycle


class NoGeneration:
    """Refuses prompts. See ``Generation``."""

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse]:
        raise NoLanguageModel
        yield  # a generator

    async def tokenized(self, prompts: Sequence[object]) -> list[Ids]:
        raise NoLanguageModel

    def detokenized(self, prompts: Sequence[object]) -> list[str]:
        raise NoLanguageModel

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Do nothing: no request was accepted."""


async def open_pipeline(
    spec: WorkerSpec,
    who: Identity,
    model: Policy,
    receipts: EngineReceipts,
    parts: Parts,
    cleanup: AsyncExitStack,
) -> tuple[PolicyContext, Pipeline, PlayEvaluation | None]:
    """Make the environments and the pipeline of a worker, and its evaluation, if the run has one.
    Raises ``EnvironmentChanged``, and the errors of ``start_playing``."""
    config = spec.plan.config
    await Pinned(spec.plan.inputs, spec.base_dir, parts.lifecycle.crash, environment=True).verify_running()

    async def play(mode: Mode) -> Playing:
        playing = await start_playing(spec, model, parts.client, mode)
        cleanup.callback(playing.close)
        for task in playing.tasks:
            task.add_done_callback(lambda done: _crash(parts.lifecycle, done))
            cleanup.callback(task.cancel)
        return playing

    playing = await play("eval" if who.reserved else "train")
    evaluation = None
    if config.eval.every_steps and (rows := held_out_file(spec)):
        evaluation = PlayEvaluation(rows, receipts, partial(play, "eval"), playing.player if who.reserved else None)
    context = PolicyContext(who, config, model, receipts, Throughput(model.engine.stats))
    slots, size = model.engine.slots, config.sampling.group_size
    puller = Puller(receipts, capacity=capacity(slots, size), slots=slots, group_size=size, prepare=_no_preparation)
    outlet = Outlet(parts.publisher, parts.services, context.throughput, puller)
    runner = PlayRunner(playing.player, puller.sampled, playing.silent)
    sampler = PlaySampler(who, runner, receipts, outlet, parts.services, puller, config.limits.min_group_size)
    return context, Pipeline(puller, sampler, pulls=not who.reserved), evaluation


def limits_of(config: RunConfig) -> Limits:
    """The limits that a wait names."""
    return Limits(name=config.multistep.environment, turns=True, turn_seconds=turn_seconds(config))


def _crash(lifecycle: Lifecycle, done: asyncio.Task[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        lifecycle.crash(f"{done.get_name()}: {type(error).__name__}: {error}")


def _no_preparation(items: list[WorkItem]) -> None:
    pass
