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

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.errors import RolloutError
from rollout.truncation import shorten_chat
from rollout_workers.data.token_bytes import TokenBytes

Ids = NDArray[np.int32]
Messages = Sequence[Mapping[str, Any]]
_NO_IDS: Ids = np.zeros(0, np.int32)
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
    """A Hugging Face tokenizer, called in batches and without the overhead of its Python class."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: the result of ``AutoTokenizer.from_pretrained``. Its truncation and padding
        are turned off."""
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
        """Compile the chat template and fill the tokenizer's caches, so that the first request does
        not wait for that. Blocks."""
        rendered = ""
        if self.tokenizer.chat_template:
            with contextlib.suppress(PromptInvalid):  # a template may want more than one message
                rendered = self.render([{"role": "user", "content": "hello"}])
        self.decode(self.encode([rendered or "hello"]))

    @property
    def template(self) -> str:
        """The chat template; empty without one."""
        found = self.tokenizer.chat_template
        return found if isinstance(found, str) else ""

    @property
    def eos_id(self) -> int | None:
        """End of sequence."""
        return self.tokenizer.eos_token_id

    @cached_property
    def longest(self) -> int:
        """Most characters of a token of the vocabulary."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[Ids]:
        """Token ids of each text. special: with the special tokens that the tokenizer adds to a
        sequence, such as a begin token."""
        if self._fast is not None:
            return [np.array(e.ids, np.int32) for e in self._fast.encode_batch(list(texts), add_special_tokens=special)]
        return [np.array(ids, np.int32) for ids in self.tokenizer(list(texts), add_special_tokens=special)["input_ids"]]

    def encoding(self, text: str) -> Any:
        """A text without special tokens, as an encoding of the library ``tokenizers``."""
        return self._backend.encode(text, add_special_tokens=False)

    def leading_special(self, text: str) -> int:
        """The number of special tokens that the tokenizer adds at the start of a text."""
        mask = self._backend.encode(text).special_tokens_mask
        return next((n for n, special in enumerate(mask) if not special), len(mask))

    @property
    def _backend(self) -> Any:
        if self._fast is None:
            raise PromptInvalid(
                "this tokenizer can't shorten prompts: it has no tokenizer.json", fix='set `data.overlong = "drop"`'
            )
        return self._fast

    def following(self, texts: Sequence[str], before: Sequence[Prompt | Ids | PromptInvalid]) -> list[Ids]:
        """Token ids of each text as a continuation of the tokens in ``before``, as a model
        generates them.

        SentencePiece tokenizers add a space at the start of a text, and some of them after special
        tokens; a continuation must not have it.
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
        """A text after which others are tokenized as after these ids: their last token if it is a
        special one, otherwise a line break, which is never merged with another character."""
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

    @cached_property
    def size(self) -> int:
        """One more than the largest token id."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def whole(self, sequences: Sequence[Sequence[int] | Ids]) -> list[str]:
        """Text of each sequence, with its special tokens."""
        lists = [s.tolist() if isinstance(s, np.ndarray) else list(s) for s in sequences]
        return self.tokenizer.batch_decode(lists, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_bytes(self, ids: Ids) -> list[bytes]:
        """UTF-8 bytes of each token (int32[T]), special tokens too. A character may be divided
        between tokens. Empty for an id that the tokenizer does not have."""
        return self._token_bytes.of(ids)

    @cached_property
    def special(self) -> Mapping[int, str]:
        """Text of each special token by id."""
        return {at: token.content for at, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    @cached_property
    def leads_with_space(self) -> bool:
        """Whether the tokens of a text begin with a space that its decoded text does not have, as
        with SentencePiece."""
        [ids] = self.encode(["a"], special=False)
        return b"".join(self.token_bytes(ids)) == b" a" and self.decode([ids]) == ["a"]

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    def pieces(self, ids: Ids) -> list[str]:
        """Text of each token (int32[T]) by itself, special tokens too."""
        return self.tokenizer.batch_decode([[token] for token in ids.tolist()], skip_special_tokens=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answering: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> str:
        """The text of a chat, rendered with the tokenizer's template. answering: with the
        generation prompt of the assistant. tools: the functions that the template describes to it.
        variables: further ones of the template. continues: the text ends inside of the last
        message, which is the assistant's. Raises :class:`PromptInvalid`."""
        if not self.tokenizer.chat_template:
            raise PromptInvalid(
                "the model's tokenizer has no chat template", fix="set `model.chat_template = false` and send plain text"
            )
        try:
            offered: dict[str, Any] = {**(variables or {}), **({"tools": list(tools)} if tools else {})}
            if continues:
                answering = False
                offered["continue_final_message"] = "content" if messages[-1].get("content") else "reasoning_content"
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answering, **offered)
        except Exception as error:
            raise PromptInvalid(f"the chat template refused the messages: {error}") from error


class PromptReader:
    """Turns rows of a dataset into prompts. It caches the prompts that it tokenized."""

    def __init__(self, text: Text, *, prompt_field: str, chat_template: bool, longest: int | None = None) -> None:
        """longest: tokens of a prompt; a longer one is cut at its start. None: prompts are not
        cut."""
        self.field = prompt_field
        self._text, self._chat, self._longest = text, chat_template, longest
        self._known: dict[bytes, Prompt | PromptInvalid] = {}

    @classmethod
    def of_samples(cls, config: RunConfig, text: Text) -> PromptReader:
        """Reads prompts that the policy answers."""
        longest = longest_prompt(config) if config.data.overlong == "truncate" else None
        return cls(text, prompt_field=config.data.prompt_field, chat_template=config.model.chat_template, longest=longest)

    @classmethod
    def of_rows(cls, config: RunConfig, text: Text) -> PromptReader:
        """Reads the prompts of rows that are trained on. They are not cut: completions are."""
        return cls(text, prompt_field=config.data.prompt_field, chat_template=config.model.chat_template)

    def read(self, rows: Sequence[bytes]) -> list[Prompt | PromptInvalid]:
        """The prompt of each row (JSON), in order; an invalid row gives its error."""
        missing = [row for row in dict.fromkeys(rows) if row not in self._known]
        if missing:
            if len(self._known) + len(missing) > _CACHED_PROMPTS:
                self._known.clear()
                missing = list(dict.fromkeys(rows))
            self._known.update(zip(missing, self._read(missing), strict=True))
        return [self._known[row] for row in rows]

    def messages(self, row_json: bytes) -> Messages:
        """The prompt of a row as messages: a text is one of the user. Raises
        :class:`PromptInvalid`."""
        chat = self._chat_of(row_json)
        if isinstance(chat, PromptInvalid):
            raise chat
        return [{"role": "user", "content": chat}] if isinstance(chat, str) else chat

    def _read(self, rows: Sequence[bytes]) -> list[Prompt | PromptInvalid]:
        chats = [self._chat_of(row) for row in rows]
        encoded = self._encode(chats)
        if self._longest is not None:
            encoded = [self._shorten(chat, ids, self._longest) for chat, ids in zip(chats, encoded, strict=True)]
        texts = iter(self._text.decode([ids for ids in encoded if not isinstance(ids, PromptInvalid)]))
        return [ids if isinstance(ids, PromptInvalid) else self._prompt(ids, next(texts)) for ids in encoded]

    def _prompt(self, ids: Ids, text: str) -> Prompt | PromptInvalid:
        return Prompt(ids, text) if len(ids) else PromptInvalid("the prompt has no tokens", fix="give the row a prompt")

    def _encode(self, chats: Sequence[str | Messages | PromptInvalid]) -> list[Ids | PromptInvalid]:
        """Token ids of each prompt. A chat has its special tokens from the template."""
        rendered = [self._render(chat) if isinstance(chat, list) else chat for chat in chats]
        out: list[Ids | PromptInvalid] = [text if isinstance(text, PromptInvalid) else _NO_IDS for text in rendered]
        for templated in (False, True):
            at = [i for i, chat in enumerate(chats) if isinstance(chat, list) is templated and isinstance(rendered[i], str)]
            if at:
                for i, ids in zip(at, self._text.encode([str(rendered[i]) for i in at], special=not templated), strict=True):
                    out[i] = ids
        return out

    def _chat_of(self, row_json: bytes) -> str | Messages | PromptInvalid:
        """The prompt of a row: a text, or messages for the chat template."""
        try:
            value = parse_row(row_json).get(self.field)
        except PromptInvalid as error:
            return error
        if isinstance(value, str):
            return [{"role": "user", "content": value}] if self._chat else value
        if isinstance(value, list):
            return value
        return PromptInvalid(f"field `{self.field}` is neither text nor a list of messages", fix="see `data.prompt_field`")

    def _render(self, messages: Messages) -> str | PromptInvalid:
        try:
            return self._text.render(messages)
        except PromptInvalid as error:
            return error

    def _shorten(self, chat: str | Messages | PromptInvalid, ids: Ids | PromptInvalid, longest: int) -> Ids | PromptInvalid:
        if isinstance(ids, PromptInvalid) or len(ids) <= longest:
            return ids
        if isinstance(chat, str):
            special = self._text.leading_special(chat)
            return np.concatenate((ids[:special], ids[len(ids) - (longest - special) :]))
        assert isinstance(chat, list)
        try:
            shorter = shorten_chat(chat, longest, self._length, self._text.encoding)
        except PromptInvalid as error:
            return error
        if shorter is None:
            return PromptInvalid(f"the prompt can't be cut to {longest} tokens", fix='set `data.overlong = "drop"`')
        [encoded] = self._encode([shorter])
        return encoded

    def _length(self, messages: Messages) -> int:
        return len(self._text.encode([self._text.render(messages)], special=False)[0])


def longest_prompt(config: RunConfig) -> int:
    """The most tokens of a prompt that leave room for a completion of ``sampling.max_tokens``."""
    return config.engine.max_model_len - config.sampling.max_tokens


def parse_row(row_json: bytes) -> dict[str, Any]:
    """The row as a mapping. Raises :class:`PromptInvalid`."""
    try:
        row = json.loads(row_json)
    except ValueError as error:
        raise PromptInvalid(f"the row is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise PromptInvalid("the row is not a JSON object")
    return row
