"""Train one config with several learning rates at the same time and print the best. Uses the
asyncio client.

python examples/clients/python/sweep.py examples/addition/grpo.toml 1e-4 3e-4 1e-3
"""

import argparse
import asyncio
import re
from pathlib import Path

from rollout.client import AsyncClient, connect_async


async def train(client: AsyncClient, config: Path, rate: str, overrides: list[str]) -> tuple[float, str, str]:
    """Run the config with one learning rate. Returns the last mean reward, the rate, and the
    run."""
    name = re.sub("[^a-z0-9]+", "-", f"{config.stem}-{rate}".lower())  # so that other commands can name each run
    plan = await client.plan(config, set=[f'name="{name}"', *overrides, f"train.learning_rate={rate}"])
    run = (await client.submit(plan)).run_id
    async for status in client.follow(run):
        print(f"{rate}: step {status.run.step}/{status.run.total_steps}", flush=True)
    points = (await client.metrics(run, ["reward/mean"])).get("reward/mean", [])
    return (points[-1][1] if points else float("-inf")), rate, run


async def main(options: argparse.Namespace) -> None:
    async with connect_async(state=options.state) as client, asyncio.TaskGroup() as group:
        jobs = [group.create_task(train(client, options.config, rate, options.set)) for rate in options.rates]
    for reward, rate, run in sorted((job.result() for job in jobs), reverse=True):
        print(f"{reward:.3f} with learning_rate = {rate} ({run})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="compare learning rates")
    parser.add_argument("config", type=Path, help="the run's TOML")
    parser.add_argument("rates", nargs="+", help="learning rates")
    parser.add_argument("--state", type=Path, help="state folder of the local rolloutd (default: the usual one)")
    parser.add_argument("--set", action="append", default=[], help="override of one field: a.b=VALUE")
    asyncio.run(main(parser.parse_args()))
