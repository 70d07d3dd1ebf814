"""Does every family of algorithms learn? Each trains the addition example's model through the mesh and must move its target.

    python bench/learn.py [--families sft,grpo,dpo,ppo,kto,reward_model] [--seeds 0,1,2]

Supervised fine-tuning begins at random weights; the others begin at what it ends with, once a seed. A family passes where its
number reaches its threshold with every seed; the exit status is 1 where one does not. What is measured:

    accuracy    share of held-out sums that are answered right, greedily (`eval/reward`) after the last step
    gain        how much of that came with the run
    preferred   share of pairs whose right answer has the higher (implicit) reward, mean over the last ten steps
    margin      implicit reward of desirable completions less that of others, mean over the last ten steps
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "e2e"), str(ROOT / "python")]

from mesh import Mesh, mesh  # noqa: E402

from rollout.run.v1 import run_pb2  # noqa: E402
from rollout.storage.v1 import storage_pb2  # noqa: E402

CACHE = ROOT / ".cache" / "learn"
EXAMPLES = ROOT / "examples"
LAST = 10

Steps = Sequence[Mapping[str, float]]
Evaluations = Sequence[Mapping[str, float]]


def accuracy(_: Steps, evaluations: Evaluations) -> float:
    return evaluations[-1]["eval/reward"]


def gain(_: Steps, evaluations: Evaluations) -> float:
    return evaluations[-1]["eval/reward"] - evaluations[0]["eval/reward"]


def preferred(steps: Steps, _: Evaluations) -> float:
    return statistics.fmean(step["rewards/accuracy"] for step in steps[-LAST:])


def margin(steps: Steps, _: Evaluations) -> float:
    return statistics.fmean(
        step["rewards/chosen"] / step["desirable"] - step["rewards/rejected"] / (1 - step["desirable"]) for step in steps[-LAST:]
    )


@dataclass(frozen=True, slots=True)
class Family:
    """What trains it, from where, and what must come of it."""

    config: Path
    overrides: tuple[str, ...]
    measure: Callable[[Steps, Evaluations], float]
    threshold: float


FAMILIES = {
    "sft": Family(EXAMPLES / "addition" / "sft.toml", ("eval.every_steps=375",), accuracy, 0.3),
    "grpo": Family(EXAMPLES / "addition" / "grpo.toml", ("train.steps=80", "eval.every_steps=80"), gain, 0.08),
    "dpo": Family(EXAMPLES / "addition" / "dpo.toml", ("eval.every_steps=100",), preferred, 0.8),
    "ppo": Family(EXAMPLES / "ppo-tiny.toml", ("train.steps=60", "eval.every_steps=60"), gain, 0.03),
    "kto": Family(EXAMPLES / "addition" / "kto.toml", ("eval.every_steps=100",), margin, 0.1),
    "reward_model": Family(EXAMPLES / "addition" / "reward_model.toml", (), preferred, 0.75),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Train every family and hold what it reaches against a threshold.")
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated (default: all)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    options = parser.parse_args()
    families, seeds = options.families.split(","), [int(seed) for seed in options.seeds.split(",")]
    unknown = [name for name in families if name not in FAMILIES]
    if unknown:
        parser.error(f"there is no family {', '.join(unknown)}; take some of {', '.join(FAMILIES)}")
    shutil.rmtree(CACHE, ignore_errors=True)
    subprocess.run([sys.executable, str(EXAMPLES / "addition" / "prepare.py")], check=True, capture_output=True)
    failed = 0
    with mesh(CACHE / "state") as running:
        for seed in seeds:
            warm = ""
            for name in dict.fromkeys(["sft", *families]):
                began = time.monotonic()
                reached, weights = train(running, FAMILIES[name], seed, warm)
                warm = warm or weights
                if name not in families:
                    continue
                family = FAMILIES[name]
                passed = reached >= family.threshold
                failed += not passed
                print(
                    f"{'ok  ' if passed else 'FAIL'}  {name:<13} seed {seed}  {family.measure.__name__} {reached:.3f} "
                    f"(wanted {family.threshold:g})  {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    return 1 if failed else 0


def train(running: Mesh, family: Family, seed: int, warm: str) -> tuple[float, str]:
    """What the family reached, and the folder of the weights that it ended with."""
    start = [f'model.path="{warm}"'] if warm else []
    run = running.submit(family.config, f"seed={seed}", *family.overrides, *start)
    ended = finish(running, run)
    if ended.state != run_pb2.RUN_STATE_SUCCEEDED:
        raise SystemExit(f"{run} ended as {run_pb2.RunState.Name(ended.state)}: {ended.message}")
    listed = running.events.ListEvents(
        storage_pb2.ListEventsRequest(
            filter=storage_pb2.EventFilter(run_id=run, kinds=["step.committed", "eval.finished"]), limit=10_000
        )
    ).events
    steps = [event.metrics for event in listed if event.kind == "step.committed"]
    evaluations = [event.metrics for event in listed if event.kind == "eval.finished"]
    return family.measure(steps, evaluations), ended.weights_directory


def finish(running: Mesh, run: str) -> run_pb2.Run:
    """Wait for the end, however long it takes."""
    while True:
        try:
            return running.finish(run)
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call) or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise


if __name__ == "__main__":
    raise SystemExit(main())
