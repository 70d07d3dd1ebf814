"""Random conversations with tools, edits, retries, forks, and several workers. What is trained is
what was sent, and the next prompt says what the template would say of the whole history."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import pytest

from rollout.inference.v1 import inference_pb2 as pb
from rollout.session.v1 import session_pb2
from rollout_workers.chat.requests import chat_of
from rollout_workers.inference.generation import Generation
from rollout_workers.sessions.cache import SegmentsMissing
from rollout_workers.sessions.rows import training_rows
from rollout_workers.sessions.session import Session
from rollout_workers.sessions.template import ChatTemplate

from .chats import NOW, SEARCH, TEXTS, Caller, answers, chat, said, user, worker

WORDS = ["What", "is", "the", "sum", "of", "two", "and", "three?", "It", "4", "6", "\n", "ü"]
History = list[pb.ChatMessage]


class Conversation:
    """One session with a client, a gateway that keeps its segments, and several workers."""

    def __init__(self, seed: int, template: str) -> None:
        self.random = random.Random(seed)
        self.template = template
        self.thinks = template == "qwen3"
        self.tools = [SEARCH, NOW] if self.random.random() < 0.7 else []
        self.caller = Caller(self.worker())
        self.known: dict[int, int] = {}  # worker -> segments that it has
        self.sent: dict[str, list[int]] = {}  # leaf -> what the client was sent
        self.histories: list[History] = [[]]
        self.number = 0

    def worker(self) -> Generation:
        return worker(lambda *_: self.answer(), self.template, odd=self.random.random() < 0.3)

    def words(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, 5))).strip() or "a"

    def answer(self) -> str:
        """What the policy says: text, calls, or both; in qwen3's way sometimes with reasoning."""
        text = self.words() if self.random.random() < 0.8 else ""
        calls = []
        for _ in range(self.random.choice([0, 0, 1, 2]) if self.tools else 0):
            call = {"name": "search", "arguments": {"query": self.words(), "most": 3}}
            calls.append(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>")
        thought = f"<think>\n{self.words()}\n</think>\n\n" if self.thinks and self.random.random() < 0.5 else ""
        end = "<|im_end|>" if self.random.random() < 0.9 else ""
        return thought + "\n".join([*([text] if text else []), *calls]) + end

    def next_history(self) -> History:
        """A history of before with new messages, an edit, or nothing new."""
        history = list(self.random.choice(self.histories))
        change = self.random.random()
        if change < 0.1 and len(history) > 1:  # the same question again
            del history[-1:]
        elif change < 0.2 and history:  # an earlier message is other text
            at = self.random.randrange(len(history))
            if history[at].role == "user":
                history[at] = user(self.words())
            elif history[at].role == "assistant":
                history[at] = said(self.words())
        elif change < 0.25 and len(history) > 3:  # messages are left out
            del history[1:3]
        elif change < 0.35:  # a branch from an earlier point
            del history[self.random.randrange(len(history) + 1) :]
        if history and history[-1].role == "assistant":
            for call in history[-1].tool_calls:
                history.append(pb.ChatMessage(role="tool", content=self.words(), tool_call_id=call.id, name=call.name))
        if not history or history[-1].role == "assistant":
            history.append(user(self.words()))
        return [self.returned(message) for message in history]

    def returned(self, message: pb.ChatMessage) -> pb.ChatMessage:
        """The message as some client sends it: with its arguments serialized again."""
        copy = pb.ChatMessage.FromString(message.SerializeToString())
        for call in copy.tool_calls:
            if self.random.random() < 0.3:
                call.arguments = json.dumps(json.loads(call.arguments), indent=self.random.choice([None, 2]), ensure_ascii=False)
        return copy

    async def turn(self) -> None:
        """One request, or two at the same time."""
        if self.random.random() < 0.2:
            self.caller.made, self.caller.known = self.worker(), 0
        histories = [self.next_history() for _ in range(self.random.choice([1, 1, 1, 2]))]
        requests = []
        for history in histories:
            self.number += 1
            requests.append(
                self.caller.request(
                    chat(*history, tools=self.tools), n=self.random.choice([1, 1, 2]), stream=self.random.random() < 0.5
                )
            )
        answered = await asyncio.gather(*(self.answered(request) for request in requests))
        order = list(zip(histories, answered, strict=True))
        self.random.shuffle(order)  # the caller stores them in another order
        lost = len(order) == 1 and self.random.random() < 0.1
        for history, pieces in order:
            self.check(history, pieces)
            if not lost:
                self.store(history, pieces)
        if not lost:
            self.caller.known = len(self.caller.segments)

    async def answered(self, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        try:
            return await answers(self.caller.made, request)
        except SegmentsMissing:
            request.session.known = 0
            del request.session.segments[:]
            request.session.segments.extend(self.caller.segments)
            return await answers(self.caller.made, request)

    def check(self, history: History, pieces: Sequence[pb.GenerateResponse]) -> None:
        """The prompt says what the template says of the whole history."""
        if self.thinks:
            return  # the template strips reasoning, which the path keeps
        of = chat_of(chat(*history, tools=self.tools), "chat")
        text = TEXTS[self.template]
        expected = text.whole([ChatTemplate(text).whole(of.messages, of.tools)])[0]
        for piece in pieces:
            if piece.finish_reason:
                assert text.whole([piece.prompt_token_ids])[0] == expected

    def store(self, history: History, pieces: Sequence[pb.GenerateResponse]) -> None:
        names = {segment.segment_id for segment in self.caller.segments}
        for piece in pieces:
            for segment in piece.segments:
                if segment.segment_id not in names:
                    assert segment.parent_segment_id in names | {""}
                    names.add(segment.segment_id)
                    self.caller.segments.append(segment)
        for last in [piece for piece in pieces if piece.finish_reason]:
            mine = [piece for piece in pieces if piece.sample == last.sample]
            ids = [i for piece in mine for i in piece.token_ids]
            self.sent[last.segments[-1].segment_id] = [*last.prompt_token_ids, *ids]
            joined = pb.GenerateResponse()
            for piece in mine:
                joined.delta.MergeFrom(piece.delta)
            message = said("".join(piece.delta.content for piece in mine))
            message.tool_calls.extend(
                pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in joined.delta.tool_calls
            )
            self.histories.append([*history, message])


@pytest.mark.parametrize("template", ["hermes", "qwen3"])
async def test_what_is_trained_is_what_was_sent(template: str) -> None:
    forks, turns = set[int](), 0
    for seed in range(150):
        conversation = Conversation(seed, template)
        for _ in range(conversation.random.randint(2, 9)):
            await conversation.turn()
        segments = conversation.caller.segments
        session = Session.from_proto(ChatTemplate(TEXTS[template]), segments)
        forks |= {segment.fork_reason for segment in segments}
        turns += len(conversation.sent)
        sampled = 0
        rows = training_rows(session, dict.fromkeys(conversation.sent, 1.0))
        for row, (leaf, ids) in zip(rows, conversation.sent.items(), strict=True):
            assert row.token_ids.tolist() == ids == session.token_ids(leaf).tolist(), f"seed {seed}"
            sampled += int(row.loss_mask.sum())
        assert sampled == sum(s.tokens for s in segments if s.role == session_pb2.ROLE_ASSISTANT), "each is trained once"
    assert turns > 700 and forks >= {0, session_pb2.FORK_REASON_RESAMPLED, session_pb2.FORK_REASON_HISTORY_EDITED}
