"""The tokens of a sample that a server streams. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_workers.engines.base import VersionSpan


@dataclass(slots=True)
class Parts:
    """The tokens of a sample so far. spans: (version, start, end) of SGLang, whose versions are
    text. top: pairs of ids and logprobs per token, best first."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    cached: int = 0
    finish: Mapping[str, Any] | None = None

    def add(self, chunk: Mapping[str, Any]) -> int:
        """Append a chunk, whose ids and logprobs are new and whose spans are of the whole stream.
        Returns the number of new tokens.

        A chunk of an abort repeats the last id without a logprob, so the logprobs decide.
        """
        meta = chunk["meta_info"]
        pairs: Sequence[Sequence[Any]] = meta.get("output_token_logprobs") or ()
        if meta.get("completion_tokens", 0) <= len(self.ids):
            pairs = ()
        self.ids += [pair[1] for pair in pairs]
        self.logprobs += [pair[0] for pair in pairs]
        if pairs:
            for row in meta.get("output_top_logprobs") or ():
                self.top.append(([pair[1] for pair in row or ()], [pair[0] for pair in row or ()]))
        if meta.get("weight_versions"):
            self.spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
        self.cached = max(self.cached, meta.get("cached_tokens") or 0)
        self.finish = meta.get("finish_reason") or self.finish
        return len(pairs)

    def cut(self, count: int) -> None:
        """Keep the first ``count`` tokens."""
        del self.ids[count:], self.logprobs[count:], self.top[count:]

    def version_spans(self, version: int) -> tuple[VersionSpan, ...]:
        """The spans of exactly these tokens. version: of tokens after the last reported span."""
        found: list[VersionSpan] = []
        count = len(self.ids)
        for name, start, end in [*self.spans, (str(version), self.spans[-1][2] if self.spans else 0, count)]:
            start, end = max(start, found[-1].end if found else 0), min(end, count)
            if end <= start:
                continue
            if found and found[-1].version == int(name):
                found[-1] = VersionSpan(int(name), found[-1].start, end)
            else:
                found.append(VersionSpan(int(name), start, end))
        return tuple(found)
