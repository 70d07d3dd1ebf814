"""Writes the message of one completion while its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rollout.inference.v1 import inference_pb2 as pb
from rollout_workers.chat.calls import Call
from rollout_workers.chat.decode import MarkedText
from rollout_workers.chat.families import ParserChoice
from rollout_workers.chat.parser import Delta
from rollout_workers.chat.requests import ChatRequest, assistant
from rollout_workers.data.prompts import Text
from rollout_workers.sessions.messages import Message

_TAIL = 64  # tokens of a prompt that show whether it began the reasoning


class MessageWriter:
    """Parses the tokens of a completion. The additions concatenate to the message."""

    def __init__(
        self,
        text: Text,
        choice: ParserChoice,
        chat: ChatRequest,
        prompt: NDArray[np.int32],
        stop: tuple[str, ...],
        call_id: Callable[[int], str],
    ) -> None:
        """prompt: token ids. stop: stop strings. call_id: id of a call by its index."""
        continues = chat.options.continues
        tail = text.whole([prompt if continues else prompt[-_TAIL:]])[0]
        self._parser = choice.parser(chat.schemas, tail, required=chat.required, continues=continues)
        self._marked = MarkedText(text, choice.family.markers, stop)
        self._most = None if chat.parallel else 1
        self._call_id = call_id
        self._content = self._reasoning = ""
        self._calls: list[tuple[str, Call]] = []

    def add(self, ids: NDArray[np.int32]) -> pb.MessageDelta:
        """What new tokens (int32[T]) add to the message."""
        return self._write(self._parser.feed(self._marked.push(ids)))

    def finish(self, ids: NDArray[np.int32], stopped: bool) -> pb.MessageDelta:
        """What the last tokens add, and all that was waiting. stopped: whether the completion ended
        by itself."""
        first = self._parser.feed(self._marked.push(ids) + self._marked.finish(stopped))
        last = self._parser.finish()
        content, reasoning = first.content + last.content, first.reasoning + last.reasoning
        return self._write(Delta(content, reasoning, [*first.calls, *last.calls]))

    def message(self) -> Message:
        """The message so far."""
        return assistant(self._content, self._reasoning, self._calls)

    def _write(self, delta: Delta) -> pb.MessageDelta:
        self._content += delta.content
        self._reasoning += delta.reasoning
        out = pb.MessageDelta(content=delta.content, reasoning=delta.reasoning)
        for call in delta.calls:
            index = len(self._calls)
            if self._most is not None and index >= self._most:
                break
            self._calls.append((self._call_id(index), call))
            out.tool_calls.add(index=index, id=self._calls[-1][0], name=call.name, arguments=call.arguments)
        return out
