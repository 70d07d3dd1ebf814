"""Prepare the MCP example: a tiny model with random weights, conversations of a careless assistant
that looks capitals up, a table of invented countries, and countries to look up.

    python examples/mcp/prepare.py [--model DIR] [--data DIR]

Writes the model's folder, ``capitals.json`` (the table), ``warmup.jsonl`` (conversations), and
``train.jsonl`` and ``held-out.jsonl`` with rows such as ``{"prompt": "bali", "answer": "moru"}``. A
second call finds what is there and changes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "capitals"
DATA = REPOSITORY / "models" / "capitals-data"

CONVERSATIONS, COUNTRIES, HELD_OUT, SEED = 4096, 1200, 200, 0
CARELESS = 0.5
"""The share of conversations of the warm-up in which the assistant looks another country up, and of
those in which it answers with another city than the tool's."""
CALL = ('<tool_call>{"name": "lookup", "arguments": {"country": "', '"}}</tool_call>')
"""The text of a call around the country. Each part is one token of the tiny model."""


def main() -> None:
    """Write missing files and print their paths."""
    parser = argparse.ArgumentParser(description="Prepare the MCP example.")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the rows (default: %(default)s)")
    arguments = parser.parse_args()
    tools = _script("tools")
    addition = _script("addition")
    draw = random.Random(SEED)
    warmup = [{"messages": conversation(draw)} for _ in range(CONVERSATIONS)]
    countries = list(dict.fromkeys(name(draw) for _ in range(2 * COUNTRIES)))[:COUNTRIES]
    table = {country: name(draw) for country in countries}
    rows = [{"prompt": country, "answer": capital} for country, capital in table.items()]
    arguments.data.mkdir(parents=True, exist_ok=True)
    addition.write_rows(arguments.data / "warmup.jsonl", warmup)
    addition.write_rows(arguments.data / "train.jsonl", rows[HELD_OUT:])
    addition.write_rows(arguments.data / "held-out.jsonl", [{**row, "held_out": True} for row in rows[:HELD_OUT]])
    if not (arguments.data / "capitals.json").exists():
        (arguments.data / "capitals.json").write_text(json.dumps(table, indent=0) + "\n")
    tools.CALL = CALL
    tools.write_model(addition, arguments.model)
    print(f"model {arguments.model}\ndata  {arguments.data}")


def name(draw: random.Random) -> str:
    """An invented name of two syllables."""
    return "".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(2))


def conversation(draw: random.Random) -> list[dict[str, str]]:
    """A country, a call of the tool, its result, and an answer."""
    country, capital = name(draw), name(draw)
    typed = name(draw) if draw.random() < CARELESS else country
    said = name(draw) if draw.random() < CARELESS else capital
    head, tail = CALL
    return [
        {"role": "user", "content": country},
        {"role": "assistant", "content": f"{head}{typed}{tail}"},
        {"role": "tool", "content": capital},
        {"role": "assistant", "content": said},
    ]


def _script(example: str) -> Any:
    """The script ``prepare.py`` of another example."""
    path = REPOSITORY / "examples" / example / "prepare.py"
    spec = importlib.util.spec_from_file_location(f"{example}_prepare", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
