"""Environment steps per second of a policy that acts for many steps: environment workers over NATS,
next to gymnasium's own AsyncVectorEnv in one process.

    python bench/control.py [--rounds 3] [--seconds 2] [--environments 1,8,64] [--check]

Both play CartPole-v1 with the same policy, which chooses an action for all environments at once,
with one thread of torch. Ours is what a run has: one or two `rollout-worker environment` processes,
the registry and NATS of a rolloutd, and the player of an inference worker, in deterministic mode,
which records what trajectories are made of. Trajectories are not published, and nothing is trained.
The peer records nothing. The two take turns, and every round is printed. The bar is 0.8 of the peer
at 64 environments, by medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from google.protobuf import json_format
from record import recorded

from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_testing.credential import peer_token, worker_token
from rollout_testing.daemon import Daemon
from rollout_testing.services import passing
from rollout_testing.waiting import until
from rollout_workers.inference.policy_sampling import worker_config
from rollout_workers.multistep.actor_critic import ActorCritic, ActorCriticConfig
from rollout_workers.multistep.engine import PolicyEngine
from rollout_workers.multistep.hosting import channels_of
from rollout_workers.multistep.link import CommandLink
from rollout_workers.multistep.player import ByRow, Played, Player
from rollout_workers.multistep.policy import load_policy
from rollout_workers.multistep.worker import MultiStepRolloutWorker
from rollout_workers.worker.bus import connect
from rollout_workers.worker.credential import Token

TASK = "CartPole-v1"
BAR, AT = 0.8, 64
_WARM_SECONDS = 1.0
_SECRETS = ("nats_token", "token", "consul_token", "peer_token")


def main() -> int:
    """Print every round, and the medians."""
    parser = argparse.ArgumentParser(description="Measure environment steps per second.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--environments", default="1,8,64", help="comma-separated (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="fail below the bar")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    counts = [int(text) for text in options.environments.split(",")]
    with tempfile.TemporaryDirectory() as folder, recorded("control") as figures:
        ActorCritic(ActorCriticConfig(observation_size=4, action_size=2, chunk=1)).save_pretrained(f"{folder}/policy")
        with Peer(f"{folder}/policy", counts) as peer:
            ratios = asyncio.run(measure(Path(folder), peer, counts, options.rounds, options.seconds))
        figures["ratios"] = ratios
    missed = AT in ratios and ratios[AT] < BAR
    if missed:
        print(f"{ratios[AT]:.2f} of AsyncVectorEnv at {AT} environments is below {BAR}")
    return int(missed and options.check)


async def measure(folder: Path, peer: Peer, counts: list[int], rounds: int, seconds: float) -> dict[int, float]:
    """Play in turns. Returns the ratio of the medians by number of environments."""
    ratios: dict[int, float] = {}
    daemon = Daemon(folder / "state").start()
    try:
        print("| environments | round | environment workers | AsyncVectorEnv | ratio |\n|---|---|---|---|---|", flush=True)
        for count in counts:
            found: list[tuple[float, float]] = []
            async with hosted(daemon, folder, count) as engine:
                for number in range(1, rounds + 1):
                    await asyncio.sleep(_WARM_SECONDS)
                    before, began = engine.played, asyncio.get_running_loop().time()
                    await asyncio.sleep(seconds)
                    ours = (engine.played - before) / (asyncio.get_running_loop().time() - began)
                    await engine.pause()
                    theirs = await asyncio.to_thread(peer.play, count, seconds)
                    await engine.resume()
                    found.append((ours, theirs))
                    print(f"| {count} | {number} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} |", flush=True)
            ours, theirs = (statistics.median(side) for side in zip(*found, strict=True))
            ratios[count] = ours / theirs
            print(f"| {count} | median | {ours:,.0f} | {theirs:,.0f} | **{ratios[count]:.2f}** |", flush=True)
    finally:
        daemon.stop()
    return ratios


@asynccontextmanager
async def hosted(daemon: Daemon, folder: Path, count: int) -> AsyncIterator[PolicyEngine]:
    """Play episodes in ``count`` environments of environment workers until the block ends."""
    run, workers = f"run-{count}", min(count, 2)
    specs = [spec_of(daemon, folder, run, rank, count, workers) for rank in range(workers)]
    processes = [launch(spec, folder) for spec in specs]
    client = await connect(daemon.nats_url, Token(worker_token(daemon.token, run, "inference")), name="bench", run=run)
    tasks: list[asyncio.Task[None]] = []
    try:
        await until(lambda: len(passing(daemon, "environment-worker")) == workers, 60)
        policy: Any = load_policy(str(folder / "policy"), device="cpu", trust_remote_code=False)
        engine, by_row = PolicyEngine(policy, version=1, slots=count), ByRow(policy)
        worker = MultiStepRolloutWorker(worker_config(specs[0].plan.config, 0))
        worker.init_worker(by_row)
        link = CommandLink(*channels_of(client, run, 1), 0, worker.settings.peers["train"], repeat_seconds=1.0)
        player = Player(worker, link, engine, by_row=by_row)
        seeds = itertools.count()

        async def play() -> None:
            while True:
                seed = next(seeds)
                await player.play(Played("0/0/0", 0, seed, {"seed": seed}))

        tasks = [asyncio.create_task(each) for each in (player.run(), *(play() for _ in range(2 * count)))]
        yield engine
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in processes:
            process.terminate()
            process.wait()
        await client.close()


def spec_of(daemon: Daemon, folder: Path, run: str, rank: int, count: int, workers: int) -> WorkerSpec:
    """The spec of an environment worker."""
    spec = WorkerSpec(worker_id=f"environment-{rank}", kind="environment", run_id=run, base_dir=str(folder))
    spec.nats_url, spec.consul_address = daemon.nats_url, daemon.consul
    spec.nats_token = spec.token = worker_token(daemon.token, run, "environment")
    spec.consul_token, spec.peer_token = daemon.token, peer_token(daemon.token, run)
    spec.incarnation, spec.nonce, spec.threads = 1, "bench", 1
    config = spec.plan.config
    config.engine.workers = 1
    config.environment.turn_timeout_seconds = 120
    table = config.multistep
    table.environment, table.environments, table.environment_workers, table.chunk, table.max_steps = TASK, count, workers, 1, 500
    table.reward_type, table.bootstrap_type = "chunk_level", "standard"
    return spec


def launch(spec: WorkerSpec, folder: Path) -> subprocess.Popen[bytes]:
    """Start an environment worker."""
    name = f"{spec.run_id}-{spec.worker_id}"
    stored = WorkerSpec.FromString(spec.SerializeToString())
    for secret in _SECRETS:
        path = folder / f"{name}-{secret}"
        path.write_text(getattr(spec, secret))
        path.chmod(0o600)
        setattr(stored, secret, f"file:{path}")
    (folder / f"{name}.json").write_text(json_format.MessageToJson(stored))
    command = [sys.executable, "-m", "rollout_workers", "environment", "--spec", str(folder / f"{name}.json")]
    with open(folder / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


class Peer:
    """The process of bench/control_peer.py."""

    def __init__(self, policy: str, counts: list[int]) -> None:
        script = Path(__file__).with_name("control_peer.py")
        command = [sys.executable, str(script), policy, ",".join(map(str, counts)), TASK]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def play(self, count: int, seconds: float) -> float:
        """Steps per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count} {seconds}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer exited with code {self._process.wait()}")
        return line

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


if __name__ == "__main__":
    raise SystemExit(main())
