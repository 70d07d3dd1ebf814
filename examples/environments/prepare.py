"""Prepare the example of reasoning-gym: a tiny model with random weights, answers of a careless
student to questions of the dataset ``chain_sum``, and the numbers of the questions.

    python examples/environments/prepare.py [--model DIR] [--data DIR]

Writes the model's folder, ``warmup.jsonl`` (questions in the form of the package, half of them with
a random answer), and ``train.jsonl`` and ``eval.jsonl`` with rows such as ``{"index": 7}``. A
second call finds what is there and changes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "chain-sum"
DATA = REPOSITORY / "models" / "chain-sum-data"

ROWS, QUESTIONS, HELD_OUT, SEED = 4096, 2000, 256, 0
CARELESS = 0.5
"""The share of answers of the warm-up that are random."""
QUESTION = "State the final answer to the following arithmetic problem: "
"""How the package's questions begin. One token of the tiny model."""


def main() -> None:
    """Write missing files and print their paths."""
    parser = argparse.ArgumentParser(description="Prepare the example of reasoning-gym.")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the rows (default: %(default)s)")
    arguments = parser.parse_args()
    addition = _addition()
    draw = random.Random(SEED)
    arguments.data.mkdir(parents=True, exist_ok=True)
    addition.write_rows(arguments.data / "warmup.jsonl", [answered(draw) for _ in range(ROWS)])
    addition.write_rows(arguments.data / "train.jsonl", [{"index": at} for at in range(HELD_OUT, QUESTIONS)])
    addition.write_rows(arguments.data / "eval.jsonl", [{"index": at, "held_out": True} for at in range(HELD_OUT)])
    write_model(addition, arguments.model)
    print(f"model {arguments.model}\ndata  {arguments.data}")


def answered(draw: random.Random) -> dict[str, str]:
    """A question, and what a careless student says."""
    a, b, sign = draw.randint(0, 9), draw.randint(0, 9), draw.choice((1, -1))
    right = a + sign * b
    said = draw.randint(-9, 18) if draw.random() < CARELESS else right
    return {"prompt": f"{QUESTION}{a} {'+' if sign > 0 else '-'} {b} =", "answer": str(said)}


def write_model(addition: Any, folder: Path) -> None:
    """The model of the addition example, with a token for the text that all questions share."""
    plain = addition.build_tokenizer

    def with_question() -> Any:
        tokenizer = plain()
        tokenizer.add_tokens([QUESTION])
        return tokenizer

    addition.build_tokenizer = with_question
    addition.write_model(folder)


def _addition() -> Any:
    """The script of the addition example."""
    spec = importlib.util.spec_from_file_location("addition_prepare", REPOSITORY / "examples" / "addition" / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
