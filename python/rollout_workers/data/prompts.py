"""From a row to the tokens that a model reads, and from tokens back to text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollout.errors import RolloutError

Ids = NDArray[np.int32]
_CACHED_PROMPTS = 100_000
_LINE = "\n"


class PromptInvalid(RolloutError):
    """A row without a usable prompt or answer."""

    reason: ClassVar[str] = "PROMPT_INVALID"


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """token_ids int32[N], as the model reads it. text: the same, special tokens left out."""

    token_ids: Ids
    text: str


class Text:
    """A Hugging Face tokenizer, used in batches and past its per-call overhead."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: what ``AutoTokenizer.from_pretrained`` returns. Its truncation and padding are
        switched off."""
        self.tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()

    @classmethod
    def load(cls, directory: str) -> Text:
        """The tokenizer of a model's folder."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(directory))

    def warm(self) -> None:
        """Do once what the first request would wait for: compile the chat template, make the
        tokenizer's caches. Blocks."""
        rendered = ""
        if self.tokenizer.chat_template:
            with contextlib.suppress(PromptInvalid):  # a template may want more than one message
                rendered = self.render([{"role": "user", "content": "hello"}])
        self.decode(self.encode([rendered or "hello"]))

    @property
    def eos_id(self) -> int | None:
        """End of sequence."""
        return self.tokenizer.eos_token_id

    @cached_property
    def longest(self) -> int:
        """Most characters of a token of the vocabulary."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[Ids]:
        """Token ids of each text. special: with what the tokenizer puts around a sequence (such as
        a begin token)."""
        if self._fast is not None:
            return [np.array(e.ids, np.int32) for e in self._fast.encode_batch(list(texts), add_special_tokens=special)]
        return [np.array(ids, np.int32) for ids in self.tokenizer(list(texts), add_special_tokens=special)["input_ids"]]

    def following(self, texts: Sequence[str], before: Sequence[Prompt | Ids | PromptInvalid]) -> list[Ids]:
        """Token ids of each text as a continuation of the tokens in ``before``, as a model writes
        them.

        A tokenizer of SentencePiece's kind puts a space before what begins a text, and some after
        special tokens.
        """
        plain = self.encode(texts, special=False)
        if not self._leads:
            return plain
        leads = [self._lead(ids.token_ids if isinstance(ids, Prompt) else ids) for ids in before]
        alone = self.encode(leads, special=False)
        joint = self.encode([lead + text for lead, text in zip(leads, texts, strict=True)], special=False)
        return [
            both[len(lead) :] if np.array_equal(both[: len(lead)], lead) else text
            for both, lead, text in zip(joint, alone, plain, strict=True)
        ]

    @cached_property
    def _leads(self) -> bool:
        """Whether a text has other tokens at the start than as a continuation."""
        alone, joint, begun = self.encode([_LINE, _LINE + "a", "a"], special=False)
        return not np.array_equal(joint[len(alone) :], begun)

    def _lead(self, before: Ids | PromptInvalid) -> str:
        """A text after which others are tokenised as after these ids: their last token where it is
        a special one, else a line's end, which joins no other character."""
        if isinstance(before, PromptInvalid) or not len(before):
            return _LINE
        token = self.tokenizer.added_tokens_decoder.get(int(before[-1]))
        return _LINE if token is None else token.content

    def decode(self, sequences: Iterable[Sequence[int] | Ids]) -> list[str]:
        """Text of each sequence, special tokens left out."""
        lists = [s.tolist() if isinstance(s, np.ndarray) else list(s) for s in sequences]
        if not lists:
            return []
        if self._fast is not None and not self._cleans:
            return self._fast.decode_batch(lists, skip_special_tokens=True)
        return self.tokenizer.batch_decode(lists, skip_special_tokens=True)

    def pieces(self, ids: Ids) -> list[str]:
        """Text of each token (int32[T]) by itself, special tokens too."""
        return self.tokenizer.batch_decode([[token] for token in ids.tolist()], skip_special_tokens=False)

    def render(self, messages: Sequence[Mapping[str, Any]], *, answering: bool = True) -> str:
        """A chat through the tokenizer's template; answering: up to where the assistant speaks.
        Raises :class:`PromptInvalid`."""
        if not self.tokenizer.chat_template:
            raise PromptInvalid(
                "the model's tokenizer has no chat template", fix="set `model.chat_template = false` and send plain text"
            )
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answering)
        except Exception as error:
            raise PromptInvalid(f"the chat template refused the messages: {error}") from error


class PromptReader:
    """Rows of a dataset as prompts; remembers what it has tokenised."""

    def __init__(self, text: Text, *, prompt_field: str, chat_template: bool) -> None:
        self.field = prompt_field
        self._text, self._chat = text, chat_template
        self._known: dict[bytes, Prompt | PromptInvalid] = {}

    def read(self, rows: Sequence[bytes]) -> list[Prompt | PromptInvalid]:
        """The prompt of each row (JSON), in order; a broken row gives its error."""
        missing = [row for row in dict.fromkeys(rows) if row not in self._known]
        if missing:
            if len(self._known) + len(missing) > _CACHED_PROMPTS:
                self._known.clear()
                missing = list(dict.fromkeys(rows))
            self._known.update(zip(missing, self._read(missing), strict=True))
        return [self._known[row] for row in rows]

    def _read(self, rows: Sequence[bytes]) -> list[Prompt | PromptInvalid]:
        rendered = [self._render(row) for row in rows]
        ids = self._encode([r for r in rendered if not isinstance(r, PromptInvalid)])
        texts = iter(self._text.decode(ids))
        numbered = iter(ids)
        return [r if isinstance(r, PromptInvalid) else self._prompt(next(numbered), next(texts)) for r in rendered]

    def _prompt(self, ids: Ids, text: str) -> Prompt | PromptInvalid:
        return Prompt(ids, text) if len(ids) else PromptInvalid("the prompt has no tokens", fix="give the row a prompt")

    def _encode(self, rendered: Sequence[tuple[str, bool]]) -> list[Ids]:
        """Token ids of (text, whether a template has put the special tokens in already)."""
        out: list[Ids] = [np.zeros(0, np.int32)] * len(rendered)
        for templated in (False, True):
            at = [i for i, (_, t) in enumerate(rendered) if t is templated]
            if at:
                for i, ids in zip(at, self._text.encode([rendered[i][0] for i in at], special=not templated), strict=True):
                    out[i] = ids
        return out

    def _render(self, row_json: bytes) -> tuple[str, bool] | PromptInvalid:
        try:
            value = parse_row(row_json).get(self.field)
            if isinstance(value, list):
                return self._text.render(value), True
            if not isinstance(value, str):
                raise PromptInvalid(f"field `{self.field}` is neither text nor a list of messages", fix="see `data.prompt_field`")
            if self._chat:
                return self._text.render([{"role": "user", "content": value}]), True
            return value, False
        except PromptInvalid as error:
            return error


def parse_row(row_json: bytes) -> dict[str, Any]:
    """The row as a mapping. Raises :class:`PromptInvalid`."""
    try:
        row = json.loads(row_json)
    except ValueError as error:
        raise PromptInvalid(f"the row is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise PromptInvalid("the row is not a JSON object")
    return row
