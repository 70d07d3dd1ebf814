"""The sessions that a worker has from earlier requests."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from rollout.inference.v1 import inference_pb2 as pb
from rollout_workers.sessions.segment import Sampled, Segment
from rollout_workers.sessions.session import Prompt, Session
from rollout_workers.sessions.template import Renderer
from rollout_workers.worker.status import EdgeError

_MOST_TOKENS = 8 << 20
_LONG_CHARACTERS = 16 << 10  # longer prompts are rendered in a thread


class SegmentsMissing(EdgeError):
    """The worker does not have the segments that the request says it has."""

    reason: ClassVar[str] = "SESSION_SEGMENTS_MISSING"


class _Entry:
    """A session. certain: how many of its segments are in the order of the caller; None: all. The
    order of later ones depends on which of several concurrent requests the caller stored first."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lock = asyncio.Lock()
        self.certain: int | None = None
        self.tokens = 0

    @property
    def known(self) -> int:
        """Number of segments whose order is certain."""
        return self.session.count if self.certain is None else self.certain


class SessionCache:
    """Sessions by id, the least recently used of which are dropped. Belongs to one event loop."""

    def __init__(self, renderer: Renderer, most_tokens: int = _MOST_TOKENS) -> None:
        """most_tokens: of all segments together."""
        self._renderer, self._most = renderer, most_tokens
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._open: dict[str, set[OpenSession]] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def open(self, state: pb.SessionState) -> Iterator[OpenSession]:
        """The session for one request, with exactly the segments that the caller has stored. Raises
        ``SegmentsMissing``, ``InvalidSegment``."""
        name, segments = state.session_id, [Segment.from_proto(segment) for segment in state.segments]
        entry = self._entries.get(name)
        if state.known and (entry is None or entry.known < state.known):
            has = entry.known if entry else 0
            raise SegmentsMissing(
                f"the worker has {has} segments of session {name}, and not {state.known}",
                fix="repeat the request with `known` 0 and all segments",
                metadata={"session": name, "known": str(state.known), "segments": str(has)},
            )
        more = entry is not None and entry.session.count > state.known
        if entry is None or more or not state.known or (segments and entry.lock.locked()):
            kept = entry.session.segments[: state.known] if entry else []
            self._drop(name)  # open requests keep their copy
            entry = self._entries[name] = _Entry(Session(name, self._renderer, kept))
        for segment in segments:
            entry.session.restore(segment)
        self._entries.move_to_end(name)
        self.count(entry)
        opened = OpenSession(self, entry, overlaps=more)
        others = self._open.setdefault(name, set())
        others.add(opened)
        if len(others) > 1:
            for other in others:
                other.overlaps = True
        try:
            yield opened
        finally:
            others.discard(opened)
            if not others and self._open.get(name) is others:
                del self._open[name]

    def count(self, entry: _Entry) -> None:
        """Count the tokens of a session again, and drop the oldest others if there are too many."""
        if self._entries.get(entry.session.session_id) is not entry:
            return
        self._tokens += entry.session.tokens - entry.tokens
        entry.tokens = entry.session.tokens
        while self._tokens > self._most and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def _drop(self, name: str) -> None:
        if (entry := self._entries.pop(name, None)) is not None:
            self._tokens -= entry.tokens


class OpenSession:
    """A session for one request. overlaps: whether another request may grow it in the meantime."""

    def __init__(self, cache: SessionCache, entry: _Entry, overlaps: bool) -> None:
        self.overlaps = overlaps
        self._cache, self._entry, self._start = cache, entry, entry.session.count
        self._stored = {segment.segment_id for segment in entry.session.segments}

    async def prompt(self, make: Callable[[Session], Prompt], characters: int) -> Prompt:
        """The prompt that ``make`` finds. characters: size of the messages."""
        async with self._entry.lock:
            session = self._entry.session
            return await asyncio.to_thread(make, session) if characters > _LONG_CHARACTERS else make(session)

    async def append(self, prompt: Prompt, sampled: Sampled) -> list[Segment]:
        """Add a completion, and return the segments of its path that the caller does not have. The
        last is the completion."""
        async with self._entry.lock:
            session = self._entry.session
            turn = session.append(prompt, sampled)[-1]
        if self.overlaps:
            self._entry.certain = min(self._start, self._entry.known)
        new = [segment for segment in session.path(turn.segment_id) if segment.segment_id not in self._stored]
        self._stored.update(segment.segment_id for segment in new)
        self._cache.count(self._entry)
        return new
