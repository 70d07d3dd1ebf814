"""The parts of an inference worker whose policy acts for many steps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nats.aio.client import Client

from rollout.algorithm import settings_of
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.environment import Result, Task
from rollout.environments.acting import maker
from rollout.run.v1.run_pb2 import PromptGroup, WorkerSpec
from rollout.trajectory.v1.trajectory_pb2 import TrajectoryEnvelope
from rollout_workers.devices import devices_of, repeat_bits
from rollout_workers.inference.sampler import Sampler
from rollout_workers.multistep.channel import MemoryChannel
from rollout_workers.multistep.encode import RecordedReceipts, encode_played
from rollout_workers.multistep.engine import PolicyEngine
from rollout_workers.multistep.episodes import EpisodeRank
from rollout_workers.multistep.hosting import channels_of, rollout_ranks
from rollout_workers.multistep.link import REPEAT_SECONDS, CommandLink, host_episodes
from rollout_workers.multistep.player import ByRow, Played, Player
from rollout_workers.multistep.policy import load_policy
from rollout_workers.multistep.worker import Mode, MultiStepRolloutWorker
from rollout_workers.worker.spec import is_deterministic, model_directory

ROW_INVALID = "ROW_INVALID"
_FOREVER = 1e9  # seconds
_SEEDS = (1 << 31) - 1  # environments may pass their seed to a generator of 32 bits


@dataclass(slots=True)
class Policy:
    """The policy of a worker: what ``Model`` is for a language model."""

    engine: PolicyEngine
    policy: Any
    merge: None = None


def load(spec: WorkerSpec) -> Policy:
    """Load the policy. Blocks. Raises ``SettingsInvalid`` and the errors of ``load_policy``."""
    config = spec.plan.config
    if is_deterministic(config):
        repeat_bits()
    if spec.threads:
        torch.set_num_threads(spec.threads)
    folder = spec.initial_weights or model_directory(spec)
    policy: Any = load_policy(folder, device=str(devices_of(spec)[0]), trust_remote_code=config.multistep.trust_remote_code)
    policy.to(getattr(torch, config.model.dtype or "float32"))
    slots = config.multistep.environments // rollout_ranks(config)
    return Policy(PolicyEngine(policy, version=spec.initial_version, slots=slots), policy)


def turn_seconds(config: RunConfig) -> float:
    """How long the environments of a worker may play a chunk."""
    return config.multistep.chunk * config.environment.turn_timeout_seconds


def receive_seconds(config: RunConfig, mode: Mode = "train") -> float:
    """How long a rollout rank waits for its environments. An environment worker limits a turn
    itself, and the scheduler replaces one that is lost or hangs."""
    if config.multistep.environment_workers and mode == "train":
        return _FOREVER
    return 3 * turn_seconds(config)  # its environments may have to be replaced


def worker_config(config: RunConfig, rank: int, mode: Mode = "train") -> dict[str, Any]:
    """The config of :class:`MultiStepRolloutWorker` for one inference worker of a run. In the mode
    ``eval`` it has separate environments, as many as for training."""
    multistep, workers = config.multistep, rollout_ranks(config)
    ranks, total = multistep.environment_workers or workers, multistep.environments
    if mode == "eval":
        rank, workers, ranks, total = 0, 1, 1, total // workers
    return {
        "rollout": {
            "rank": rank,
            "world_size": workers,
            "receive_timeout_seconds": receive_seconds(config, mode),
        },
        "env": {"world_size": ranks, **{each: {"total_num_envs": total, "auto_reset": True} for each in {"train", mode}}},
        "actor": {"model": {"num_action_chunks": multistep.chunk}},
        "algorithm": {
            "gamma": settings_of(config.algorithm.ppo).get("gamma", 1.0),
            "bootstrap_type": multistep.bootstrap_type,
        },
    }


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    """A task whose episodes have ended."""

    task: Task
    episodes: tuple[Played, ...]


class PlayRunner:
    """Plays the episodes of tasks, as ``EpisodeRunner`` does with a language model."""

    saves_episodes = False

    def __init__(self, player: Player, sampled: Callable[[str], None], silent: Callable[[], Mapping[int, float]] = dict) -> None:
        """sampled: called with the key of a task when one of its episodes has ended. silent: the
        environment workers that have not answered, and since when."""
        self._player, self._sampled, self._silent = player, sampled, silent

    async def run(self, tasks: Sequence[Task], kept: Sequence[Any] = ()) -> AsyncGenerator[list[PlayedGroup], None]:
        """Yield groups when they finish. Closing the iterator stops the others."""
        groups = {asyncio.create_task(self._group(task), name="play") for task in tasks}
        try:
            while groups:
                done, groups = await asyncio.wait(groups, return_when=asyncio.FIRST_COMPLETED)
                yield [task.result() for task in done]
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)

    def doing(self) -> dict[str, tuple[str, float]]:
        """``ENVIRONMENT_STEP`` for each open task, and since when its oldest episode is played; or
        ``environment-N`` if that worker has not answered, and since when."""
        found: dict[str, tuple[str, float]] = {}
        if silent := self._silent():
            since, rank = min((since, rank) for rank, since in silent.items())
            return {episode.key: (f"environment-{rank}", since) for episode in self._player.open()}
        for episode in self._player.open():
            if episode.key not in found or episode.since < found[episode.key][1]:
                found[episode.key] = "ENVIRONMENT_STEP", episode.since
        return found

    async def _group(self, task: Task) -> PlayedGroup:
        try:
            row: Row | str = read_row(task.row_json)
        except ValueError as error:
            row = str(error)

        async def play(sample: int, seed: int) -> Played:
            played = await play_row(self._player, task.key, sample, seed, row)
            self._sampled(task.key)
            return played

        return PlayedGroup(task, tuple(await asyncio.gather(*map(play, task.samples, task.seeds))))


Row = tuple[int | None, dict[str, Any] | None]
"""The ``seed`` and the ``options`` of a row."""


async def play_row(player: Player, key: str, sample: int, seed: int, row: Row | str) -> Played:
    """Play an episode of a row. row: as :func:`read_row` returns it, or what is wrong with it."""
    if isinstance(row, str):
        return Played(key, sample, seed, {}, result=Result(outcome="infra_failed", reason=ROW_INVALID, message=row))
    seed_of_row, options = row
    reset = {"seed": seed % _SEEDS if seed_of_row is None else seed_of_row, "options": options}
    return await player.play(Played(key, sample, seed, reset))


def read_row(row_json: bytes) -> Row:
    """The ``seed`` and the ``options`` of a row, each None if the row has none. Raises
    ``ValueError`` that names what is wrong."""
    try:
        row: Any = json.loads(row_json)
    except ValueError as error:
        raise ValueError(f"the row is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"the row is a {type(row).__name__}, not an object")
    seed, options = row.get("seed"), row.get("options")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ValueError(f"`seed` of the row is {json.dumps(seed)}, not an integer of at least 0")
    if options is not None and not isinstance(options, dict):
        raise ValueError(f"`options` of the row is {json.dumps(options)}, not an object")
    return seed, options


class PlaySampler(Sampler):
    """A ``Sampler`` of episodes of tensors."""

    async def encode(self, group: PromptGroup, finished: Any) -> list[TrajectoryEnvelope]:
        receipts = RecordedReceipts.of_episodes(self._receipts, finished.episodes)
        worker, least = self._who.worker, self._min_group_size
        return await asyncio.to_thread(encode_played, group, finished.episodes, receipts, worker, least)


@dataclass(frozen=True, slots=True)
class Playing:
    """A player with the tasks that keep it and its environments going. silent: the environment
    workers that have not answered, and since when."""

    player: Player
    silent: Callable[[], Mapping[int, float]]
    tasks: tuple[asyncio.Task[None], ...]
    close: Callable[[], None]


async def start_playing(spec: WorkerSpec, model: Policy, client: Client, mode: Mode = "train") -> Playing:
    """Start to play: in the environments of the run's environment workers, or in those of this
    worker, which are made. Evaluations are always in those of this worker. Raises the errors of
    ``maker``."""
    config = spec.plan.config
    rank = int(spec.worker_id.rpartition("-")[2]) if mode == "train" else 0
    worker = MultiStepRolloutWorker(worker_config(config, rank, mode))
    by_row = ByRow(model.policy) if is_deterministic(config) else None
    worker.init_worker(by_row or model.policy)
    close: Callable[[], None] = _nothing
    tasks: list[asyncio.Task[None]] = []
    if config.multistep.environment_workers and mode == "train":
        commands, answers = channels_of(client, spec.run_id, spec.incarnation)
    else:
        hosted = await asyncio.to_thread(_environments, spec, model.engine.slots)
        close = hosted.close
        commands, answers = MemoryChannel(), MemoryChannel()
        hosting = host_episodes(hosted, commands, answers, rank, rank, limit_seconds=turn_seconds(config), mode=mode)
        tasks.append(asyncio.create_task(hosting, name="environments"))
    link = CommandLink(commands, answers, rank, worker.settings.peers[mode], repeat_seconds=REPEAT_SECONDS, mode=mode)
    player = Player(worker, link, model.engine, by_row=by_row, mode=mode)
    tasks.append(asyncio.create_task(player.run(), name="player"))
    return Playing(player, link.silent, tuple(tasks), close)


def _nothing() -> None:
    pass


def _environments(spec: WorkerSpec, rows: int) -> EpisodeRank:
    multistep = spec.plan.config.multistep
    make = maker(multistep.environment, spec.base_dir, multistep.args)
    return EpisodeRank(make, rows=rows, chunk=multistep.chunk, most_steps=multistep.max_steps)
