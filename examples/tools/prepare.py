"""Prepare the calculator example: a tiny model with random weights, conversations of a careless
assistant that has a calculator, and sums to solve with it.

    python examples/tools/prepare.py [--model DIR] [--data DIR]

Writes the model's folder, ``warmup.jsonl`` (conversations), and ``train.jsonl`` and ``eval.jsonl``
with rows such as ``{"prompt": "417+268", "answer": "685"}``. A second call finds what is there and
changes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "calculator"
DATA = REPOSITORY / "models" / "calculator-data"

CONVERSATIONS, SUMS, HELD_OUT, SEED = 4096, 2000, 200, 0
CARELESS = 0.5
"""The share of conversations of the warm-up in which the assistant mistypes a number, and of those
in which it answers with another number than the calculator's."""
CALL = ('<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
"""The text of a call around its numbers. Each part is one token of the tiny model."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<tool_call>"
    "{\"name\": \"{{ c['function']['name'] }}\", "
    "\"arguments\": {{ c['function']['arguments'] | tojson }}}</tool_call>{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% else %}={% endif %}{% endfor %}"
)


def main() -> None:
    """Write missing files and print their paths."""
    parser = argparse.ArgumentParser(description="Prepare the calculator example.")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the rows (default: %(default)s)")
    arguments = parser.parse_args()
    addition = _addition()
    draw = random.Random(SEED)
    arguments.data.mkdir(parents=True, exist_ok=True)
    addition.write_rows(arguments.data / "warmup.jsonl", [{"messages": conversation(draw)} for _ in range(CONVERSATIONS)])
    rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs(draw, SUMS + HELD_OUT)]
    addition.write_rows(arguments.data / "train.jsonl", rows[HELD_OUT:])
    addition.write_rows(arguments.data / "eval.jsonl", [{**row, "held_out": True} for row in rows[:HELD_OUT]])
    write_model(addition, arguments.model)
    print(f"model {arguments.model}\ndata  {arguments.data}")


def pairs(draw: random.Random, count: int) -> list[tuple[int, int]]:
    """Different pairs of numbers with up to three digits."""
    found: dict[tuple[int, int], None] = {}
    while len(found) < count:
        found[draw.randint(0, 999), draw.randint(0, 999)] = None
    return list(found)


def conversation(draw: random.Random) -> list[dict[str, str]]:
    """A sum, a call of the calculator, its result, and an answer."""
    a, b = draw.randint(0, 999), draw.randint(0, 999)
    typed = draw.randint(0, 999) if draw.random() < CARELESS else a
    said = draw.randint(0, 1998) if draw.random() < CARELESS else typed + b
    head, middle, tail = CALL
    return [
        {"role": "user", "content": f"{a}+{b}"},
        {"role": "assistant", "content": f"{head}{typed}{middle}{b}{tail}"},
        {"role": "tool", "content": str(typed + b)},
        {"role": "assistant", "content": str(said)},
    ]


def write_model(addition: Any, folder: Path) -> None:
    """The model of the addition example, with a token for each part of a call."""
    plain = addition.build_tokenizer
    addition.CHARACTERS += '<>{}"_' + "ABCDEFGHIJKLMNOPQRSTUVWXYZ[]`"
    addition.CHAT_TEMPLATE = CHAT_TEMPLATE

    def with_calls() -> Any:
        tokenizer = plain()
        tokenizer.add_tokens(list(CALL))
        return tokenizer

    addition.build_tokenizer = with_calls
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
