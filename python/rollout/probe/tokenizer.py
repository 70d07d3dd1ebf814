"""Reads the tokenizer of a model's folder without transformers, whose import takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout.errors import Place, RolloutError

Json = dict[str, Any]


class BadModel(RolloutError):
    """The folder of the model lacks a file or has an unreadable one."""

    reason = "BAD_MODEL"


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a model's folder. Raises :class:`BadModel`."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:
        fix = "save the tokenizer again with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
        raise BadModel(f"the tokenizer can't be read: {error}", fix=fix, place=Place(str(folder / "tokenizer.json"))) from error
