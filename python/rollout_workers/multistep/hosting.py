"""The process of an environment worker: hosts environments for the rollout ranks that it is mapped
to, and exchanges batches with them over NATS."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack

from nats.aio.client import Client

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.environments.acting import maker
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.multistep.channel import Channel
from rollout_workers.multistep.episodes import EpisodeRank
from rollout_workers.multistep.errors import SettingsInvalid
from rollout_workers.multistep.link import host_episodes
from rollout_workers.multistep.nats_channel import NatsChannel
from rollout_workers.multistep.ranks import Peer, mapped_ranks
from rollout_workers.rewards.pinned import Pinned
from rollout_workers.worker.bus import Reconnects, connect_worker
from rollout_workers.worker.lifecycle import Lifecycle
from rollout_workers.worker.registration import Registration
from rollout_workers.worker.serving import Server
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.tls import of_mesh

log = logging.getLogger(__name__)

_GRACE_SECONDS = 2.0
_SILENCE_SECONDS = 5.0


def rollout_ranks(config: RunConfig) -> int:
    """The inference workers that play for training: all but those that ``eval.workers`` reserves,
    which are the last ones."""
    return max(1, config.engine.workers - config.eval.workers)


def ranks_of(spec: WorkerSpec, environ: Mapping[str, str] = os.environ) -> tuple[int, tuple[Peer, ...]]:
    """The environment rank of a worker, which is its number, and the rollout ranks that it is
    mapped to. There are ``multistep.environment_workers`` environment ranks, or ``WORLD_SIZE`` if
    no scheduler starts them, by default one. Raises :class:`SettingsInvalid`."""
    scheduled, number = spec.plan.config.multistep.environment_workers, spec.worker_id.rpartition("-")[2]
    given = str(scheduled) if scheduled else environ.get("WORLD_SIZE", "1")
    if not given.isdecimal() or int(given) < 1:
        raise SettingsInvalid(f"WORLD_SIZE={given} is not an integer of at least 1")
    if not number.isdecimal():
        raise SettingsInvalid(f"the worker {spec.worker_id!r} has no number", fix="call it environment-0")
    config, rank = spec.plan.config, int(number)
    try:
        peers = rollout_ranks(config)
        return rank, mapped_ranks(config.multistep.environments, world_size=int(given), peers=peers, rank=rank)
    except ValueError as error:
        raise SettingsInvalid(f"multistep.environments of WORLD_SIZE={given} environment workers: {error}") from error


def channels_of(client: Client, run: str, incarnation: int) -> tuple[NatsChannel, NatsChannel]:
    """The channels of a run for commands of rollout ranks to environment ranks, and for answers.
    Another incarnation has others, so the processes of two incarnations don't exchange anything."""
    return _channel(client, run, f"commands-{incarnation}"), _channel(client, run, f"answers-{incarnation}")


def _channel(client: Client, run: str, name: str) -> NatsChannel:
    return NatsChannel(client, run, name, silence_seconds=_SILENCE_SECONDS)


async def run_environment_worker(spec: WorkerSpec, who: Identity, lifecycle: Lifecycle) -> None:
    """Make the environments, register, and answer commands until ``lifecycle`` ends. Raises
    :class:`SettingsInvalid`, ``EnvironmentChanged``, and the errors of ``maker``."""
    rank, peers = ranks_of(spec)
    await Pinned(spec.plan.inputs, spec.base_dir, lifecycle.crash, environment=True).verify_running()
    hosted = await lifecycle.unless_leaving(asyncio.create_task(asyncio.to_thread(_make, spec, peers)))
    if hosted is None or lifecycle.leaving:
        return
    async with AsyncExitStack() as cleanup:
        for host in hosted:
            cleanup.callback(host.close)
        client = await lifecycle.unless_leaving(asyncio.create_task(connect_worker(spec, who, lifecycle, Reconnects())))
        if client is None:
            return
        cleanup.push_async_callback(client.close)
        channels = channels_of(client, spec.run_id, spec.incarnation)
        tasks = [_host(host, peer, rank, spec, channels, lifecycle) for host, peer in zip(hosted, peers, strict=True)]
        server = Server(spec.peer_token, tls=of_mesh(spec))
        registration = Registration.of(spec, who, await server.start([]), lifecycle)
        await asyncio.to_thread(registration.start)
        log.info("environment rank %d serves %s", rank, ", ".join(f"{p.rows} rows of rollout rank {p.rank}" for p in peers))
        await lifecycle.wait()
        await asyncio.to_thread(registration.stop)
        for task in tasks:  # what they play begins again in the process that takes this one's place
            task.cancel()
        await asyncio.wait(tasks, timeout=_GRACE_SECONDS)
        await server.stop(_GRACE_SECONDS)


def _make(spec: WorkerSpec, peers: tuple[Peer, ...]) -> list[EpisodeRank]:
    multistep = spec.plan.config.multistep
    make = maker(multistep.environment, spec.base_dir, multistep.args)
    return [EpisodeRank(make, rows=peer.rows, chunk=multistep.chunk, most_steps=multistep.max_steps) for peer in peers]


def _host(
    host: EpisodeRank, peer: Peer, rank: int, spec: WorkerSpec, channels: tuple[Channel, Channel], lifecycle: Lifecycle
) -> asyncio.Task[None]:
    config = spec.plan.config
    limit = config.multistep.chunk * config.environment.turn_timeout_seconds
    hosting = host_episodes(host, *channels, rank, peer.rank, limit_seconds=limit or float("inf"))
    task = asyncio.create_task(hosting, name=f"environments of rollout rank {peer.rank}")

    def ended(done: asyncio.Task[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            lifecycle.crash(f"{done.get_name()}: {type(error).__name__}: {error}")

    task.add_done_callback(ended)
    return task
