"""Checks that every family of algorithms learns: each trains a small model with all services and
must reach its threshold.

    python bench/learn.py [--model addition|smollm2] [--families sft,grpo,...] [--seeds 0,1,2] [--resume]

On sums, supervised fine-tuning starts with random weights. The other families start with weights
that answer about half of the sums correctly, which are trained once per seed. On SmolLM2 both
families start with the model. A family passes if its measure (families.py) reaches its threshold
with every seed; the exit code is 1 if one does not. Each result is written to
.cache/learn/results.json when it is ready, and all are printed as a table at the end. --resume
keeps the results in that file; without it all requested families are trained again.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "e2e" / "support"), str(ROOT / "python")]

from families import EXAMPLES, MODELS, STARTS, Family  # noqa: E402
from mesh import Mesh, mesh  # noqa: E402

from rollout.plan.v1 import plan_pb2  # noqa: E402
from rollout.run.v1 import run_pb2  # noqa: E402
from rollout.storage.v1 import storage_pb2  # noqa: E402

CACHE = ROOT / ".cache" / "learn"
RESULTS = CACHE / "results.json"
TABLE = re.compile(r"^\[algorithm\.\w+\]\n(?:(?!\[).*\n)*", re.MULTILINE)

Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train every family and compare its result with a threshold.")
    parser.add_argument("--model", default="addition", choices=list(MODELS), help="the example to train on")
    parser.add_argument("--families", default="", help="comma-separated (default: all of the model's)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--resume", action="store_true", help="keep the results in results.json, and train only the missing ones")
    options = parser.parse_args()
    table = MODELS[options.model]
    families, seeds = options.families.split(",") if options.families else list(table), options.seeds.split(",")
    unknown = [name for name in families if name not in table]
    if unknown:
        parser.error(f"{options.model} has no family {', '.join(unknown)}; choose from {', '.join(table)}")
    asked = {f"{options.model}/{name}/{seed}": (name, int(seed)) for seed in seeds for name in families}
    results = load()
    if not options.resume:
        results = {key: result for key, result in results.items() if key not in asked}
    missing = {key: named for key, named in asked.items() if key not in results}
    subprocess.run([sys.executable, str(EXAMPLES / options.model / "prepare.py")], check=True, capture_output=True)
    shutil.rmtree(CACHE / "state", ignore_errors=True)
    if missing:
        with mesh(CACHE / "state") as running:
            starts = Starts(running, keep=options.resume)
            for key, (name, seed) in missing.items():
                results[key] = measure(running, table[name], seed, starts) | {"model": options.model, "family": name}
                save(results)
                print(line(results[key]), flush=True)
    found = [results[key] for key in asked]
    print("\n" + as_table(found))
    return 0 if all(passed(result) for result in found) else 1


class Starts:
    """The initial weights of families, trained on first use."""

    def __init__(self, running: Mesh, *, keep: bool) -> None:
        """keep: reuse the weights of an earlier call if they exist."""
        self._running = running
        if not keep:
            shutil.rmtree(CACHE / "starts", ignore_errors=True)

    def folder(self, name: str, seed: int) -> Path:
        """The folder of ``warm`` or ``weak``."""
        folder = CACHE / "starts" / f"{name}-{seed}"
        if not folder.exists():
            staged = folder.with_name(f".{folder.name}")
            shutil.rmtree(staged, ignore_errors=True)
            shutil.copytree(self._made(name, seed).weights_directory, staged)
            staged.rename(folder)
        return folder

    def _made(self, name: str, seed: int) -> run_pb2.Run:
        for family in STARTS[name]:
            run, steps, evaluations = train(self._running, family, seed, ())
            if family.measure(steps, evaluations) >= family.threshold:
                return run
        raise SystemExit(f"no supervised run with seed {seed} gets {family.threshold:g} of the sums right")


def measure(running: Mesh, family: Family, seed: int, starts: Starts) -> Result:
    """Train a family with a seed. Returns its result."""
    sets = [f'model.path="{starts.folder(family.start, seed)}"'] if family.start else []
    if family.start == "weak":
        sets.append(f'algorithm.distillation.teacher="{starts.folder("warm", seed)}"')
    began = time.monotonic()
    _, steps, evaluations = train(running, family, seed, sets)
    seconds = time.monotonic() - began
    return {
        "seed": seed,
        "measure": family.measure.__name__,
        "reached": round(family.measure(steps, evaluations), 4),
        "wanted": family.threshold,
        "steps": len(steps),
        "seconds": round(seconds),
    }


def train(
    running: Mesh, family: Family, seed: int, sets: Sequence[str]
) -> tuple[run_pb2.Run, Sequence[Mapping[str, float]], Sequence[Mapping[str, float]]]:
    """The final state of the run, and the metrics of its steps and evaluations."""
    run = submit(running, family, f"seed={seed}", *family.overrides, *sets)
    ended = finish(running, run)
    if ended.state != run_pb2.RUN_STATE_SUCCEEDED:
        raise SystemExit(f"{run} ended as {run_pb2.RunState.Name(ended.state)}: {ended.message}")
    listed = running.events.ListEvents(
        storage_pb2.ListEventsRequest(
            filter=storage_pb2.EventFilter(run_id=run, kinds=["step.committed", "eval.finished"]), page_size=10_000
        )
    ).events
    steps = [event.metrics for event in listed if event.kind == "step.committed"]
    evaluations = [event.metrics for event in listed if event.kind == "eval.finished"]
    return ended, steps, evaluations


def submit(running: Mesh, family: Family, *sets: str) -> str:
    """Start a run with the family's config and its algorithm table."""
    toml, folder = family.config.read_text(), str(family.config.parent)
    if family.table:
        toml, replaced = TABLE.subn(family.table + "\n\n", toml)
        assert replaced == 1, family.config
    source = plan_pb2.ConfigSource(toml=toml.encode(), file=family.config.name, base_dir=folder, set=sets)
    planned = running.planner.CreatePlan(plan_pb2.CreatePlanRequest(source=source))
    if planned.problems:
        raise SystemExit(f"{family.config}: {planned.problems}")
    return running.scheduler.CreateRun(run_pb2.CreateRunRequest(lock=planned.lock, base_dir=folder)).run.run_id


def finish(running: Mesh, run: str) -> run_pb2.Run:
    """Wait for the end, without a time limit."""
    while True:
        try:
            return running.finish(run)
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call) or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise


def passed(result: Result) -> bool:
    return result["reached"] >= result["wanted"]


def line(result: Result) -> str:
    return (
        f"{'ok  ' if passed(result) else 'FAIL'}  {result['family']:<13} seed {result['seed']}  {result['measure']} "
        f"{result['reached']:.3f} (wanted {result['wanted']:g})  {result['seconds']} s"
    )


def as_table(results: list[Result]) -> str:
    """A Markdown table with one line per family and the results of each seed."""
    rows: dict[tuple[str, str, float], list[str]] = {}
    for result in results:
        mark = "" if passed(result) else " (missed)"
        rows.setdefault((result["family"], result["measure"], result["wanted"]), []).append(f"{result['reached']:.3f}{mark}")
    lines = ["| family | measure | wanted | reached, a seed each |", "|---|---|---|---|"]
    lines += [f"| {name} | {what} | {wanted:g} | {', '.join(found)} |" for (name, what, wanted), found in rows.items()]
    return "\n".join(lines)


def load() -> dict[str, Result]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def save(results: Mapping[str, Result]) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    staged = RESULTS.with_suffix(".new")
    staged.write_text(json.dumps(results, indent=1) + "\n")
    staged.rename(RESULTS)


if __name__ == "__main__":
    raise SystemExit(main())
