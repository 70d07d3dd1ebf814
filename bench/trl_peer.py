"""TRL's GRPOTrainer on a task of ours, as fast as it runs here: samples/s in a steady state, as JSON on the last line.

    python bench/trl_peer.py --model DIR --data train.jsonl [--groups 32] [--group-size 8] [--max-tokens 4] [--steps 20]

Needs TRL beside torch and transformers (`make venv-bench`). Same model, prompts, group size, lengths, optimizer (fused AdamW) and
loss (token-level normalisation, clip 0.2, no reference model) as our run; what doesn't serve speed is off: logging, saving,
gradient checkpointing, progress bars. Several settings that give the same result are measured (threads, micro-batches) and the
fastest counts. A step is timed from the end of the one before it to its own: sampling, reward and update.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "ACTIVE"  # alone in its process, the fastest: 840 samples/s against 565 with PASSIVE
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def main() -> None:
    """Measure every candidate and print them all."""
    arguments = parse()
    candidates = [
        measure(arguments, threads=threads, parts=parts)
        for threads in sorted({1, arguments.threads})
        for parts in arguments.parts
    ]
    best = max(candidates, key=lambda candidate: candidate["samples_per_second"])
    import torch
    import transformers
    import trl

    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps({"peer": "trl", **best, "candidates": candidates, "versions": versions}))


def parse() -> argparse.Namespace:
    """Arguments; the defaults are the addition example's."""
    parser = argparse.ArgumentParser(description="Measure TRL's GRPOTrainer.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to start from")
    parser.add_argument("--data", type=Path, required=True, help="JSON Lines with `prompt` and `answer`")
    parser.add_argument("--groups", type=int, default=32, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="samples a prompt")
    parser.add_argument("--max-tokens", type=int, default=4, help="most new tokens a sample")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=20, help="steps measured, for each candidate")
    parser.add_argument("--skip", type=int, default=5, help="steps made before, and not measured")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="most threads")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2], help="micro-batches a step, each is a candidate")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, *, threads: int, parts: int) -> dict[str, Any]:
    """Train some steps with one set of settings; median seconds of a step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, logging
    from trl import GRPOConfig, GRPOTrainer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    ends: list[float] = []
    rewards: list[float] = []
    lengths: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    def exact_match(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        scores = [float(completion == wanted) for completion, wanted in zip(completions, answer, strict=True)]
        rewards.append(statistics.fmean(scores))
        lengths.append(sum(len(ids) for ids in completion_ids))
        return scores

    samples = arguments.groups * arguments.group_size
    rows = [json.loads(line) for line in arguments.data.read_text().splitlines()]
    steps = arguments.skip + arguments.steps
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            max_steps=steps,
            per_device_train_batch_size=samples // parts,
            gradient_accumulation_steps=parts,
            steps_per_generation=parts,
            num_generations=arguments.group_size,
            max_completion_length=arguments.max_tokens,
            temperature=arguments.temperature,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="dapo",
            gradient_checkpointing=False,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, attn_implementation="sdpa"),
            reward_funcs=exact_match,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    seconds = [later - earlier for earlier, later in zip(ends[arguments.skip - 1 :], ends[arguments.skip :], strict=False)]
    step = statistics.median(seconds)
    measured = lengths[-arguments.steps :]
    return {
        "samples_per_second": round(samples / step, 1),
        "seconds_per_step": round(step, 5),
        "threads": threads,
        "micro_batches": parts,
        "steps": len(seconds),
        "samples_per_step": samples,
        "completion_tokens_per_sample": round(statistics.fmean(measured) / samples, 3),
        "reward_first": round(rewards[0], 3),
        "reward_last": round(statistics.fmean(rewards[-5:]), 3),
    }


if __name__ == "__main__":
    main()
