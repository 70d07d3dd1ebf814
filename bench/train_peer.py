"""TRL's SFT, DPO, and reward trainers on the rows of bench/train.py, as fast as they run here:
tokens/s as JSON on the last line.

    python bench/train_peer.py --kind sft --model DIR --data rows.jsonl [--pairs 32] [--steps 15] [--length 64]

Model, rows, batch, optimizer (fused AdamW), and loss are the same. Logging, saving, gradient
checkpointing, and progress bars are off. Every candidate is measured, and the fastest counts. DPO's
reference logprobs are precomputed. The time of a step is from the end of the previous step to its
end.
"""
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def main() -> None:
    """Measure every candidate and print the fastest."""
    parser = argparse.ArgumentParser(description="Measure TRL's trainers on data.")
    parser.add_argument("--kind", choices=["sft", "dpo", "reward_model"], required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    candidates = []
    for threads in sorted({1, os.cpu_count() or 1}):
        for packing in (False, True) if options.kind == "sft" else (False,):
            try:
                candidates.append(measure(options, threads, packing))
            except (ValueError, RuntimeError, TypeError) as error:
                candidates.append({"per_second": 0.0, "settings": f"{threads} threads, packing {packing}: {error}"[:200]})
    best = max(candidates, key=lambda candidate: candidate["per_second"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(best | {"peak_mb": peak, "candidates": candidates}))


def measure(options: argparse.Namespace, threads: int, packing: bool) -> dict[str, Any]:
    """Train some steps with one set of settings. Returns tokens divided by the median seconds of a
    step."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        PrinterCallback,
        TrainerCallback,
    )
    from transformers import logging as transformers_logging
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    skip = 4
    row = 2 * options.length + 1
    common: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "max_steps": skip + options.steps,
        "per_device_train_batch_size": options.pairs,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "report_to": [],
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
        "max_length": row,
    }
    rows = Dataset.from_list([json.loads(line) for line in options.data.read_text().splitlines()])
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        if options.kind == "sft":
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
            config = SFTConfig(output_dir=scratch, packing=packing, **common)
            trainer: Any = SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
        elif options.kind == "dpo":
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
            config = DPOConfig(output_dir=scratch, precompute_ref_log_probs=True, **common)
            trainer = DPOTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
        else:
            model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1, dtype=torch.float32)
            config = RewardConfig(output_dir=scratch, **common)
            trainer = RewardTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
        trainer.add_callback(Clock())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    seconds = [later - earlier for earlier, later in zip(ends[skip - 1 :], ends[skip:], strict=False)]
    tokens = options.pairs * row * (1 if options.kind == "sft" else 2)
    settings = f"{threads} threads" + (f", packing {'on' if packing else 'off'}" if options.kind == "sft" else "")
    return {"per_second": tokens / statistics.median(seconds), "settings": settings}


if __name__ == "__main__":
    main()
