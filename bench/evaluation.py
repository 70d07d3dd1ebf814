"""Measures what evaluations on a reserved worker cost a run: step times of a run with an evaluation
every 5 steps against those of a run without, with the same number of training workers.

    make bench-eval ARGS="[--rounds 4] [--steps 20] [--token 0.03] [--workers 2] [--no-model] [--check]"

Both runs are whole: all services in one `rolloutd`, a learner, and inference workers in sync mode;
the second has one more inference worker, which only evaluates (`eval.workers = 1`). A round
measures both, and each round begins with the other one. The time of a step is the wall time between
two commits: from the commit of step 5 to that of the last step, divided by the steps. All rounds
take about 8 minutes.

In the first rows the engine is simulated: a token takes `--token` seconds of sleep, the tokens of a
sample are a function of weights, prompt, and seed, and a training step computes nothing. So both
runs make the same steps with the same samples, no run waits for a core, and the difference is what
the control plane adds to a step: pinning the weights on the reserved worker, and storing the state
and the result of each evaluation. The processes still need some processor time (tokens are hashed
and rewards computed): on a machine with other load, raise `--token`. An evaluation takes about two
steps, so the next one never waits for it. The bar is 5 %, for the median of the rounds.

The further rows have a real model of 0.8 M parameters, whose workers compute. With fewer free cores
than processes that compute, the evaluation takes cores away from training, and the ratio shows
that; it has no bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh import Mesh

    from rollout_workers.engines.base import GroupRequest, SampleOutput

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
BAR = 0.05
EVERY, SKIP = 5, 5
TOKEN = "ROLLOUT_BENCH_TOKEN_SECONDS"

_CONFIG = """
name = "evaluation"
seed = 1
mode = "sync"

[model]
path = "model"

[data]
train = "train.jsonl"
eval = "heldout.jsonl"

[sampling]
group_size = 8
max_tokens = 64

[reward]
plugin = "reward.py:letters"

[algorithm.grpo]

[train]
groups_per_step = 8
learning_rate = 1e-3

[engine]
slots = 64
max_model_len = 128

[snapshot]
every_steps = 0
"""

_REWARD = """def letters(samples):
    return [sum(c.isalpha() for c in sample.completion) / max(1, len(sample.completion)) for sample in samples]
"""


def work(kind: str) -> None:
    """Be a worker of the run, with an engine that sleeps for each token."""
    from rollout_testing.sim.install import install

    install()

    if kind == "inference":
        from paced import PacedEngine, use

        token = float(os.environ[TOKEN])

        class Paced(PacedEngine):
            def seconds(self, request: GroupRequest, sample: int, output: SampleOutput) -> float:
                return len(output.token_ids) * token

        use(Paced)

    from rollout_workers.__main__ import main as worker_main

    worker_main()


def write_job(folder: Path) -> Path:
    """Write the config and its files."""
    from rollout_testing.sim import policy

    folder.mkdir()
    policy.write_model(folder / "model")
    for name, count in (("train", 400), ("heldout", 128)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name} {n}:"}) + "\n" for n in range(count)))
    (folder / "reward.py").write_text(_REWARD)
    path = folder / "job.toml"
    path.write_text(_CONFIG)
    return path


def addition() -> tuple[Path, list[str]]:
    """The addition example with its untrained model, whose answers have any length."""
    if not (ROOT / "models" / "addition").exists():
        subprocess.run([sys.executable, str(ROOT / "examples" / "addition" / "prepare.py")], check=True)
    return ROOT / "examples" / "addition" / "grpo.toml", [
        f'reward.plugin="{ROOT / "e2e" / "reward.py"}:digit_share"', "sampling.max_tokens=16", "engine.max_model_len=28",
        "train.groups_per_step=4", "eval.max_prompts=64", "snapshot.every_steps=0",
    ]  # fmt: skip


def measure(running: Mesh, config: Path, sets: Sequence[str], steps: int, workers: int, *, evaluates: bool) -> tuple[float, int]:
    """Seconds per step, and the number of evaluations that ended between the measured commits."""
    from rollout.storage.v1 import storage_pb2

    reserved = int(evaluates)
    run = running.submit(
        config,
        *sets,
        f"train.steps={SKIP + steps}",
        f"engine.workers={workers + reserved}",
        f"eval.workers={reserved}",
        f"eval.every_steps={EVERY if evaluates else 0}",
    )
    running.finish(run)
    wanted = storage_pb2.EventFilter(run_id=run, kinds=["step.committed", "eval.finished"])
    listed = running.events.ListEvents(storage_pb2.ListEventsRequest(filter=wanted, page_size=10_000)).events
    committed = {event.step: event.time.ToNanoseconds() for event in listed if event.kind == "step.committed"}
    first, last = committed[SKIP], committed[SKIP + steps]
    ended = [e for e in listed if e.kind == "eval.finished" and first < e.time.ToNanoseconds() <= last]
    return (last - first) / 1e9 / steps, len(ended)


def compare(running: Mesh, what: str, config: Path, sets: Sequence[str], steps: int, workers: int, rounds: int) -> list[float]:
    """The ratio of each round, with an evaluation to without."""
    ratios: list[float] = []
    for number in range(1, rounds + 1):
        seconds: dict[bool, float] = {}
        ended = 0
        for evaluates in (False, True) if number % 2 else (True, False):
            seconds[evaluates], count = measure(running, config, sets, steps, workers, evaluates=evaluates)
            ended = count if evaluates else ended
        if ended < steps // EVERY - 1:
            raise SystemExit(f"only {ended} evaluations ended within {steps} steps")
        ratios.append(seconds[True] / seconds[False])
        print(
            f"{what}, round {number}: {1e3 * seconds[False]:.1f} ms per step without, {1e3 * seconds[True]:.1f} ms with "
            f"{ended} evaluations in {steps} steps; {ratios[-1]:.3f}",
            flush=True,
        )
    return ratios


def main() -> int:
    from mesh import Mesh
    from record import recorded

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each run")
    parser.add_argument("--token", type=float, default=0.03, help="seconds per token of the simulated engine")
    parser.add_argument("--workers", type=int, default=2, help="inference workers that sample for training (real model: 1)")
    parser.add_argument("--no-model", action="store_true", help="measure the simulated engine only")
    parser.add_argument("--check", action="store_true", help="exit with code 1 if the bar is missed")
    given = parser.parse_args()
    with recorded("evaluation") as kept, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        simulated = Mesh(
            folder / "state",
            arguments=(
                "--worker-command",
                f"{sys.executable} {Path(__file__).resolve()} --work",
                "--worker-python",
                sys.executable,
            ),
            environment={"PYTHONPATH": str(ROOT / "python"), TOKEN: str(given.token)},
        )
        try:
            simulated.start()
            ratios = compare(
                simulated, f"simulated engine, {1e3 * given.token:g} ms per token", write_job(folder / "job"), (), given.steps,
                given.workers, given.rounds,
            )  # fmt: skip
        finally:
            simulated.stop()
        ratio = statistics.median(ratios)
        met = ratio <= 1 + BAR
        kept.update(ratios=ratios, ratio=ratio, bar=1 + BAR, met=met)
        print(f"simulated engine: step times with evaluations {ratio:.3f} of those without, median (bar: {1 + BAR})", flush=True)
        if not given.no_model:
            real = Mesh(folder / "model-state")
            config, sets = addition()
            try:
                real.start()
                bounded = compare(real, "real model", config, sets, min(given.steps, 20), 1, max(1, given.rounds // 2))
            finally:
                real.stop()
            kept.update(model_ratios=bounded)
            print(f"real model on {os.cpu_count()} cores: {statistics.median(bounded):.3f}, median (no bar)", flush=True)
    return int(given.check and not met)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        del sys.argv[1]
        work(sys.argv[1])
    else:
        sys.exit(main())
