"""Finds the ends of values and the beginnings of markers in text that is still growing."""

from __future__ import annotations

import re
from collections.abc import Sequence

_OPEN, _CLOSE = "{[(", "}])"


class Brackets:
    """Finds where a value in brackets ends, such as a JSON object. Each character is read once."""

    def __init__(self, start: int, quotes: str = '"') -> None:
        """start: index of the first bracket in the text. quotes: characters that delimit
        strings."""
        self._at, self._depth, self._quote = start, 0, ""
        self._end: int | None = None
        self._signs = re.compile(f"[{re.escape(_OPEN + _CLOSE + quotes)}\\\\]")
        self._quotes = quotes

    def end(self, text: str) -> int | None:
        """The index after the value; None while it is incomplete. text: the text so far, which may
        only have grown since the last call."""
        while self._end is None and (found := self._signs.search(text, self._at)) is not None:
            sign, self._at = found.group(), found.end()
            if sign == "\\":
                if self._quote:
                    if self._at == len(text):  # the escaped character is still missing
                        self._at -= 1
                        return None
                    self._at += 1
            elif self._quote:
                if sign == self._quote:
                    self._quote = ""
            elif sign in self._quotes:
                self._quote = sign
            elif sign in _OPEN:
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self._end = self._at
        self._at = max(self._at, len(text))
        return self._end


def first(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str]:
    """Where the first of the markers is, and which; the longest of several at one place. (-1, "")
    without any."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    if not found:
        return -1, ""
    at, _, marker = min(found)
    return at, marker


def partial(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of the text that begins one of the markers."""
    longest = max(map(len, markers), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        end = text[-size:]
        if any(len(marker) > size and marker.startswith(end) for marker in markers):
            return size
    return 0
