"""Prepare the addition example: a decoder of 0.8 M parameters with random weights, its tokenizer,
and the sums.

    python examples/addition/prepare.py [--model DIR] [--data DIR]

Writes the model's folder (what ``AutoModelForCausalLM`` and ``AutoTokenizer`` load) and
``train.jsonl`` and ``eval.jsonl`` with rows such as ``{"prompt": "17+25=", "answer": "42"}``: all
10,000 sums of two numbers from 0 to 99, of which 500 are held out. ``preferences.jsonl`` and
``labels.jsonl`` hold the training sums with a right and a wrong answer each, as pairs (``chosen``,
``rejected``) and one by one (``completion``, ``label``); ``preferences-eval.jsonl`` holds pairs of
those that are held out. Everything follows from a fixed seed: a second call finds what is there and
changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import string
import uuid
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "models" / "addition"
DATA = REPOSITORY / "models" / "addition-data"

SEED = 0
HELD_OUT = 500
SPECIAL = ("<pad>", "<eos>", "<unk>")
CHARACTERS = string.digits + "+-*/=?.,:;()' \n" + string.ascii_lowercase
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def main() -> None:
    """Write missing files and print their paths."""
    parser = argparse.ArgumentParser(description="Prepare the addition example.")
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        help="folder of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="folder of the rows (default: %(default)s)",
    )
    arguments = parser.parse_args()
    write_data(arguments.data)
    write_model(arguments.model)
    print(f"model {arguments.model}\ndata  {arguments.data}")


def write_data(folder: Path) -> None:
    """Write ``train.jsonl`` (9,500 rows) and ``eval.jsonl`` (500 other rows) into ``folder``, and
    the training rows as preferences."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(100) for b in range(100)]
    random.Random(SEED).shuffle(rows)
    train = rows[HELD_OUT:]
    pairs = preferences(train)
    single = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "eval.jsonl", rows[:HELD_OUT])
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "preferences.jsonl", pairs)
    write_rows(folder / "preferences-eval.jsonl", preferences(rows[:HELD_OUT]))
    write_rows(folder / "labels.jsonl", single)


def preferences(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Each row with its answer as the chosen completion, and a number at most 20 away as the
    rejected one."""
    draw = random.Random(SEED + 1)
    pairs: list[dict[str, str]] = []
    for row in rows:
        right = int(row["answer"])
        wrong = draw.choice([number for number in range(max(0, right - 20), right + 21) if number != right])
        pairs.append({"prompt": row["prompt"], "chosen": row["answer"], "rejected": str(wrong)})
    return pairs


def write_rows(path: Path, rows: list[Any]) -> None:
    """Write rows to ``path`` atomically; keep an existing file."""
    if path.exists():
        return
    staged = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    staged.write_text("".join(json.dumps(row) + "\n" for row in rows))
    staged.rename(path)


def write_model(folder: Path, *, layers: int = 4, hidden: int = 128, seed: int = SEED) -> None:
    """Write a Qwen3 decoder with random weights and its tokenizer to ``folder``, atomically."""
    if (folder / "config.json").exists():
        return
    os.environ.setdefault("USE_TF", "0")
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # the file has only 3 MB

    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        initializer_range=0.04,  # twice the default: the model learns to carry about 100 steps earlier
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    try:
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def build_tokenizer() -> Any:
    """A tokenizer with one token per character, 54 in total; other text becomes ``<unk>``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


if __name__ == "__main__":
    main()
