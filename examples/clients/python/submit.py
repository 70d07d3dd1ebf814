"""Plan a configuration, run it, and follow it to its end. Needs only grpcio and the generated
contracts.

python examples/clients/python/submit.py --state ~/.local/state/rollout examples/addition/grpo.toml
"""

import argparse
import json
import sys
from pathlib import Path

import grpc

from rollout.plan.v1 import plan_pb2, plan_pb2_grpc
from rollout.run.v1 import run_pb2, run_pb2_grpc


def submit(state: Path, config: Path, overrides: list[str]) -> int:
    daemon = json.loads((state / "rolloutd.json").read_text())
    token = Path(daemon["token_file"]).read_text().strip()
    metadata = (("authorization", f"Bearer {token}"),)
    base_dir = str(config.resolve().parent)
    with grpc.insecure_channel(daemon["grpc"]) as channel:
        source = plan_pb2.ConfigSource(toml=config.read_bytes(), file=str(config), base_dir=base_dir, set=overrides)
        planned = plan_pb2_grpc.PlannerServiceStub(channel).CreatePlan(
            plan_pb2.CreatePlanRequest(source=source), metadata=metadata
        )
        for problem in planned.problems:
            print(f"{problem.file}:{problem.line}:{problem.column}: {problem.message} ({problem.fix})", file=sys.stderr)
        if planned.problems:
            return 65
        scheduler = run_pb2_grpc.SchedulerServiceStub(channel)
        created = scheduler.CreateRun(run_pb2.CreateRunRequest(lock=planned.lock, base_dir=base_dir), metadata=metadata)
        return follow(scheduler, created.run.run_id, metadata)


def follow(scheduler: run_pb2_grpc.SchedulerServiceStub, run_id: str, metadata: tuple[tuple[str, str], ...]) -> int:
    seen = None
    for update in scheduler.WatchRun(run_pb2.WatchRunRequest(run_id=run_id), metadata=metadata):
        run = update.status.run
        if (run.state, run.step) != seen:
            seen = (run.state, run.step)
            print(f"{run_id} {run_pb2.RunState.Name(run.state)} step {run.step}/{run.total_steps}", flush=True)
    if seen is not None and seen[0] == run_pb2.RUN_STATE_SUCCEEDED:
        return 0
    return 70


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="submit a run and follow it")
    parser.add_argument("config", type=Path, help="the run's TOML")
    parser.add_argument("--state", type=Path, required=True, help="state folder of the local rolloutd")
    parser.add_argument("--set", action="append", default=[], help="override of one field: a.b=VALUE")
    options = parser.parse_args()
    sys.exit(submit(options.state, options.config, options.set))
