"""Plan a configuration, run it, and follow it to its end.

python examples/clients/python/submit.py examples/addition/grpo.toml --set train.steps=40
"""

import argparse
import sys
from pathlib import Path

from rollout.client import Client, PlanRefused, connect
from rollout.run.v1.run_pb2 import RUN_STATE_SUCCEEDED, RunState


def submit(client: Client, config: Path, overrides: list[str]) -> int:
    """Run a config and print its progress. Returns the exit code: 65 for a config that cannot be
    planned, 70 for a run that did not succeed."""
    try:
        plan = client.plan(config, set=overrides)
    except PlanRefused as refused:
        print(refused, file=sys.stderr)
        return 65
    run = client.submit(plan).run_id
    last = None
    for status in client.follow(run):
        now = (status.run.state, status.run.step)
        if now != last:
            last = now
            print(f"{run} {RunState.Name(now[0])} step {now[1]}/{status.run.total_steps}", flush=True)
    for name, points in client.metrics(run, ["reward/mean", "eval/reward", "loss"]).items():
        print(f"{name}: {points[0][1]:.3f} at step {points[0][0]}, {points[-1][1]:.3f} at step {points[-1][0]}")
    return 0 if last and last[0] == RUN_STATE_SUCCEEDED else 70


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="submit a run and follow it")
    parser.add_argument("config", type=Path, help="the run's TOML")
    parser.add_argument("--state", type=Path, help="state folder of the local rolloutd (default: the usual one)")
    parser.add_argument("--set", action="append", default=[], help="override of one field: a.b=VALUE")
    options = parser.parse_args()
    with connect(state=options.state) as connected:
        sys.exit(submit(connected, options.config, options.set))
