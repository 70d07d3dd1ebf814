"""Compares GRPO with all services to TRL's GRPOTrainer, and shows the parts of a step's time.

    python bench/grpo.py [--steps 60] [--rounds 2] [--answers 8 32]
    python bench/grpo.py --alone --answers

Both train the addition example's warmed-up model on the same prompts, 32 groups of 8, at most 4 new
tokens, AdamW. Our run uses what a user's run uses: seven services, embedded NATS and registry, two
workers, and the buffer's ledger for every sample. A round measures TRL (with the fastest settings
that run here, see trl_peer.py), ours, and ours in deterministic mode, one after the other. Our time
is the wall time between the first and the last measured step, with everything included.

Answers of 4 tokens are the shortest job. Afterwards the parts of a step are measured with longer
answers. That uses the untrained model, which ends an answer by chance, and the share of digits as
the reward.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "e2e" / "support"), str(ROOT / "python")]

from mesh import Mesh, mesh  # noqa: E402

from rollout.storage.v1 import storage_pb2  # noqa: E402

CACHE = ROOT / ".cache" / "bench"
CONFIG = ROOT / "examples" / "addition" / "grpo.toml"
SKIP = 10
LEARNER = ("time/forward", "time/backward", "time/optimizer")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare GRPO with all services and GRPO of TRL.")
    parser.add_argument("--steps", type=int, default=60, help="measured steps of rollout")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds, of which the medians are reported")
    parser.add_argument("--alone", action="store_true", help="measure only rollout, for profiling")
    parser.add_argument("--answers", type=int, nargs="*", default=[8, 32], help="maximum number of tokens of the longer answers")
    options = parser.parse_args()
    shutil.rmtree(CACHE / "state", ignore_errors=True)
    results: dict[str, list[float]] = {"trl": [], "free": [], "deterministic": []}
    with mesh(CACHE / "state") as running:
        model = warm_model(running)
        for number in range(1, options.rounds + 1):
            peer = None if options.alone else trl(model)
            if peer:
                results["trl"].append(peer["samples_per_second"])
                print(
                    f"round {number}: TRL {peer['samples_per_second']:,.0f} samples/s ({peer['threads']} threads, "
                    f"{peer['micro_batches']} micro-batches, {peer['completion_tokens_per_sample']} tokens a sample, "
                    f"{peer['own_share']:.1%} of a step outside of model and optimizer)",
                    flush=True,
                )
            for name in ("free", "deterministic"):
                ours = measure(running, model, options.steps, deterministic=name == "deterministic")
                results[name].append(ours["samples_per_second"])
                times = f", {ours['samples_per_second'] / peer['samples_per_second']:.2f} x TRL" if peer else ""
                print(f"round {number}: ours, {name}: {ours['samples_per_second']:,.0f} samples/s{times}", flush=True)
                breakdown(ours)
        for answers in options.answers:
            for name in ("free", "deterministic"):
                ours = measure(running, model, options.steps, deterministic=name == "deterministic", answers=answers)
                print(f"at most {answers} tokens, {name}: {ours['samples_per_second']:,.0f} samples/s", flush=True)
                breakdown(ours)
    if options.alone:
        return
    middle = {name: statistics.median(values) for name, values in results.items()}
    for name in ("free", "deterministic"):
        print(
            f"GRPO samples/s, ours {name} : TRL = {middle[name]:,.0f} : {middle['trl']:,.0f} = {middle[name] / middle['trl']:.2f}"
        )


def warm_model(running: Mesh) -> Path:
    """The weights of the example's supervised warm-up, which is run once."""
    folder = CACHE / "warm"
    if not folder.exists():
        subprocess.run([sys.executable, str(ROOT / "examples" / "addition" / "prepare.py")], check=True)
        run = running.finish(running.submit(CONFIG.with_name("sft.toml"), "eval.every_steps=0"))
        shutil.copytree(run.weights_directory, folder)
    return folder


def trl(model: Path, data: Path = ROOT / "models" / "addition-data" / "train.jsonl", *more: str) -> dict[str, Any]:
    """The result of TRL's fastest settings. more: arguments of trl_peer.py."""
    command = [sys.executable, str(ROOT / "bench" / "trl_peer.py"), "--model", str(model), "--data", str(data), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(running: Mesh, model: Path, steps: int, *, deterministic: bool, answers: int = 4) -> dict[str, Any]:
    """The seconds of a step and of its parts, as means over the measured steps."""
    longer = (
        ()
        if answers <= 4
        else (
            f'model.path="{ROOT / "models" / "addition"}"',
            f'reward.plugin="{ROOT / "e2e" / "reward.py"}:digit_share"',
            f"sampling.max_tokens={answers}",
            f"engine.max_model_len={answers + 12}",
        )
    )
    return timed(
        running,
        steps,
        SKIP,
        CONFIG,
        f'model.path="{model}"',
        *longer,
        f"deterministic={str(deterministic).lower()}",
        "eval.every_steps=0",
        "snapshot.every_steps=0",
    )


def timed(running: Mesh, steps: int, skip: int, config: Path, *sets: str) -> dict[str, Any]:
    """Run a config for ``skip`` and then ``steps`` measured steps."""
    run = running.submit(config, *sets, f"train.steps={skip + steps}")
    running.finish(run)
    listed = running.events.ListEvents(
        storage_pb2.ListEventsRequest(
            filter=storage_pb2.EventFilter(run_id=run, kinds=["step.committed", "sampling"]), page_size=10_000
        )
    )
    committed = [event for event in listed.events if event.kind == "step.committed"]
    first, last = committed[skip - 1], committed[-1]
    seconds = (last.time.ToNanoseconds() - first.time.ToNanoseconds()) / 1e9 / steps
    parts = {name: statistics.fmean(event.metrics[name] for event in committed[skip:]) for name in first.metrics}
    samples = statistics.fmean(event.metrics["samples"] for event in committed[skip:])
    # The engine reports whole seconds, which do not align with steps. So its time is seconds per
    # sample times samples per step.
    since = first.time.ToNanoseconds()
    engine = [e.metrics for e in listed.events if e.kind == "sampling" and e.time.ToNanoseconds() - since > 1e9]
    sampled = sum(metrics["samples"] for metrics in engine)
    if not sampled:
        raise SystemExit(
            "too few steps: the engine reports whole seconds, and the measured steps took less than one; raise --steps"
        )
    totals = {
        name: sum(metrics[name] for metrics in engine) / sampled * samples for name in ("time/engine", "time/engine_forward")
    }
    return {**parts, **totals, "seconds": seconds, "samples_per_second": samples / seconds}


def breakdown(ours: dict[str, Any]) -> None:
    """Print the parts of a step's time. The overhead is the time outside of the model and the
    optimizer."""
    step = ours["seconds"]
    model = ours["time/engine_forward"] + sum(ours[name] for name in LEARNER)
    rows = {
        "sampling: model forward": ours["time/engine_forward"],
        "sampling: choose tokens, slots": ours["time/engine"] - ours["time/engine_forward"],
        "learner: forward": ours["time/forward"],
        "learner: backward": ours["time/backward"],
        "learner: optimizer": ours["time/optimizer"],
        "learner: read the payloads": ours["time/read"],
        "learner: digest and write the weights": ours["time/publish"],
        "learner: pack, advantages, metrics, calls": ours["time/train"]
        - sum(ours[name] for name in (*LEARNER, "time/read", "time/publish")),
    }
    rows["deliver, rewards, publish, ingest, lease"] = step - sum(rows.values())
    for name, seconds in rows.items():
        print(f"    {name:<46} {1e3 * seconds:7.1f} ms  {seconds / step:6.1%}")
    print(f"    {'tokens of an answer':<46} {ours['length/mean']:7.1f}")
    print(f"    {'step':<46} {1e3 * step:7.1f} ms; the mesh's own share {(step - model) / step:.1%}", flush=True)


if __name__ == "__main__":
    main()
