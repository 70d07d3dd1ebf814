"""Counts the tokens of a dataset's rows, and finds text outside of the vocabulary."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from rollout.dataset import Prompt, rows
from rollout.dialogue import plain_row
from rollout.probe.chat import chat_renderer
from rollout.probe.tokenizer import Json, tokenizer_of

EXAMPLES = 20  # rows listed in the answer; others are counted
CHUNK = 4096  # rows tokenized at a time


def measure(request: Json) -> Json:
    """Tokenize every prompt and list those that exceed the limit."""
    folder = Path(request["model"])
    tokenizer = tokenizer_of(folder)
    render = chat_renderer(folder) if request["chat_template"] else None
    return {"files": [measure_file(file, tokenizer, render) for file in request["files"]]}


def measure_file(file: Json, tokenizer: Any, render: Callable[[Prompt, bool], str] | None) -> Json:
    """Count the tokens of each row: prompt, and with ``answer_fields`` the longest completion and
    the end token."""
    over: list[Json] = []
    empty: list[int] = []
    strange: list[Json] = []
    counted, longest, too_long, unknown = 0, 0, 0, 0
    stand_in = unknown_token(tokenizer)
    answer_fields: list[str] = file.get("answer_fields") or []
    for read in chunks(rows(file["path"]), CHUNK):
        chunk = [plain_row(row, file["prompt_field"], answer_fields) for row in read]
        talks = [bool(answer_fields) and answer_fields[0] not in row for row in chunk]  # its messages end with the answer
        texts = [text_of(row[file["prompt_field"]], render, not talk) for row, talk in zip(chunk, talks, strict=True)]
        encoded = tokenizer.encode_batch(texts, add_special_tokens=render is None)
        lengths = [len(e) for e in encoded]
        found = [unknown_text(text, ids, stand_in, file["prompt_field"]) for text, ids in zip(texts, encoded, strict=True)]
        longest_of = [0] * len(chunk)
        for field in answer_fields:
            texts = [row.get(field, "") for row in chunk]
            answers = tokenizer.encode_batch(texts, add_special_tokens=False)
            longest_of = [max(before, len(answer) + 1) for before, answer in zip(longest_of, answers, strict=True)]
            found = [f or unknown_text(t, ids, stand_in, field) for f, t, ids in zip(found, texts, answers, strict=True)]
        for row, first in enumerate(found, counted):
            if first is not None:
                unknown += 1
                strange.append({"row": row} | first)
        lengths = [prompt + answer for prompt, answer in zip(lengths, longest_of, strict=True)]
        for row, length in enumerate(lengths, counted):
            longest = max(longest, length)
            if length == 0:
                empty.append(row)
            if length > file["limit"]:
                too_long += 1
                over.append({"row": row, "tokens": length})
        counted += len(chunk)
        del over[EXAMPLES:], empty[EXAMPLES:], strange[EXAMPLES:]
    return {"rows": counted, "longest": longest, "over": too_long, "examples": over, "empty": empty} | {
        "unknown": unknown,
        "strange": strange,
    }


def unknown_text(text: str, encoded: Any, stand_in: int | None, field: str) -> Json | None:
    """The first piece of a field's text that becomes the unknown token, ``{"text", "field"}``;
    ``None`` without one."""
    if stand_in is None or stand_in not in encoded.ids:
        return None
    start, end = encoded.offsets[encoded.ids.index(stand_in)]
    return {"text": text[start:end], "field": field}


def unknown_token(tokenizer: Any) -> int | None:
    """The token for text outside of the vocabulary; ``None`` without one."""
    model: Json = json.loads(tokenizer.to_str())["model"]
    token, number = model.get("unk_token"), model.get("unk_id")
    return tokenizer.token_to_id(token) if token else number


def text_of(prompt: Prompt, render: Callable[[Prompt, bool], str] | None, answering: bool = True) -> str:
    """The input of the tokenizer for a prompt. answering: with the generation prompt of the
    assistant."""
    return render(prompt, answering) if render else cast(str, prompt)


def chunks(items: Iterator[Json], size: int) -> Iterator[list[Json]]:
    """Lists of at most ``size`` items."""
    while batch := list(itertools.islice(items, size)):
        yield batch
