"""Compares GRPO on SmolLM2-135M with prompts of 256 tokens to TRL's GRPOTrainer, to measure the
effect of sharing prompts.

    python bench/grpo_long.py [--steps 3] [--groups 2] [--length 256]

Both train the same model on the same prompts, groups of 8, at most 32 new tokens, AdamW, float32,
all cores. We compute a group's prompt once for sampling and once for training; TRL computes it for
each answer. TRL runs with one and with two micro-batches, and the faster result counts. The reward
(share of vowels) differs between answers, so that no group is skipped.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "e2e" / "support"), str(ROOT / "python")]

from grpo import CACHE, breakdown, timed, trl  # noqa: E402
from memory import peaks  # noqa: E402
from mesh import mesh  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
GROUP, NEW_TOKENS, WANTED = 8, 32, 2.5
TEXT = "the river runs past a small house where two old friends talk about rain and bread while their dog sleeps near the door"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare GRPO with long prompts and GRPO of TRL.")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one for warm-up")
    parser.add_argument("--groups", type=int, default=2, help="prompts per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per prompt")
    options = parser.parse_args()
    subprocess.run([sys.executable, str(ROOT / "examples" / "smollm2" / "prepare.py")], check=True)
    folder = CACHE / "long"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "bench" / "vowels.py", folder)
    write_rows(folder / "train.jsonl", options.length)
    (folder / "grpo.toml").write_text(config(options.groups, options.length))

    sizes = ["--groups", options.groups, "--group-size", GROUP, "--max-tokens", NEW_TOKENS, "--learning-rate", 1e-6]
    peer = trl(
        MODEL,
        folder / "train.jsonl",
        *map(str, [*sizes, "--steps", options.steps, "--skip", 1, "--reward", "vowels", "--all-threads"]),
    )
    print(
        f"TRL: {peer['samples_per_second']:.2f} samples/s, {peer['seconds_per_step']:.1f} s a step ({peer['threads']} threads, "
        f"{peer['micro_batches']} micro-batches, {peer['completion_tokens_per_sample']} tokens a sample, {peer['peak_mb']} MB)",
        flush=True,
    )
    with mesh(folder / "state") as running, peaks(running.processes["all"].pid) as memory:
        ours = timed(running, options.steps, 1, folder / "grpo.toml")
    ratio = ours["samples_per_second"] / peer["samples_per_second"]
    print(
        f"ours: {ours['samples_per_second']:.2f} samples/s, {ours['seconds']:.1f} s a step ({ours['length/mean']:.1f} tokens a "
        f"sample, {memory.megabytes:.0f} MB in all workers): {ratio:.2f} x TRL, wanted {WANTED:g}"
    )
    breakdown(ours)


def write_rows(path: Path, length: int) -> None:
    """Rows whose prompts have exactly ``length`` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    draw, words = random.Random(0), TEXT.split()
    rows = []
    while len(rows) < 16:
        ids = tokenizer(" ".join(draw.choice(words) for _ in range(2 * length)))["input_ids"][:length]
        prompt = tokenizer.decode(ids)
        if len(tokenizer(prompt)["input_ids"]) == length:
            rows.append({"prompt": prompt, "answer": ""})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(groups: int, length: int) -> str:
    """Our run."""
    return f"""name = "long"
[model]
path = {json.dumps(str(MODEL))}
[data]
train = "train.jsonl"
[sampling]
group_size = {GROUP}
max_tokens = {NEW_TOKENS}
[reward]
plugin = "vowels.py:vowels"
[algorithm.grpo]
[train]
steps = 1
groups_per_step = {groups}
learning_rate = 1e-6
[engine]
slots = {groups * GROUP}
max_model_len = {length + NEW_TOKENS}
[snapshot]
every_steps = 0
"""


if __name__ == "__main__":
    main()
