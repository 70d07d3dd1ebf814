"""The examples' data, model and rewards."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"


def load(name: str) -> dict[str, Any]:
    """What a file of the examples defines."""
    return runpy.run_path(str(EXAMPLES / name))


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def sample(completion: str, answer: str) -> SimpleNamespace:
    """A sample as a reward sees it."""
    return SimpleNamespace(prompt="", completion=completion, row={"answer": answer})


@pytest.mark.parametrize(("name", "train", "held_out"), [("addition", 9_500, 500), ("smollm2", 65, 16)])
def test_rows_are_split_once_and_for_all(tmp_path: Path, name: str, train: int, held_out: int) -> None:
    prepare = load(f"{name}/prepare.py")
    for folder in ("a", "b"):
        prepare["write_data"](tmp_path / folder)
        prepare["write_data"](tmp_path / folder)
    parts = [rows(tmp_path / "a" / part) for part in ("train.jsonl", "eval.jsonl")]
    assert [len(part) for part in parts] == [train, held_out]
    assert len({row["prompt"] for part in parts for row in part}) == train + held_out
    for part in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / "a" / part).read_bytes() == (tmp_path / "b" / part).read_bytes()


def test_the_sums_are_right(tmp_path: Path) -> None:
    load("addition/prepare.py")["write_data"](tmp_path)
    for row in rows(tmp_path / "eval.jsonl"):
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(a) + int(b)


def test_the_model_is_the_same_each_time_and_round_trips_text(tmp_path: Path) -> None:
    prepare = load("addition/prepare.py")
    for folder in ("a", "b"):
        prepare["write_model"](tmp_path / folder)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert 790_000 < sum(p.numel() for p in model.parameters()) < 800_000
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.decode(tokenizer("17+25=42").input_ids) == "17+25=42"
    assert len(tokenizer("17+25=42").input_ids) == 8
    chat = [{"role": "user", "content": "1+2="}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "1+2="
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1


def test_addition_reward() -> None:
    exact_match = load("addition/reward.py")["exact_match"]
    assert exact_match([sample("42", "42"), sample("421", "42"), sample("", "42"), sample("42 ", "42")]) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("8", 0.6 + 0.4 * 29 / 30),
        ("3 + 5 = 8", 0.6 + 0.4 * 21 / 30),
        ("8, not 9", 0.4 * 22 / 30),
        ("", 0.4),
        ("The sum of 3 and 5 is equal to 8.", 0.6),
        ("I would say that this is the number nine", 0.0),
    ],
)
def test_smollm2_reward(completion: str, reward: float) -> None:
    (found,) = load("smollm2/reward.py")["number_and_brevity"]([sample(completion, "8")])
    assert found["reward"] == pytest.approx(reward)
    assert found["accuracy"] == float(reward >= 0.6)
