"""The text of sampled tokens for a parser, while they arrive: with the special tokens that are
markers of calls and reasoning, and without the stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from rollout_workers.chat.scan import first, partial
from rollout_workers.data.prompts import Text


class MarkedText:
    """The growing text of one completion."""

    def __init__(self, text: Text, markers: Collection[str], stop: Sequence[str]) -> None:
        """markers: special tokens that are kept. stop: the stop strings of the request."""
        self._tokens, self._markers, self._stop = text, markers, stop
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._first = True

    def push(self, ids: NDArray[np.int32]) -> str:
        """The text of these tokens (int32[T]), and earlier text that can't begin a stop string any
        more."""
        for at, data in zip(ids.tolist(), self._tokens.token_bytes(ids), strict=True):
            special = self._tokens.special.get(at)
            if special is not None:
                self._held += self._utf8.decode(b"", final=True) + (special if special in self._markers else "")
                continue
            piece = self._utf8.decode(data)
            if self._first and piece:
                self._first = False
                piece = piece.removeprefix(" ") if self._tokens.leads_with_space else piece
            self._held += piece
        at, _ = first(self._held, self._stop)
        end = at if at >= 0 else len(self._held) - partial(self._held, self._stop)
        settled, self._held = self._held[:end], self._held[end:]
        return settled

    def finish(self, stopped: bool) -> str:
        """The rest of the text. stopped: whether the completion ended by itself, so that a stop
        string in the rest has ended it."""
        rest, self._held = self._held + self._utf8.decode(b"", final=True), ""
        at, _ = first(rest, self._stop)
        return rest[:at] if stopped and at >= 0 else rest
