"""A session: a tree of token segments that grows by turns.

    session = Session("ses-1", ChatTemplate(text))
    prompt = session.prompt([{"role": "user", "content": "What is 2+2?"}])
    output = ...  # the engine samples after prompt.token_ids
    session.append(prompt, Sampled.of(output))
    prompt = session.prompt([..., {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3+3?"}])

The second prompt starts with the tokens of the first prompt and of the sampled turn. Messages only
find the path; its tokens are never made from text again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from blake3 import blake3

from rollout.errors import RolloutError
from rollout.session.v1 import session_pb2 as pb
from rollout.trajectory.v1.trajectory_pb2 import TrajectoryPath
from rollout_workers.data.prompts import PromptInvalid
from rollout_workers.engines.base import SamplingParams
from rollout_workers.sessions.forks import fork_reason
from rollout_workers.sessions.messages import Canonical, Message, assistant_message, canonical
from rollout_workers.sessions.segment import Fork, Ids, InvalidSegment, Sampled, Segment
from rollout_workers.sessions.template import DEFAULT, NOTHING, Options, Piece, Renderer, Tools

_ROLES = {"system": pb.ROLE_SYSTEM, "developer": pb.ROLE_SYSTEM, "user": pb.ROLE_USER, "tool": pb.ROLE_TOOL}


class UnknownSegment(RolloutError):
    """No segment of the session has this id."""

    reason: ClassVar[str] = "SEGMENT_NOT_FOUND"


class SegmentConflict(RolloutError):
    """Another turn has this id already."""

    reason: ClassVar[str] = "SEGMENT_CONFLICT"


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The prompt of the next turn. Making one does not change the session.

    parent: the segment that it continues; empty for a new root. pieces: the new tokens after it.
    token_ids int32[T]: the whole prompt; the first ``known`` are those of the path. fork: why the
    path of the parent is left; ``FORK_REASON_UNSPECIFIED`` if it is extended.
    """

    session_id: str
    parent: str
    pieces: tuple[Piece, ...]
    token_ids: Ids
    fork: Fork = pb.FORK_REASON_UNSPECIFIED
    tools: Tools = ()

    @property
    def known(self) -> int:
        """Tokens that the session has already."""
        return len(self.token_ids) - sum(len(piece.token_ids) for piece in self.pieces)

    def params(self, of_run: SamplingParams, max_model_len: int) -> SamplingParams:
        """Parameters for this turn: those of the run with the tokens that the context has left."""
        return replace(of_run, max_tokens=max(1, min(of_run.max_tokens, max_model_len - len(self.token_ids))))


@dataclass(slots=True, eq=False)
class _Node:
    """A segment in the tree. messages: what it says, comparable; None if it is not a chat."""

    segment: Segment | None  # None: above the roots
    order: int = -1
    messages: tuple[Canonical, ...] | None = None
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)

    @property
    def sampled(self) -> bool:
        return self.segment is not None and self.segment.sampled

    def path(self) -> list[_Node]:
        """From the root to this node."""
        nodes: list[_Node] = []
        node: _Node | None = self
        while node is not None and node.segment is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def newest(self) -> _Node:
        """The leaf below it that was reached last."""
        newest, stack = self, list(self.children)
        while stack:
            node = stack.pop()
            newest = max(newest, node, key=lambda each: each.order)
            stack.extend(node.children)
        return newest

    def turn_before(self, at: int) -> tuple[_Node, int]:
        """The nearest sampled segment at or above, or the top, and how many of the ``at`` messages
        of the path end there."""
        node = self
        while node.parent is not None and not node.sampled:
            at -= len(node.messages or ())
            node = node.parent
        return node, at


class Session:
    """The tree of one session. Not for several threads at once. tokens: of all segments."""

    def __init__(self, session_id: str, renderer: Renderer, segments: Iterable[Segment] = ()) -> None:
        """segments: of an earlier process, parents first. Raises ``InvalidSegment``."""
        self.session_id = session_id
        self._renderer = renderer
        self._top = _Node(None)
        self._nodes: dict[str, _Node] = {}
        self.tokens = 0
        for segment in segments:
            self.restore(segment)

    @classmethod
    def from_proto(cls, renderer: Renderer, messages: Sequence[pb.Segment]) -> Session:
        """The session of stored segments. Raises ``InvalidSegment``."""
        if not messages:
            raise InvalidSegment("a session needs at least one segment to be restored")
        return cls(messages[0].session_id, renderer, map(Segment.from_proto, messages))

    def to_proto(self) -> list[pb.Segment]:
        """Every segment, in the order in which they were appended."""
        return [segment.to_proto() for segment in self.segments]

    @property
    def segments(self) -> list[Segment]:
        """In the order in which they were appended: parents first."""
        return [node.segment for node in self._nodes.values() if node.segment is not None]

    @property
    def count(self) -> int:
        """Number of segments."""
        return len(self._nodes)

    def leaves(self) -> list[str]:
        """The sampled segments that nothing was sampled after, oldest first."""
        inner: set[int] = set()
        for node in self._nodes.values():
            if node.sampled:
                inner.update(id(above) for above in node.path()[:-1])
        return [name for name, node in self._nodes.items() if node.sampled and id(node) not in inner]

    def path(self, segment_id: str) -> list[Segment]:
        """From the root to the segment. Raises ``UnknownSegment``."""
        return [node.segment for node in self._node(segment_id).path() if node.segment is not None]

    def trajectory_path(self, leaf: str) -> TrajectoryPath:
        """The path of a trajectory."""
        return TrajectoryPath(session_id=self.session_id, segment_ids=[s.segment_id for s in self.path(leaf)])

    def token_ids(self, segment_id: str) -> Ids:
        """int32[T]: the tokens from the root to the end of the segment."""
        return _joined([s.token_ids for s in self.path(segment_id)])

    def restore(self, segment: Segment) -> None:
        """Add a segment of another process, after its parent. Raises ``InvalidSegment``,
        ``SegmentConflict``."""
        parent = self._nodes.get(segment.parent) if segment.parent else self._top
        problem = ""
        if segment.session_id != self.session_id:
            problem = f"belongs to session {segment.session_id}, not {self.session_id}"
        elif parent is None:
            problem = f"comes before its parent {segment.parent}"
        if problem or parent is None:
            raise InvalidSegment(f"segment {segment.segment_id} {problem}", fix="restore segments in the order of their append")
        if (known := self._nodes.get(segment.segment_id)) is not None:
            if known.segment is None or not known.segment.same(segment):
                raise SegmentConflict(f"segment {segment.segment_id} is stored twice, with different contents")
            return
        self._add(segment, parent)

    # Prompts

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = (),
        parent: str = "",
        reason: Fork = pb.FORK_REASON_UNSPECIFIED,
        options: Options = DEFAULT,
    ) -> Prompt:
        """The prompt after a whole history.

        The history continues the path that says the longest beginning of it; of several, the one
        that was sampled last, or the one through the segment ``parent``. A history that leaves
        every path is a fork, whose reason is ``reason`` or found by comparison. options: of the
        rendering of what is new; earlier messages keep their tokens. Raises ``PromptInvalid``,
        ``UnknownSegment``.
        """
        if not messages:
            raise PromptInvalid("the history has no messages", fix="send at least one")
        said = [canonical(message) for message in (messages[:-1] if options.continues else messages)]
        through = {id(node) for node in self._node(parent).path()} if parent else set[int]()
        node, matched = self._match(said, tools, through)

        def why() -> Fork:
            known = [message for above in node.newest().path() for message in above.messages or ()]
            return reason or fork_reason(known, said, matched)

        turn, start = node.turn_before(matched)
        try:
            pieces = self._render(turn, messages[start:], tools, options)
        except PromptInvalid:
            if turn.segment is None:
                raise
            pieces = self._render(self._top, messages, tools, options)
            return self._continue(self._top, pieces, tools, lambda: reason or pb.FORK_REASON_RETOKENIZED)
        return self._continue(turn, pieces, tools, why)

    def extend(self, parent: str, messages: Sequence[Message], *, tools: Tools = (), options: Options = DEFAULT) -> Prompt:
        """The prompt after the sampled segment ``parent`` and new messages. Raises
        ``PromptInvalid``, ``UnknownSegment``."""
        node = self._node(parent)
        if not node.sampled or not messages:
            raise PromptInvalid(
                f"segment {parent} can't be extended by {len(messages)} messages",
                fix="extend a segment of the assistant by at least one message",
            )
        return self._continue(node, self._render(node, messages, tools, options), tools, lambda: pb.FORK_REASON_HISTORY_EDITED)

    def prompt_tokens(self, token_ids: Ids) -> Prompt:
        """The prompt of a client that sends tokens: the longest path that they start with, and the
        rest as one piece, which histories of messages do not find."""
        best, used = self._top, 0
        stack = [(self._top, 0)]
        while stack:
            node, at = stack.pop()
            if (at, node.order) > (used, best.order):
                best, used = node, at
            for child in node.children:
                ids = _ids(child)
                if np.array_equal(token_ids[at : at + len(ids)], ids):
                    stack.append((child, at + len(ids)))
        rest = np.asarray(token_ids[used:], np.int32)

        def why() -> Fork:
            known = self._renderer.text(_joined([_ids(node) for node in best.newest().path()]))
            same = bool(known) and self._renderer.text(token_ids).startswith(known)
            return pb.FORK_REASON_RETOKENIZED if same else pb.FORK_REASON_HISTORY_EDITED

        return self._continue(best, [Piece((), rest)] if len(rest) else [], (), why)

    # Turns

    def append(self, prompt: Prompt, sampled: Sampled, *, segment_id: str = "") -> list[Segment]:
        """Add the prompt's new segments and the sampled turn, and return those that are new, in
        order. The last is the turn.

        segment_id: of the turn; empty: made from its path and tokens, like the ids of the prompt's
        segments, so that two processes that append the same segment give it the same id. A second
        append of the same turn under the same id returns that turn alone and changes nothing.
        Raises ``SegmentConflict`` if the id belongs to a different segment.
        """
        if segment_id and (known := self._nodes.get(segment_id)) is not None:
            return [self._duplicate(known, prompt, sampled)]
        node = self._node(prompt.parent) if prompt.parent else self._top
        node, pieces = _descend(node, prompt.pieces)
        new: list[Segment] = []
        fork = prompt.fork or pb.FORK_REASON_HISTORY_EDITED
        for piece in pieces:
            segment = self._context(node, piece, fork, prompt.tools)
            node = self._add(segment, node)
            new.append(segment)
        ids = np.asarray(sampled.token_ids, np.int32)
        message = assistant_message(self._renderer.text(ids)) if sampled.message is None else sampled.message
        turn = Segment(
            segment_id or self._free(node, pb.ROLE_ASSISTANT, ids),
            self.session_id,
            _name(node),
            pb.FORK_REASON_RESAMPLED if node.children else pb.FORK_REASON_UNSPECIFIED,
            pb.ROLE_ASSISTANT,
            ids,
            np.full(len(sampled.token_ids), sampled.trained, np.uint8),
            np.asarray(sampled.logprobs, np.float32),
            sampled.raw_logprobs,
            tuple(sampled.version_spans),
            () if node.messages is None else (message,),
        )
        self._add(turn, node)
        return [*new, turn]

    # Inside

    def _duplicate(self, known: _Node, prompt: Prompt, sampled: Sampled) -> Segment:
        segment = known.segment
        assert segment is not None
        same = (
            segment.sampled
            and np.array_equal(segment.token_ids, sampled.token_ids)
            and np.array_equal(self.token_ids(segment.segment_id)[: -len(segment.token_ids) or None], prompt.token_ids)
        )
        if not same:
            raise SegmentConflict(
                f"segment {segment.segment_id} exists with {len(segment.token_ids)} other tokens", fix="use another id"
            )
        return segment

    def _context(self, node: _Node, piece: Piece, fork: Fork, tools: Tools) -> Segment:
        role = _ROLES.get(str(piece.messages[-1].get("role")), pb.ROLE_USER) if piece.messages else pb.ROLE_USER
        return Segment(
            self._free(node, role, piece.token_ids),
            self.session_id,
            _name(node),
            fork if node.children else pb.FORK_REASON_UNSPECIFIED,
            role,
            piece.token_ids,
            np.zeros(len(piece.token_ids), np.uint8),
            messages=piece.messages,
            tools=_key(tools) if node is self._top else "",
        )

    def _add(self, segment: Segment, parent: _Node) -> _Node:
        said = tuple(canonical(message) for message in segment.messages if not message.get("prefix"))
        node = _Node(segment, len(self._nodes), said if segment.messages else None, parent=parent)
        self._nodes[segment.segment_id] = node
        parent.children.append(node)
        self.tokens += len(segment.token_ids)
        return node

    def _render(self, turn: _Node, messages: Sequence[Message], tools: Tools, options: Options) -> list[Piece]:
        if turn.segment is None:
            return self._renderer.begin(messages, tools, options)
        ids = turn.segment.token_ids
        said = turn.segment.messages[0] if turn.segment.messages else assistant_message(self._renderer.text(ids))
        return [self._renderer.bridge(said, ids, messages, tools, options)]

    def _continue(self, node: _Node, pieces: Sequence[Piece], tools: Tools, why: Callable[[], Fork]) -> Prompt:
        """The prompt after a node and pieces, of which the tree may have some. why: called if the
        prompt leaves the path."""
        node, left = _descend(node, pieces)
        ids = _joined([*(_ids(above) for above in node.path()), *(piece.token_ids for piece in left)])
        fork = pb.FORK_REASON_UNSPECIFIED
        if node.children:
            fork = why() if left else pb.FORK_REASON_RESAMPLED
        return Prompt(self.session_id, _name(node), tuple(left), ids, fork, tools)

    def _match(self, said: Sequence[Canonical], tools: Tools, through: set[int]) -> tuple[_Node, int]:
        """The node whose path says the longest beginning of ``said``, and how many messages it
        says. Each node is visited once."""
        best, most, key = self._top, 0, _key(tools)
        stack = [(self._top, 0)]
        while stack:
            node, at = stack.pop()
            if (id(node) in through, at, node.order) > (id(best) in through, most, best.order):
                best, most = node, at
            for child in node.children:
                assert child.segment is not None
                if child.messages is None or (node is self._top and child.segment.tools != key):
                    continue
                end = at + len(child.messages)
                if tuple(said[at:end]) == child.messages:
                    stack.append((child, end))
        return best, most

    def _node(self, segment_id: str) -> _Node:
        node = self._nodes.get(segment_id)
        if node is None:
            raise UnknownSegment(f"session {self.session_id} has no segment {segment_id!r}", fix="use an id of its segments")
        return node

    def _free(self, parent: _Node, role: pb.Role.ValueType, token_ids: Ids) -> str:
        """An id that depends on the path, the role, and the tokens; also on the number of turns if
        the same one was sampled before."""
        said = _name(parent).encode() + bytes([role]) + token_ids.astype("<i4").tobytes()
        name = f"seg-{blake3(said).hexdigest(16)}"
        again = 1
        while name in self._nodes:
            again += 1
            name = f"seg-{blake3(said + str(again).encode()).hexdigest(16)}"
        return name


def _descend(node: _Node, pieces: Sequence[Piece]) -> tuple[_Node, list[Piece]]:
    """Follow the segments whose tokens are a beginning of the pieces' tokens; the deepest node, and
    the pieces after it."""
    left = list(pieces)
    while left:
        ids = left[0].token_ids
        found = [c for c in node.children if not c.sampled and len(_ids(c)) and np.array_equal(_ids(c), ids[: len(_ids(c))])]
        if not found:
            break
        node = max(found, key=lambda child: len(_ids(child)))
        said = len(node.messages or ())
        size = len(_ids(node))
        if size == len(ids):
            left.pop(0)
        else:
            messages = left[0].messages
            left[0] = Piece(messages[said:] or (NOTHING,) if messages else (), ids[size:])
    return node, left


def _ids(node: _Node) -> Ids:
    assert node.segment is not None
    return node.segment.token_ids


def _key(tools: Tools) -> str:
    return json.dumps(list(tools), sort_keys=True) if tools else ""


def _name(node: _Node) -> str:
    return "" if node.segment is None else node.segment.segment_id


def _joined(arrays: Sequence[Ids]) -> Ids:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
