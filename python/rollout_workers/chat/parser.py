"""Parses the text of a completion into the message of the assistant while it grows.

However the text is divided into pieces, the additions concatenate to the same message. A call is
added when it is complete. Text that looks like a call and is none stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollout_workers.chat.calls import Call, Form, Region, Schemas
from rollout_workers.chat.scan import first, partial


@dataclass(slots=True)
class Delta:
    """What a piece of text adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Parser(Protocol):
    """Parses one completion."""

    def feed(self, text: str) -> Delta:
        """Add text."""
        ...

    def finish(self) -> Delta:
        """What is left when the completion has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tags around the reasoning of a family."""

    opening: str
    closing: str

    def opened_by(self, prompt: str, continues: bool = False) -> bool:
        """Whether a prompt ends inside of the reasoning. continues: whether the prompt has a
        beginning of the message."""
        _, found, rest = prompt.rpartition(self.opening)
        return bool(found) and (self.closing not in rest if continues else not rest.strip())


class TagParser:
    """Reasoning between tags, then text and calls. Whitespace next to reasoning and calls is left
    out."""

    def __init__(self, thinking: Thinking | None, forms: Sequence[Form], schemas: Schemas, *, reasoning: bool = False) -> None:
        """thinking, forms: what is parsed. reasoning: whether the prompt began the reasoning."""
        self._thinking, self._forms, self._schemas = thinking, forms, schemas
        self._anywhere = [form.opening for form in forms if not form.bare]
        self._text = ""
        self._spaces = ""  # whitespace after text, which a call drops
        self._begun = False  # whether there was text
        self._called = False
        self._region: Region | None = None
        self._opening = ""
        self._step: Callable[[Delta, bool], bool] = self._reason if reasoning and thinking else self._start

    def feed(self, text: str) -> Delta:
        self._text += text
        return self._run(final=False)

    def finish(self) -> Delta:
        return self._run(final=True)

    def _run(self, final: bool) -> Delta:
        delta = Delta()
        while self._step(delta, final):
            pass
        return delta

    # Each step takes text, and returns whether another one may take more.

    def _start(self, delta: Delta, final: bool) -> bool:
        """Before text and calls: the reasoning may open here."""
        rest = self._text.lstrip()
        opening = self._thinking.opening if self._thinking else ""
        if opening and rest.startswith(opening):
            self._text, self._step = rest[len(opening) :], self._reason
        elif not final and (not rest or opening.startswith(rest)):
            return False
        else:
            self._step = self._say
        return True

    def _reason(self, delta: Delta, final: bool) -> bool:
        assert self._thinking is not None
        closing = self._thinking.closing
        if not self._begun:
            self._text = self._text.lstrip()
        inside, found, rest = self._text.partition(closing)
        if not found and not final:
            held = partial(inside, [closing])
            inside, rest = inside[: len(inside) - held], inside[len(inside) - held :]
        kept = inside.rstrip() if found or not final else inside
        if kept:
            delta.reasoning += self._spaces + kept
            self._spaces, self._begun = inside[len(kept) :], True
        elif self._begun:
            self._spaces += inside
        self._text = rest
        if found:
            self._spaces, self._begun, self._step = "", False, self._after_reasoning
        elif final and self._spaces:
            delta.reasoning, self._spaces = delta.reasoning + self._spaces, ""
        return bool(found)

    def _after_reasoning(self, delta: Delta, final: bool) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._step = self._say
        return True

    def _say(self, delta: Delta, final: bool) -> bool:
        if not self._begun and (form := self._bare()):
            return self._open(form)
        if not self._begun and self._called and not final and self._text.strip() == ";":
            return False  # another bare call may follow
        at, marker = first(self._text, self._anywhere)
        if at >= 0:
            self._emit(delta, self._take(at))
            return self._open(next(form for form in self._forms if form.opening == marker))
        waits = 0 if final else partial(self._text, self._anywhere)
        self._emit(delta, self._take(len(self._text) - waits))
        if final and self._spaces:
            delta.content += "" if self._called else self._spaces
            self._spaces = ""
        return False

    def _bare(self) -> Form | None:
        """The form of a call that starts the message, or follows another one."""
        rest = self._text.lstrip()
        if self._called and re.match(r";\s*\{", rest):
            rest = rest[1:].lstrip()
        form = next((form for form in self._forms if form.bare and rest.startswith(form.opening)), None)
        if form is not None:
            self._spaces += self._text[: len(self._text) - len(rest)]
            self._text = rest
        return form

    def _open(self, form: Form) -> bool:
        self._region, self._opening, self._step = form.make(self._schemas), form.opening, self._call
        return True

    def _call(self, delta: Delta, final: bool) -> bool:
        assert self._region is not None
        closed = self._region.take(self._text, final)
        if closed is None:
            return False
        self._region, self._step = None, self._say
        if closed.calls:
            delta.calls.extend(closed.calls)
            self._text, self._spaces, self._called = self._text[closed.size :], "", True
        else:
            self._emit(delta, self._take(len(self._opening)))
        return True

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        return taken

    def _emit(self, delta: Delta, text: str) -> None:
        """Add text, except whitespace at its end, which waits for what follows."""
        kept = text.rstrip()
        if kept:
            delta.content += self._spaces + kept
            self._spaces, self._begun = text[len(kept) :], True
        else:
            self._spaces += text
