"""The kinds of worker processes, and the commands of ``rollout-worker`` that run once.

A new kind is one entry in :data:`WORKERS` and one in the Go table (``libs/worker/kind.go``); a test
compares both with ``schemas/golden/worker_kinds.json``. Each recipe imports its modules itself, so
that a process does not load the modules of other kinds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.worker.spec import SPEC_VARIABLE, Identity

if TYPE_CHECKING:
    from rollout_workers.worker.events import Events
    from rollout_workers.worker.heartbeat import Heartbeat
    from rollout_workers.worker.lifecycle import Lifecycle


@dataclass(frozen=True, slots=True)
class Process:
    """The parts of a worker process that every recipe needs."""

    spec: WorkerSpec
    who: Identity
    lifecycle: Lifecycle


@dataclass(frozen=True, slots=True)
class Link:
    """The connections of a worker to NATS."""

    heartbeat: Heartbeat
    events: Events


@dataclass(frozen=True, slots=True)
class LinkedKind:
    """A kind of worker that is connected to NATS.

    run: serves until the lifecycle ends.

    follow: runs a rank other than 0 in a process that ``torchrun`` started, and returns its exit
    code.
    """

    run: Callable[[Process, Link], Awaitable[None]]
    follow: Callable[[WorkerSpec], int] | None = None


@dataclass(frozen=True, slots=True)
class DetachedKind:
    """A kind of worker without a connection to NATS. run: serves until the lifecycle ends."""

    run: Callable[[Process], Awaitable[None]]


async def _inference(process: Process, link: Link) -> None:
    from rollout_workers.inference.worker import run_inference_worker

    await run_inference_worker(process.spec, process.who, process.lifecycle, link.heartbeat, link.events)


async def _learner(process: Process, link: Link) -> None:
    from rollout_workers.learner.ranks import Team

    team = Team(process.spec.plan.config, process.lifecycle.lost)  # the other ranks import torch at the same time
    from rollout_workers.learner.worker import run_learner_worker

    await run_learner_worker(process.spec, process.who, process.lifecycle, link.heartbeat, link.events, team)


def _follow_learner(spec: WorkerSpec) -> int:
    from rollout_workers.learner.ranks import follow_leader, place

    return follow_leader(place(spec.plan.config))


async def _environment(process: Process, link: Link) -> None:
    from rollout_workers.multistep.hosting import run_environment_worker

    await run_environment_worker(process.spec, process.who, process.lifecycle)


async def _reward(process: Process, link: Link) -> None:
    from rollout_workers.scoring.worker import run_reward_worker

    await run_reward_worker(process.spec, process.who, process.lifecycle)


async def _trackers(process: Process) -> None:
    from rollout_workers.trackers.worker import run_sinks_worker

    await run_sinks_worker(process.spec, process.who, process.lifecycle)


def _replay(spec: str) -> NoReturn:
    from rollout_workers.learner.replay import replay

    sys.exit(replay(spec or os.environ.get(SPEC_VARIABLE, "")))


def _merge(spec: str) -> NoReturn:
    from rollout_workers.learner.merge import merge
    from rollout_workers.worker.lifecycle import leave_now

    leave_now(merge(spec))


def _export(spec: str) -> NoReturn:
    from rollout_workers.trackers.worker import export

    sys.exit(export(spec))


def _push(spec: str) -> NoReturn:
    from rollout_workers.offline.push import push

    sys.exit(push(spec))


def _infer(spec: str) -> NoReturn:
    from rollout_workers.offline.process import infer
    from rollout_workers.worker.lifecycle import leave_now, watch_stdin

    watch_stdin()
    leave_now(infer(spec))


def _plugin(spec: str) -> NoReturn:
    from rollout_plugins.command import command

    sys.exit(command(spec))


def _episodes(spec: str) -> NoReturn:
    from rollout_workers.offline.episodes import episodes
    from rollout_workers.worker.lifecycle import leave_now

    leave_now(episodes(spec))


WORKERS: Mapping[str, LinkedKind | DetachedKind] = MappingProxyType(
    {
        "environment": LinkedKind(_environment),
        "inference": LinkedKind(_inference),
        "learner": LinkedKind(_learner, follow=_follow_learner),
        "reward": LinkedKind(_reward),
        "sinks": DetachedKind(_trackers),
    }
)
"""Workers of a run, which the scheduler starts with a spec."""

COMMANDS: Mapping[str, Callable[[str], NoReturn]] = MappingProxyType(
    {
        "replay": _replay,
        "merge": _merge,
        "export": _export,
        "push": _push,
        "infer": _infer,
        "plugin": _plugin,
        "episodes": _episodes,
    }
)
"""Commands that the CLI starts. Each one gets the value of ``--spec`` and exits the process."""
