"""Counts the tokens of a dataset's rows, and finds text outside of the vocabulary."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rollout.dataset import Message, Prompt, rows
from rollout.dialogue import plain_row
from rollout.probe.chat import chat_renderer
from rollout.probe.tokenizer import Json, tokenizer_of
from rollout.truncation import shorten_chat

Render = Callable[[Prompt, bool], str]

EXAMPLES = 20  # rows listed in the answer; others are counted
CHUNK = 4096  # rows tokenized at a time


def measure(request: Json) -> Json:
    """Tokenize every row and list those that exceed the limit."""
    folder = Path(request["model"])
    tokenizer = tokenizer_of(folder)
    render = chat_renderer(folder) if request["chat_template"] else None
    return {"files": [measure_file(file, tokenizer, render) for file in request["files"]]}


def measure_file(file: Json, tokenizer: Any, render: Render | None) -> Json:
    """Count the tokens of each row: prompt, and with ``answer_fields`` the longest completion and
    the end token."""
    over: list[Json] = []
    empty: list[int] = []
    strange: list[Json] = []
    drop: list[int] = []
    counted, longest, too_long, unknown = 0, 0, 0, 0
    stand_in = unknown_token(tokenizer)
    answer_fields: list[str] = file.get("answer_fields") or []
    overlong: str = file.get("overlong") or "error"
    fitter = Fitter(tokenizer, render, file["prompt_field"], answer_fields, file["limit"])
    for read in chunks(rows(file["path"]), CHUNK):
        chunk = [plain_row(row, file["prompt_field"], answer_fields) for row in read]
        talks = [is_talk(row, answer_fields) for row in chunk]
        texts = [text_of(row[file["prompt_field"]], render, not talk) for row, talk in zip(chunk, talks, strict=True)]
        encoded = tokenizer.encode_batch(texts, add_special_tokens=render is None)
        prompts = [len(e) for e in encoded]
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
        lengths = [prompt + answer for prompt, answer in zip(prompts, longest_of, strict=True)]
        for row, (content, prompt, length) in enumerate(zip(chunk, prompts, lengths, strict=True), counted):
            longest = max(longest, length)
            if length == 0:
                empty.append(row)
            if length > file["limit"]:
                too_long += 1
                over.append({"row": row, "tokens": length})
                if overlong == "drop" or (overlong == "truncate" and not fitter.fits(content, prompt)):
                    drop.append(row)
        counted += len(chunk)
        del over[EXAMPLES:], empty[EXAMPLES:], strange[EXAMPLES:]
    return {"rows": counted, "longest": longest, "over": too_long, "examples": over, "empty": empty} | {
        "drop": drop,
        "cut": too_long - len(drop) if overlong == "truncate" else 0,
        "unknown": unknown,
        "strange": strange,
    }


@dataclass(frozen=True, slots=True)
class Fitter:
    """Decides whether workers can cut a row to ``limit`` tokens
    (``data.overlong = "truncate"``)."""

    tokenizer: Any
    render: Render | None
    prompt_field: str
    answer_fields: Sequence[str]
    limit: int

    def fits(self, row: Mapping[str, Any], prompt_tokens: int) -> bool:
        """Whether something of the row is left to train on or to answer."""
        prompt: Prompt = row[self.prompt_field]
        if is_talk(row, self.answer_fields):
            messages = cast("Sequence[Message]", prompt)
            first = next(n for n, message in enumerate(messages) if message.get("role") == "assistant")
            return self._length(messages[:first]) < self.limit
        if self.answer_fields:
            return prompt_tokens < self.limit
        if self.render is None:
            return self.limit > self.tokenizer.num_special_tokens_to_add(False)
        return shorten_chat(prompt, self.limit, self._length, self._encode) is not None

    def _length(self, messages: Sequence[Message]) -> int:
        assert self.render is not None
        return len(self.tokenizer.encode(self.render(messages, True), add_special_tokens=False))

    def _encode(self, text: str) -> Any:
        return self.tokenizer.encode(text, add_special_tokens=False)


def is_talk(row: Mapping[str, Any], answer_fields: Sequence[str]) -> bool:
    """Whether a row that is trained on has its answer in the messages of the prompt."""
    return bool(answer_fields) and answer_fields[0] not in row


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


def text_of(prompt: Prompt, render: Render | None, answering: bool = True) -> str:
    """The input of the tokenizer for a prompt. answering: with the generation prompt of the
    assistant."""
    return render(prompt, answering) if render else cast(str, prompt)


def chunks(items: Iterator[Json], size: int) -> Iterator[list[Json]]:
    """Lists of at most ``size`` items."""
    while batch := list(itertools.islice(items, size)):
        yield batch
