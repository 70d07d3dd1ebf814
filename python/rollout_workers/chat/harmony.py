"""Parses the channels of gpt-oss: ``analysis`` is reasoning, ``final`` is text, and messages to
``functions.NAME`` are calls.

The library openai-harmony parses token ids of its own vocabulary, which it downloads. This parser
reads text of any tokenizer.
"""

from __future__ import annotations

import re

from rollout_workers.chat.calls import Call
from rollout_workers.chat.parser import Delta
from rollout_workers.chat.scan import first, partial

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
MARKERS = (CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class HarmonyParser:
    """Parses one completion of gpt-oss."""

    def __init__(self, prompt: str, *, calls: bool) -> None:
        """prompt: its end, which may have begun a message. calls: whether messages to functions are
        calls."""
        self._calls = calls
        self._text = self._channel = self._recipient = self._arguments = ""
        _, started, header = prompt.rpartition(START)
        head, opened, _ = header.partition(MESSAGE)
        self._inside = bool(opened) or not started
        if opened:
            self._begin(head)
        elif CHANNEL in head:
            self._text = head

    def feed(self, text: str) -> Delta:
        self._text += text
        return self._run(final=False)

    def finish(self) -> Delta:
        delta = self._run(final=True)
        self._end(delta)
        return delta

    def _run(self, final: bool) -> Delta:
        delta = Delta()
        while self._body(delta, final) if self._inside else self._header(delta, final):
            pass
        return delta

    def _header(self, delta: Delta, final: bool) -> bool:
        head, found, rest = self._text.partition(MESSAGE)
        if found:
            self._begin(head)
            self._text, self._inside = rest, True
            return True
        if final or not self._may_be_header():
            self._inside = bool(self._text)  # the model wrote text without a header
            return self._inside
        return False

    def _may_be_header(self) -> bool:
        text = self._text.removeprefix(START).lstrip()
        known = (CHANNEL, "assistant", "to=")
        return not text or any(text.startswith(marker) or marker.startswith(text) for marker in known)

    def _begin(self, head: str) -> None:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._channel = channel.group(1) if channel else ""
        self._recipient = recipient.group(1) if recipient and self._calls else ""

    def _body(self, delta: Delta, final: bool) -> bool:
        at, marker = first(self._text, _ENDS)
        held = 0 if final or at >= 0 else partial(self._text, _ENDS)
        text = self._text[: at if at >= 0 else len(self._text) - held]
        if self._recipient:
            self._arguments += text
        elif self._channel == "analysis":
            delta.reasoning += text
        else:
            delta.content += text
        self._text = self._text[len(text) :]
        if at < 0:
            return False
        self._end(delta)
        self._text = self._text[len(marker) :] if marker != START else self._text
        self._inside, self._channel = False, ""
        return True

    def _end(self, delta: Delta) -> None:
        if self._recipient:
            delta.calls.append(Call(self._recipient, self._arguments.strip()))
            self._recipient, self._arguments = "", ""
