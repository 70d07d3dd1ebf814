"""Prepare the guessing game: a tiny model with random weights, games of a player that ignores half
of the hints, and the numbers to guess.

    python examples/agent_openai/prepare.py [--model DIR] [--data DIR]

Writes the model's folder, ``games.jsonl`` (conversations for the warm-up), and ``numbers.jsonl``
with rows such as ``{"prompt": [{"role": "user", "content": "guess 1-5:"}], "number": 4}``;
``held-out.jsonl`` has rows for evaluations, and ``held-out-verifiers.jsonl`` those of the same game
in verifiers. A second call finds what is there and changes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "guess"
DATA = REPOSITORY / "models" / "guess-data"

QUESTION = "guess 1-5:"
LARGEST, GUESSES = 5, 3
HINTS = {False: "lower:", True: "higher:"}
"""By whether the number is higher than the guess."""

GAMES, NUMBERS, HELD_OUT, SEED = 4096, 1000, 400, 0
FOLLOWED = 0.5
"""The share of guesses of the warm-up that fit all hints."""
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


def main() -> None:
    """Write missing files and print their paths."""
    parser = argparse.ArgumentParser(description="Prepare the guessing game.")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the rows (default: %(default)s)")
    arguments = parser.parse_args()
    addition = _addition()
    draw = random.Random(SEED)
    arguments.data.mkdir(parents=True, exist_ok=True)
    addition.write_rows(arguments.data / "games.jsonl", [{"messages": game(draw)} for _ in range(GAMES)])
    numbers = [{"prompt": opening(), "number": 1 + at % LARGEST} for at in range(NUMBERS)]
    addition.write_rows(arguments.data / "numbers.jsonl", numbers)
    addition.write_rows(arguments.data / "held-out.jsonl", [{**row, "held_out": True} for row in numbers[:HELD_OUT]])
    indices = [{"index": at % LARGEST, "held_out": True} for at in range(HELD_OUT)]
    addition.write_rows(arguments.data / "held-out-verifiers.jsonl", indices)
    addition.CHAT_TEMPLATE = CHAT_TEMPLATE  # each turn of the assistant ends with the end token
    addition.write_model(arguments.model)
    print(f"model {arguments.model}\ndata  {arguments.data}")


def opening() -> list[dict[str, str]]:
    """The first message of every game."""
    return [{"role": "user", "content": QUESTION}]


def hint(guess: int, number: int) -> dict[str, str]:
    """The answer to a wrong guess."""
    return {"role": "user", "content": HINTS[number > guess]}


def game(draw: random.Random) -> list[dict[str, str]]:
    """A game of a player that knows the rules, and at every second guess thinks of the hints."""
    messages, number = opening(), draw.randint(1, LARGEST)
    low, high = 1, LARGEST
    for _ in range(GUESSES):
        guess = draw.randint(*(low, high) if draw.random() < FOLLOWED else (1, LARGEST))
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        messages.append(hint(guess, number))
        low, high = (max(low, guess + 1), high) if number > guess else (low, min(high, guess - 1))
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def _addition() -> Any:
    """The script of the addition example, whose model this one has."""
    spec = importlib.util.spec_from_file_location("addition_prepare", REPOSITORY / "examples" / "addition" / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
