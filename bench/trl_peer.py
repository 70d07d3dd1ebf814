"""TRL's GRPOTrainer on the task of bench/grpo.py, as fast as it runs here: samples/s in a steady
state, as JSON on the last line.

    python bench/trl_peer.py --model DIR --data train.jsonl [--groups 32] [--group-size 8] [--max-tokens 4] [--steps 20]

Needs TRL in addition to torch and transformers (`make venv-bench`). Model, prompts, group size,
lengths, optimizer (fused AdamW), and loss (token-level normalization, clip 0.2, no reference model)
are those of our run. Logging, saving, gradient checkpointing, and progress bars are off. Several
settings that give the same result are measured (threads, micro-batches), and the fastest counts.
The time of a step, with sampling, reward, and update, is from the end of the previous step to its
end.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "ACTIVE"  # alone in its process, this is fastest: 840 samples/s instead of 565 with PASSIVE
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


# Like examples/addition/reward.py and bench/vowels.py.
REWARDS: dict[str, Callable[[str, str], float]] = {
    "exact": lambda completion, answer: float(completion == answer),
    "vowels": lambda completion, _: sum(letter in "aeiou" for letter in completion) / max(1, len(completion)),
}


def main() -> None:
    """Measure every candidate and print them all."""
    arguments = parse()
    candidates = [
        measure(arguments, threads=threads, parts=parts)
        for threads in sorted({arguments.threads if arguments.all_threads else 1, arguments.threads})
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
    parser.add_argument("--groups", type=int, default=32, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max-tokens", type=int, default=4, help="maximum number of new tokens per sample")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each candidate")
    parser.add_argument("--skip", type=int, default=5, help="warm-up steps of each candidate")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="most threads")
    parser.add_argument(
        "--parts", type=int, nargs="+", default=[1, 2], help="numbers of micro-batches per step; each is a candidate"
    )
    parser.add_argument("--all-threads", action="store_true", help="skip candidates with one thread")
    parser.add_argument("--reward", choices=list(REWARDS), default="exact", help="the reward")
    return parser.parse_args()


class ModelClock:
    """The seconds inside the model: its forward passes during generation, and for training the loss
    with forward and backward passes and the optimizer's step."""

    def __init__(self, trainer: Any) -> None:
        self.seconds: list[float] = []
        """The seconds of each step."""
        self._step = 0.0
        self._depth = 0
        trainer.model.forward = self._timed(trainer.model.forward)
        trainer.compute_loss = self._timed(trainer.compute_loss)
        trainer.accelerator.backward = self._timed(trainer.accelerator.backward)
        create = trainer.create_optimizer

        def timed_optimizer(*arguments: Any, **named: Any) -> Any:
            optimizer = create(*arguments, **named)
            optimizer.step = self._timed(optimizer.step)
            return optimizer

        trainer.create_optimizer = timed_optimizer

    def end_step(self) -> None:
        """Assign the next call to another step."""
        self.seconds.append(self._step)
        self._step = 0.0

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._step += time.perf_counter() - began

        return timed


def measure(arguments: argparse.Namespace, *, threads: int, parts: int) -> dict[str, Any]:
    """Train some steps with one set of settings. Returns the median seconds of a step."""
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
            inside.end_step()

    worth = REWARDS[arguments.reward]

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        scores = [worth(completion, wanted) for completion, wanted in zip(completions, answer, strict=True)]
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
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        inside = ModelClock(trainer)
        trainer.train()
    seconds = [later - earlier for earlier, later in zip(ends[arguments.skip - 1 :], ends[arguments.skip :], strict=False)]
    step = statistics.median(seconds)
    in_model = statistics.fmean(inside.seconds[-arguments.steps :])
    measured = lengths[-arguments.steps :]
    return {
        "samples_per_second": round(samples / step, 1),
        "seconds_per_step": round(step, 5),
        "own_share": round(1 - in_model / statistics.fmean(seconds), 3),
        "threads": threads,
        "micro_batches": parts,
        "steps": len(seconds),
        "samples_per_step": samples,
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "completion_tokens_per_sample": round(statistics.fmean(measured) / samples, 3),
        "reward_first": round(rewards[0], 3),
        "reward_last": round(statistics.fmean(rewards[-5:]), 3),
    }


if __name__ == "__main__":
    main()
