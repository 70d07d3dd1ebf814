"""Converts token ids to text, one token at a time. It returns whole characters only and finds stop
strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_BROKEN = "\ufffd"
_WINDOW = 64  # after so many undecodable tokens, they become text as they are


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that an engine uses."""

    def batch_decode(
        self,
        sequences: list[list[int]],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]: ...


class SampleText:
    """The growing text of one sample.

    A token can't be decoded alone, because a character may span tokens and a leading space may be
    dropped. So a window is decoded: the tokens since ``_prefix``, of which those up to ``_read``
    are already in the text. A text that ends with U+FFFD may still become a character, so its last
    tokens wait.
    """

    def __init__(self, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        """``stop`` strings are searched in the text of the tokens after ``min_tokens``."""
        self.text = ""
        self.sent = self.start = 0
        self.matched: str | None = None
        self._stop = stop
        self._min_tokens = min_tokens
        self._longest = max(map(len, stop), default=0)
        self._ids: list[int] = []
        self._prefix = self._read = 0

    def push(self, token: int) -> None:
        """Add a sampled token; ``advance`` then decodes it."""
        self._ids.append(token)

    def settled_text(self) -> str:
        """The new text since the last call, except an end that may be the beginning of a stop
        string."""
        end = len(self.text) if self.matched else len(self.text) - self._held_back()
        piece, self.sent = self.text[self.sent : end], max(self.sent, end)
        return piece

    def remaining_text(self) -> str:
        """The text that ``settled_text`` did not return. Call it once, when the sample has
        ended."""
        piece, self.sent = self.text[self.sent :], len(self.text)
        return piece

    def _windows(self) -> tuple[list[int], list[int]]:
        return self._ids[self._prefix : self._read], self._ids[self._prefix :]

    def _take(self, before: str, now: str, final: bool) -> None:
        waits = now.endswith(_BROKEN) and len(self._ids) - self._read < _WINDOW
        if self.matched or len(now) <= len(before) or (waits and not final):
            return
        known = len(self.text)
        self.text += now[len(before) :]
        self._prefix, self._read = self._read, len(self._ids)
        if self._read <= self._min_tokens:
            return
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, max(0, known - len(stop) + 1))) >= 0]
        if found:
            at, self.matched = min(found)
            self.text = self.text[:at]

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0


def continued(stop: tuple[str, ...], min_tokens: int, tokens: Sequence[int], tokenizer: Tokenizer) -> SampleText:
    """The text of a sample that has ``tokens`` already. It counts as sent as far as a stream would
    have sent it."""
    text = SampleText(stop, min_tokens)
    for token in tokens:
        text.push(token)
        advance([text], tokenizer)
        text.settled_text()
    text.start = text.sent
    return text


def advance(texts: Sequence[SampleText], tokenizer: Tokenizer, final: bool = False) -> None:
    """Decode the pushed tokens of all ``texts`` in one call. ``final`` also accepts an incomplete
    character."""
    windows = [window for text in texts for window in text._windows()]
    decoded = tokenizer.batch_decode(windows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for i, text in enumerate(texts):
        text._take(decoded[2 * i], decoded[2 * i + 1], final)
