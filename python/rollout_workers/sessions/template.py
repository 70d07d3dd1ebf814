"""Renders the first prompt of a session, and the tokens between a sampled turn and the next one.

The bridge is a difference of the chat template: the sampled turn is rendered with a marker in its
place, once alone and once with the new messages. What follows the marker is the end-of-turn token,
the template's separator, the new messages, and the beginning of the next answer. The cost does not
depend on the length of the history, and the sampled tokens are never rendered.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollout_workers.data.prompts import PromptInvalid, Text
from rollout_workers.sessions.messages import Message

Ids: TypeAlias = NDArray[np.int32]
Tools: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Options:
    """How messages are rendered. variables: further ones of the chat template. continues: the
    policy continues the last message, which is the assistant's."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False


DEFAULT = Options()
NOTHING: Message = {"role": "assistant", "content": "", "prefix": True}
"""What a piece says that has no message but begins the assistant's."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens of messages that the policy did not sample. messages: in order; none if they are not a
    chat. A beginning of the assistant's message is one of them, with `prefix`."""

    messages: tuple[Message, ...]
    token_ids: Ids


class Renderer(Protocol):
    """Turns messages into tokens for one model."""

    def begin(self, messages: Sequence[Message], tools: Tools, options: Options = DEFAULT) -> list[Piece]:
        """A conversation up to where the assistant answers. A leading system message is a piece of
        its own if its tokens do not depend on what follows. Raises ``PromptInvalid``."""
        ...

    def bridge(self, turn: Message, sampled: Ids, messages: Sequence[Message], tools: Tools, options: Options = DEFAULT) -> Piece:
        """The tokens after a sampled turn, up to where the assistant answers again. turn: what the
        assistant said, for templates that look at its tool calls. sampled: its tokens, of which the
        last may be the end of the turn. Raises ``PromptInvalid`` if the template can't continue."""
        ...

    def text(self, sampled: Ids) -> str:
        """The text of sampled tokens."""
        ...


class ChatTemplate:
    """The renderer for any tokenizer with a chat template."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def begin(self, messages: Sequence[Message], tools: Tools, options: Options = DEFAULT) -> list[Piece]:
        rendered = self._render(messages, tools, options)
        ids = self._encode(rendered)
        head = self._head(messages, tools, options)
        messages = _said(messages, options)
        if head and rendered.startswith(head):
            first = self._encode(head)
            if len(first) < len(ids) and np.array_equal(ids[: len(first)], first):
                return [Piece(tuple(messages[:1]), first), Piece(tuple(messages[1:]), ids[len(first) :])]
        return [Piece(tuple(messages), ids)]

    def whole(self, messages: Sequence[Message], tools: Tools, options: Options = DEFAULT) -> Ids:
        """A conversation up to where the assistant answers. Raises ``PromptInvalid``."""
        return self._encode(self._render(messages, tools, options))

    def bridge(self, turn: Message, sampled: Ids, messages: Sequence[Message], tools: Tools, options: Options = DEFAULT) -> Piece:
        mark = "TURN"
        while mark in str(messages) or mark in str(tools):
            mark += "X"
        context = [{"role": "user", "content": "."}, _marked(turn, mark)]
        alone = _after(self._render(context, tools, options, answering=False), mark)
        whole = _after(self._render([*context, *messages], tools, options), mark)
        if alone is None or whole is None:
            raise PromptInvalid("the chat template leaves out the assistant's earlier message, so its tokens can't be continued")
        ends = len(self._added.findall(alone)) if self._added else 0
        if ends and (closing := list(self._added.finditer(whole))[ends - 1 : ends]):  # type: ignore[union-attr]
            end, closes = closing[0].start(), True
        else:
            end, closes = 0, False
        [following] = self._text.following([whole[end:]], [sampled])
        return Piece(_said(messages, options), following[self._overlap(sampled, following, closes) :])

    def text(self, sampled: Ids) -> str:
        return self._text.decode([sampled])[0]

    def _overlap(self, sampled: Ids, following: Ids, closes: bool) -> int:
        """How many of the following tokens the sampled ones contain already. closes: whether the
        first is the template's end of a turn; any other stop token takes its place."""
        for size in range(min(len(sampled), len(following), 8), 0, -1):
            if np.array_equal(sampled[-size:], following[:size]):
                return size
        return int(closes and len(sampled) > 0 and int(sampled[-1]) in self._special)

    def _head(self, messages: Sequence[Message], tools: Tools, options: Options) -> str:
        """The leading system message by itself; empty without one, or if the template refuses."""
        if len(messages) < 2 or messages[0].get("role") not in ("system", "developer"):
            return ""
        try:
            return self._render(messages[:1], tools, options, answering=False)
        except PromptInvalid:
            return ""

    def _render(self, messages: Sequence[Message], tools: Tools, options: Options, *, answering: bool = True) -> str:
        """Arguments of tool calls as objects, which most templates expect, else as JSON texts.
        answering: up to where the policy continues."""

        def render(convert: Any) -> str:
            return self._text.render(
                [_arguments(m, convert) for m in messages],
                answering=answering,
                tools=tools,
                variables=options.variables,
                continues=answering and options.continues,
            )

        try:
            return render(json.loads)
        except PromptInvalid:
            if not any(m.get("tool_calls") for m in messages):
                raise
            return render(json.dumps)

    def _encode(self, rendered: str) -> Ids:
        return self._text.encode([rendered], special=False)[0]

    @cached_property
    def _added(self) -> re.Pattern[str] | None:
        """Matches the tokens that were added to the vocabulary."""
        texts = sorted((token.content for token in self._text.tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(at for at, token in self._text.tokenizer.added_tokens_decoder.items() if token.special)


def _said(messages: Sequence[Message], options: Options) -> tuple[Message, ...]:
    """The messages, of which the last may be a beginning."""
    if options.continues:
        return (*messages[:-1], {**messages[-1], "prefix": True})
    return tuple(messages) or (NOTHING,)


def _marked(turn: Message, mark: str) -> Message:
    """The turn with the mark as the last text that a template can write of it."""
    calls = [dict(call) for call in turn.get("tool_calls") or ()]
    if not calls:
        return {"role": "assistant", "content": mark}
    function = {**calls[-1].get("function", {}), "arguments": {"value": mark}}
    return {"role": "assistant", "content": mark, "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}


def _after(rendered: str, mark: str) -> str | None:
    _, found, rest = rendered.rpartition(mark)
    return rest if found else None


def _arguments(message: Message, convert: Any) -> Message:
    """The message with the arguments of its tool calls converted, where they have the other
    form."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    takes = str if convert is json.loads else Mapping
    converted: list[Any] = []
    for call in calls:
        function = dict(call.get("function", {}))
        if isinstance(arguments := function.get("arguments"), takes):
            with contextlib.suppress(ValueError):  # a text that is not JSON stays
                function["arguments"] = convert(arguments)
        converted.append({**call, "function": function})
    return {**message, "tool_calls": converted}
