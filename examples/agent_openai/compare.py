"""Check that the policy improves by playing with the agent, and not if the rewards are shuffled.

    python examples/agent_openai/compare.py [--seeds 0,1,2] [--steps 40] [--games 400]

For each seed, two runs start with the weights of one warm-up: one with the rewards of the games,
one with rewards that are shuffled within each group. Before the first and after the last step each
policy plays games that no step trains on. The exit code is 1 unless every gain with the rewards of
the games is more than three standard errors, and no gain with shuffled rewards is.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import openai
from agent import connect, play, play_group
from prepare import LARGEST, REPOSITORY, opening

from rollout.client import AsyncClient, Episode, connect_async

EXAMPLE = Path(__file__).parent
STATE = REPOSITORY / ".cache" / "agent-openai"
ERRORS = 3
"""A gain above this many standard errors is one."""
PARALLEL = 64
HEADER = (
    "| seed | rewards | won before | won after | gain | standard error | gain / standard error |\n|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Result:
    """The shares of games that the policy of a run won before and after training."""

    seed: int
    shuffled: bool
    before: float
    after: float
    games: int

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def error(self) -> float:
        """The standard error of the gain."""
        return math.sqrt(sum(share * (1 - share) for share in (self.before, self.after)) / self.games)

    @property
    def errors(self) -> float:
        """The gain in standard errors."""
        return self.gain / self.error if self.error else math.copysign(math.inf, self.gain) if self.gain else 0.0

    @property
    def expected(self) -> bool:
        """Whether the policy has improved, or, if the rewards were shuffled, has not."""
        return (self.errors > ERRORS) is not self.shuffled

    def __str__(self) -> str:
        rewards = "shuffled" if self.shuffled else "of the game"
        return (
            f"| {self.seed} | {rewards} | {self.before:.3f} | {self.after:.3f} | {self.gain:+.3f} "
            f"| {self.error:.3f} | {self.errors:+.1f} |{'' if self.expected else ' **unexpected**'}"
        )


def main() -> int:
    """Train and print a table."""
    parser = argparse.ArgumentParser(description="Compare training on the rewards of games with training on shuffled rewards.")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run (default: %(default)s)")
    parser.add_argument("--games", type=int, default=400, help="games of each evaluation (default: %(default)s)")
    parser.add_argument("--state", type=Path, default=STATE, help="state folder, emptied first (default: %(default)s)")
    options = parser.parse_args()
    shutil.rmtree(options.state, ignore_errors=True)
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True, stdout=subprocess.DEVNULL)
    try:
        rollout(options.state, "run", "--config", str(EXAMPLE / "sft.toml"), "--no-report")
        results: list[Result] = []
        for seed in map(int, options.seeds.split(",")):
            for shuffled in (False, True):
                began = time.monotonic()
                results.append(asyncio.run(train(options.state, seed, shuffled, options.steps, options.games)))
                print(f"{results[-1]}  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    finally:
        rollout(options.state, "daemon", "stop", "--now")
    print("\n".join([HEADER, *map(str, results)]))
    return 0 if all(result.expected for result in results) else 1


async def train(state: Path, seed: int, shuffled: bool, steps: int, games: int) -> Result:
    """Train a run and evaluate its policy before and after that."""
    name = f"guess-{seed}{'-shuffled' if shuffled else ''}"
    sets = (f"name={name!r}", f"seed={seed}", f"train.steps={steps + 1}", "limits.agent_seconds=600")
    rollout(
        state, "run", "--config", str(EXAMPLE / "grpo.toml"), "--from", "guess-sft", "--detach", *(f"--set={s}" for s in sets)
    )
    before = after = math.nan
    async with connect() as policy, connect_async(state=state) as client, asyncio.TaskGroup() as tasks:
        group: list[Episode] = []
        async for episode in client.episodes(name):
            version = episode.task.min_weights_version
            if math.isnan(before):
                before = await evaluate(policy, episode, games, version)
            if version == steps:  # the workers of a run exit after its last step, so this run has one more
                after = await evaluate(policy, episode, games, version)
                break
            group.append(episode)
            if len(group) == episode.task.group_size:
                tasks.create_task(play_group(policy, group, shuffle=shuffled))
                group = []
        await end(client, name)
    return Result(seed, shuffled, before, after, games)


async def evaluate(policy: openai.AsyncOpenAI, episode: Episode, games: int, version: int) -> float:
    """The share of games that weights win. The games are outside of the session of the episode."""
    policy = policy.with_options(base_url=episode.base_url.replace(f"/sessions/{episode.session_id}", ""))
    free = asyncio.Semaphore(PARALLEL)

    async def won(at: int) -> float:
        async with free:
            number, options = 1 + at % LARGEST, {"extra_body": {"min_weights_version": version}}
            return (await play(policy, episode.model, opening(), number, **options))[0]

    return sum(await asyncio.gather(*map(won, range(games)))) / games


async def end(client: AsyncClient, name: str) -> None:
    """Cancel a run and wait until its workers have exited."""
    await client.cancel(name, drain=False)
    async for _ in client.follow(name):
        pass


def rollout(state: Path, *arguments: str) -> None:
    """Call the command-line tool."""
    subprocess.run(["rollout", "--state-dir", str(state), *arguments], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
