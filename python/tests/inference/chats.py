"""A worker whose engine says what a test wants, and a client that keeps sessions like the
gateway."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollout.inference.v1 import inference_pb2 as pb
from rollout.session.v1 import session_pb2
from rollout_testing.engine import ScriptedEngine
from rollout_testing.templates import text_of
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import GroupRequest, SampleDelta, SampleOutput, SamplingParams
from rollout_workers.engines.registry import Capabilities
from rollout_workers.inference.generation import Generation
from rollout_workers.inference.model import Model

LIMIT = 16_384
ALL = Capabilities(constraints=("json_schema", "regex"), continues=True)
TEXTS = {name: text_of(name) for name in ("hermes", "qwen3", "llama3", "chatml")} | {"thinks": text_of("chatml")}
TEXTS["thinks"].tokenizer.chat_template += "{{ '<think>\n' if add_generation_prompt and not quiet }}"
SEARCH = pb.Tool(name="search", description="Search the web.", parameters='{"type": "object", "properties": {"query": {}}}')
NOW = pb.Tool(name="now")
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "sums"}}\n</tool_call>'


class Speaking(ScriptedEngine):
    """Says what ``answer`` returns, one token at a time. odd: with tokens that the tokenizer would
    not choose."""

    def __init__(self, text: Text, answer: Callable[[GroupRequest, int], str], *, odd: bool = False) -> None:
        self.text = text

        def ids(request: GroupRequest, sample: int) -> Sequence[int]:
            said = answer(request, sample)
            words = re.split(r"(<[^>]*>|[a-z ])", said) if odd else [said]
            whole = [token for ids in text.encode(words, special=False) for token in ids.tolist()]
            return whole[len(request.continued) :]

        super().__init__(ids)

    async def generate(self, batch: Sequence[GroupRequest]) -> AsyncIterator[SampleDelta | SampleOutput]:
        params = {request.request_id: request.params for request in batch}
        async for item in super().generate(batch):
            assert isinstance(item, SampleOutput)
            said = self.text.decode([item.token_ids])[0]
            for at in range(len(item.token_ids)):
                one = slice(at, at + 1)
                yield SampleDelta(
                    item.request_id, item.sample, at, item.token_ids[one], item.logprobs[one], None, "", self.version
                )
            stop = next((s for s in params[item.request_id].stop if s in said), None)
            said = said[: said.index(stop)] if stop else said
            yield replace(item, text=said, stop_string=stop)


Answer = str | Callable[[GroupRequest, int], str]


def worker(
    answer: Answer, template: str = "hermes", can: Capabilities = ALL, *, odd: bool = False, family: str = ""
) -> Generation:
    text = TEXTS[template]
    engine = Speaking(text, answer if callable(answer) else lambda *_: answer, odd=odd)
    model = Model(engine, text, kind="scripted", capabilities=can)
    return Generation(model, SamplingParams(max_tokens=4096), LIMIT, family=family)


def engine_of(made: Generation) -> Speaking:
    assert isinstance(made._engine, Speaking)
    return made._engine


def user(content: str) -> pb.ChatMessage:
    return pb.ChatMessage(role="user", content=content)


def said(content: str, **fields: Any) -> pb.ChatMessage:
    return pb.ChatMessage(role="assistant", content=content, **fields)


def chat(*messages: pb.ChatMessage, **fields: Any) -> pb.Chat:
    return pb.Chat(messages=messages, **fields)


def asked(of: pb.Chat, name: str = "r", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=name, prompts=[pb.Prompt(chat=of)], n=fields.pop("n", 1), parse=True, **fields)


async def answers(made: Generation, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [piece async for piece in made.generate(request)]


def joined(pieces: Sequence[pb.GenerateResponse], sample: int = 0) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Content, reasoning, and calls (id, name, arguments) of the deltas."""
    deltas = [piece.delta for piece in pieces if piece.sample == sample]
    calls = [(call.id, call.name, call.arguments) for delta in deltas for call in delta.tool_calls]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls


def prompt_text(piece: pb.GenerateResponse, template: str = "hermes") -> str:
    return TEXTS[template].whole([piece.prompt_token_ids])[0]


class Caller:
    """Keeps the segments of a session like the gateway, and the process that a worker is."""

    def __init__(self, made: Generation) -> None:
        self.made, self.segments, self.known, self.requests = made, list[session_pb2.Segment](), 0, 0

    def request(self, of: pb.Chat, known: int | None = None, **fields: Any) -> pb.GenerateRequest:
        self.requests += 1
        known = self.known if known is None else known
        stored = [session_pb2.Segment.FromString(each.SerializeToString()) for each in self.segments[known:]]
        state = pb.SessionState(session_id="ses-1", known=known, segments=stored)
        return asked(of, name=f"r{self.requests}", session=state, **fields)

    async def ask(self, of: pb.Chat, **fields: Any) -> list[pb.GenerateResponse]:
        pieces = await answers(self.made, self.request(of, **fields))
        self.store(pieces)
        return pieces

    def store(self, pieces: Sequence[pb.GenerateResponse]) -> None:
        names = {segment.segment_id for segment in self.segments}
        for piece in pieces:
            for segment in piece.segments:
                assert segment.segment_id not in names and segment.parent_segment_id in ({""} | names)
                names.add(segment.segment_id)
                self.segments.append(segment)
        self.known = len(self.segments)

    def path(self, leaf: str) -> list[int]:
        """The ids from the root to a segment."""
        by_name = {segment.segment_id: segment for segment in self.segments}
        ids: list[int] = []
        while leaf:
            ids = np.frombuffer(by_name[leaf].inline.token_ids, np.int32).tolist() + ids
            leaf = by_name[leaf].parent_segment_id
        return ids


def back(piece: pb.GenerateResponse) -> pb.ChatMessage:
    """The message that the client was sent, as it sends it back: without its reasoning."""
    content, _, calls = joined([piece])
    return said(content, tool_calls=[pb.ToolCall(id=i, name=name, arguments=arguments) for i, name, arguments in calls])
