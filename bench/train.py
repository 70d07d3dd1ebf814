"""Compares the learner with TRL for algorithms that train on data: SFT tokens/s, DPO and
reward-model pairs/s, with the same model, rows, and batch, one after the other.

    python bench/train.py [--kinds sft,dpo,reward_model] [--model DIR] [--steps 15] [--pairs 32] [--length 64]

Rows are random digits. Prompts are as long as answers, so that the effect of sharing prompts is
visible. TRL runs with several settings that give the same result (threads, packing; reference
logprobs precomputed), and the fastest counts, see train_peer.py. Our time is from the batch to the
updated weights, without the services; TRL's is between the ends of its steps. Peak memory is that
of the process.

Below each ratio the output has the share of the work that sharing prompts avoids, and the parts of
our step's time. With the addition example's model only positions matter (54 words of vocabulary).
SmolLM2 (49,152) also shows the effect of computing logits for trained tokens only, without storing
them: `--model models/SmolLM2-135M-Instruct --pairs 4 --steps 5`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python")]
MODEL = ROOT / "models" / "addition"
DATA = ROOT / ".cache" / "bench" / "train"
WANTED = {"sft": 1.1, "dpo": 1.3, "reward_model": 1.3}
PARTS = ("pack", "forward", "backward", "optimizer")


def main() -> None:
    """Measure each kind with rollout and with TRL."""
    parser = argparse.ArgumentParser(description="Compare the learner with TRL for algorithms that train on data.")
    parser.add_argument("--kinds", default="sft,dpo,reward_model", help="comma-separated")
    parser.add_argument("--steps", type=int, default=15, help="steps measured")
    parser.add_argument("--pairs", type=int, default=32, help="rows (pairs) per step")
    parser.add_argument("--length", type=int, default=64, help="tokens per prompt, and per answer")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model")
    parser.add_argument("--ours", default="", help=argparse.SUPPRESS)  # a separate process, whose peak memory is measured
    options = parser.parse_args()
    if options.ours:
        print(json.dumps(ours(options.ours, options)))
        return
    if not options.model.exists():
        subprocess.run([sys.executable, str(ROOT / "examples" / "addition" / "prepare.py")], check=True)
    for kind in options.kinds.split(","):
        common = ["--steps", str(options.steps), "--pairs", str(options.pairs), "--model", str(options.model)]
        rows = write_rows(kind, options)
        peer = call(
            ROOT / "bench" / "train_peer.py", "--kind", kind, "--data", str(rows), "--length", str(options.length), *common
        )
        found = call(Path(__file__), "--ours", kind, "--length", str(options.length), *common)
        ratio = found["per_second"] / peer["per_second"]
        print(
            f"{kind}: ours {found['per_second']:,.0f} tokens/s ({found['peak_mb']:.0f} MB), TRL {peer['per_second']:,.0f} "
            f"({peer['peak_mb']:.0f} MB; {peer['settings']}): {ratio:.2f} x, wanted {WANTED[kind]:g}",
            flush=True,
        )
        breakdown(found)


def breakdown(found: dict[str, Any]) -> None:
    """Print the parts of a step's time, and the amount of work."""
    tokens, computed = found["tokens"], found["computed"]
    print(
        f"    {found['threads']} threads; {tokens:.0f} tokens in {computed:.0f} positions: sharing gives "
        f"{tokens / computed:.2f} x where these are all that counts"
    )
    for name, seconds in found["parts"].items():
        print(f"    {name:<46} {1e3 * seconds:7.1f} ms  {seconds / found['seconds']:6.1%}", flush=True)


def call(script: Path, *arguments: str) -> dict[str, Any]:
    """The last line of a script's output, as JSON."""
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script.name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def texts(kind: str, options: argparse.Namespace) -> list[dict[str, str]]:
    """Rows with prompts and answers of equal length, enough for a few steps, which repeat."""
    draw = random.Random(0)

    def some() -> str:
        return "".join(draw.choice("0123456789") for _ in range(options.length))

    rows = [{"prompt": some(), "chosen": some(), "rejected": some()} for _ in range(4 * options.pairs)]
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows] if kind == "sft" else rows


def write_rows(kind: str, options: argparse.Namespace) -> Path:
    """Write the rows to a file."""
    DATA.mkdir(parents=True, exist_ok=True)
    path = DATA / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in texts(kind, options)))
    return path


def ours(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """The learner's tokens per second, over prompts and completions. Reference sums are computed in
    advance, like TRL's."""
    import numpy as np
    from transformers import AutoTokenizer

    from rollout_workers.trainer import Schedule, Trainer, TrainerConfig, TrainSample

    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def sample(group: int, place: int, prompt: str, completion: str) -> TrainSample:
        head = tokenizer(prompt)["input_ids"]
        ids = np.array([*head, *tokenizer(completion)["input_ids"], tokenizer.eos_token_id], np.int32)
        mask = (np.arange(len(ids)) >= len(head)).astype(np.uint8)
        return TrainSample(f"0/{group:06d}", place, ids, len(head), mask, np.zeros(len(ids), np.float32))

    sides = ["completion"] if kind == "sft" else ["chosen", "rejected"]
    rows = texts(kind, options)
    batches = [
        [
            sample(group, place, row["prompt"], row[side])
            for group, row in enumerate(rows[start : start + options.pairs])
            for place, side in enumerate(sides)
        ]
        for start in range(0, len(rows), options.pairs)
    ]
    best: dict[str, Any] = {"per_second": 0.0}
    for threads in sorted({1, os.cpu_count() or 1}):
        trainer = Trainer(options.model, TrainerConfig(algorithm=kind, schedule=Schedule(peak=1e-5), threads=threads))
        seconds, metrics = [], []
        for step in range(1, len(batches) + options.steps + 1):
            batch = batches[step % len(batches)]
            began = time.perf_counter()
            made = trainer.train_step(batch, step)
            if step > len(batches):
                seconds.append(time.perf_counter() - began)
                metrics.append(made.metrics)
        step_seconds, tokens = statistics.median(seconds), sum(len(s.token_ids) for s in batches[0])
        parts = {name: statistics.median(found[f"time/{name}"] for found in metrics) for name in PARTS}
        candidate = {
            "per_second": tokens / step_seconds,
            "threads": threads,
            "seconds": step_seconds,
            "tokens": tokens,
            "computed": statistics.median(found["tokens/computed"] for found in metrics),
            "parts": {**parts, "advantages, metrics, calls": max(0.0, step_seconds - sum(parts.values()))},
        }
        best = max(best, candidate, key=lambda found: found["per_second"])
    return best | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


if __name__ == "__main__":
    main()
