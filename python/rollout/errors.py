"""Errors with machine-readable reasons, the same in Go and Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the user's files: ``reward.py:12:5``."""

    file: str  # absolute if the error was raised by running the file
    line: int = 0  # from 1; 0: the whole file
    column: int = 0  # in characters, from 1; 0: the whole line
    text: str = ""  # the line, without its end

    def __str__(self) -> str:
        parts = [self.file, *(str(n) for n in (self.line, self.column) if n)]
        return ":".join(parts)


class RolloutError(Exception):
    """Base of every error with a reason. ``str`` is place, message, and fix in one line."""

    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, fix: str = "", place: Place | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.place = place

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text}; {self.fix}" if self.fix else text
