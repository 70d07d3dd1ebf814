"""Environment workers in separate processes: rollout workers play in them over NATS, and nothing is
lost or played into a result twice when one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from multistep.worlds import actor_critic
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_testing.credential import peer_token, worker_token
from rollout_testing.daemon import Daemon
from rollout_testing.services import passing
from rollout_testing.waiting import until
from rollout_workers.multistep import MemoryChannel, MultiStepRolloutWorker, SettingsInvalid
from rollout_workers.multistep.engine import PolicyEngine
from rollout_workers.multistep.episodes import EpisodeRank
from rollout_workers.multistep.hosting import channels_of, ranks_of
from rollout_workers.multistep.link import CommandLink, host_episodes
from rollout_workers.multistep.player import ByRow, Played, Player
from rollout_workers.worker.bus import connect
from rollout_workers.worker.credential import Token

RUN, ROWS, CHUNK, ENVIRONMENTS, ROLLOUTS, EPISODES = "run-hosting", 12, 2, 2, 3, 30

WORLD = '''
import time

class Walk:
    """Ends after some steps that depend on the seed, or when its actions' sum is 9."""

    def reset(self, *, seed=None, options=None):
        self.steps, self.sum, self.seed = 0, 0, seed or 0
        return [float(self.seed), 0.0, 0.0, 0.0], {}

    def step(self, action):
        time.sleep(0.002)
        self.steps += 1
        self.sum += int(action)
        observation = [float(self.seed), float(self.steps), float(self.sum), 0.0]
        return observation, self.steps, self.sum >= 9, self.steps >= 10 + self.seed % 5, {}
'''


def spec_of(daemon: Daemon, folder: Path, rank: int) -> WorkerSpec:
    spec = WorkerSpec(worker_id=f"environment-{rank}", kind="environment", run_id=RUN, base_dir=str(folder))
    spec.nats_url, spec.consul_address = daemon.nats_url, daemon.consul
    spec.nats_token = spec.token = worker_token(daemon.token, RUN, "environment")
    spec.consul_token = daemon.token
    spec.peer_token, spec.incarnation, spec.nonce = peer_token(daemon.token, RUN), 1, "n"
    config = spec.plan.config
    config.engine.workers = ROLLOUTS
    config.multistep.environment, config.multistep.environments = "world.py:Walk", ROWS
    config.multistep.chunk, config.multistep.max_steps = CHUNK, 100
    return spec


def launch(spec: WorkerSpec, folder: Path) -> subprocess.Popen[bytes]:
    path = folder / f"{spec.worker_id}.json"
    for name in ("nats_token", "token", "consul_token", "peer_token"):
        secret = folder / f"{spec.worker_id}-{name}"
        secret.write_text(getattr(spec, name))
        secret.chmod(0o600)
    stored = WorkerSpec.FromString(spec.SerializeToString())
    for name in ("nats_token", "token", "consul_token", "peer_token"):
        setattr(stored, name, f"file:{folder / f'{spec.worker_id}-{name}'}")
    path.write_text(json_format.MessageToJson(stored))
    environment = {**os.environ, "WORLD_SIZE": str(ENVIRONMENTS), "OMP_NUM_THREADS": "1"}
    with open(folder / f"{spec.worker_id}.log", "ab") as log:
        command = [sys.executable, "-m", "rollout_workers", "environment", "--spec", str(path)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)


def rollout_worker(rank: int, channels: tuple[Any, Any], *, rows: int, ranks: int, rollouts: int) -> tuple[Player, PolicyEngine]:
    cfg = {
        "rollout": {"rank": rank, "world_size": rollouts, "receive_timeout_seconds": 60.0},
        "env": {"world_size": ranks, "train": {"total_num_envs": rows, "auto_reset": True}},
        "actor": {"model": {"num_action_chunks": CHUNK}},
        "algorithm": {"gamma": 0.5},
    }
    policy, worker = actor_critic(), MultiStepRolloutWorker(cfg)
    engine, by_row = PolicyEngine(policy, version=3, slots=rows // rollouts), ByRow(policy)
    worker.init_worker(by_row)
    link = CommandLink(*channels, rank, worker.settings.peers["train"], repeat_seconds=0.2)
    return Player(worker, link, engine, by_row=by_row), engine


async def play(player: Player, seeds: list[int]) -> list[Played]:
    return list(await asyncio.gather(*(player.play(Played("0/0/0", n, n, {"seed": n})) for n in seeds)))


def content(episode: Played) -> tuple[Any, ...]:
    assert episode.result is not None, episode
    tensors = {name: tensor.numpy().tobytes() for name, tensor in episode.tensors.items()}
    return episode.sample, episode.result.outcome, episode.result.reward, episode.steps, tensors


async def undisturbed(folder: Path) -> list[tuple[Any, ...]]:
    """The episodes as one process plays them, in as many rows as a rollout worker has."""
    rows = ROWS // ROLLOUTS
    namespace: dict[str, Any] = {}
    exec((folder / "world.py").read_text(), namespace)
    channels = MemoryChannel(), MemoryChannel()
    player, engine = rollout_worker(0, channels, rows=rows, ranks=1, rollouts=1)
    host = EpisodeRank(namespace["Walk"], rows=rows, chunk=CHUNK, most_steps=100)
    tasks = [asyncio.create_task(host_episodes(host, *channels, 0, 0)), asyncio.create_task(player.run())]
    try:
        return [content(episode) for episode in await play(player, list(range(EPISODES)))]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.shutdown()


@pytest.mark.timeout(240)
async def test_a_killed_environment_worker_loses_no_episode_and_repeats_none(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    expected = await undisturbed(tmp_path)
    specs = [spec_of(daemon, tmp_path, rank) for rank in range(ENVIRONMENTS)]
    processes = [launch(spec, tmp_path) for spec in specs]
    client = await connect(daemon.nats_url, Token(worker_token(daemon.token, RUN, "inference")), name="rollout", run=RUN)
    players: list[tuple[Player, PolicyEngine]] = []
    tasks: list[asyncio.Task[None]] = []
    try:
        for rank in range(ROLLOUTS):
            channels = channels_of(client, RUN, incarnation=1)
            players.append(rollout_worker(rank, channels, rows=ROWS, ranks=ENVIRONMENTS, rollouts=ROLLOUTS))
            tasks.append(asyncio.create_task(players[-1][0].run()))
        await until(lambda: len(passing(daemon, "environment-worker")) == ENVIRONMENTS)
        games = [asyncio.create_task(play(player, list(range(EPISODES))[n::ROLLOUTS])) for n, (player, _) in enumerate(players)]
        await until(lambda: all(engine.stats().steps >= 3 for _, engine in players))
        processes[0].kill()
        processes[0].wait()
        assert not any(game.done() for game in games)
        processes[0] = launch(specs[0], tmp_path)
        async with asyncio.timeout(90):
            episodes = [episode for game in games for episode in await game]
        assert sorted(content(episode)[0] for episode in episodes) == list(range(EPISODES))
        assert sorted(map(content, episodes), key=lambda one: one[0]) == expected
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            assert await asyncio.to_thread(process.wait, 30) == 0
        await until(lambda: not passing(daemon, "environment-worker"))
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, engine in players:
            await engine.shutdown()
        await client.close()


def test_wrong_ranks_are_refused(daemon: Daemon, tmp_path: Path) -> None:
    spec = spec_of(daemon, tmp_path, 1)
    rank, peers = ranks_of(spec, {"WORLD_SIZE": "2"})
    assert rank == 1 and [(peer.rank, peer.rows) for peer in peers] == [(1, 2), (2, 4)]
    for size, message in (("0", "WORLD_SIZE=0 is not an integer"), ("5", "can't be divided equally"), ("1", "rank 1 is not in")):
        with pytest.raises(SettingsInvalid, match=message):
            ranks_of(spec, {"WORLD_SIZE": size})
    spec.worker_id = "walk"
    with pytest.raises(SettingsInvalid, match="'walk' has no number"):
        ranks_of(spec, {})
