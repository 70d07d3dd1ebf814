"""Chats with tools: what is rendered, what is parsed, and what a session keeps of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout.inference.v1 import inference_pb2 as pb
from rollout.session.v1 import session_pb2
from rollout_testing.engine import ScriptedEngine
from rollout_testing.sessiontest import counted
from rollout_testing.templates import text_of
from rollout_workers.data.prompts import PromptInvalid, Text
from rollout_workers.engines.base import GroupRequest, SampleDelta, SampleOutput, SamplingParams
from rollout_workers.engines.registry import Capabilities
from rollout_workers.inference.generation import Generation
from rollout_workers.inference.model import Model
from rollout_workers.inference.params import UnsupportedByEngine
from rollout_workers.sessions.cache import SegmentsMissing, SessionCache
from rollout_workers.worker.status import InvalidRequest

LIMIT = 16_384
ALL = Capabilities(constraints=("json_schema", "regex"), continues=True)
TEXTS = {name: text_of(name) for name in ("hermes", "qwen3", "llama3", "chatml")} | {"thinks": text_of("chatml")}
TEXTS["thinks"].tokenizer.chat_template += "{{ '<think>\n' if add_generation_prompt and not quiet }}"
SEARCH = pb.Tool(name="search", description="Search the web.", parameters='{"type": "object", "properties": {"query": {}}}')
NOW = pb.Tool(name="now")
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "sums"}}\n</tool_call>'


class Speaking(ScriptedEngine):
    """Says what ``answer`` returns for the text of a prompt, one token at a time, and ends the turn."""

    def __init__(self, text: Text, answer: Callable[[GroupRequest, int], str]) -> None:
        self.text = text
        self.finish: str | None = None

        def ids(request: GroupRequest, sample: int) -> Sequence[int]:
            whole = text.encode([answer(request, sample)], special=False)[0].tolist()
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
            yield replace(item, text=said, stop_string=stop, finish_reason=self.finish or item.finish_reason)  # type: ignore[arg-type]


def worker(answer: str | Callable[[GroupRequest, int], str], template: str = "hermes", can: Capabilities = ALL) -> Generation:
    text = TEXTS[template]
    engine = Speaking(text, answer if callable(answer) else lambda *_: answer)
    made = Generation(Model(engine, text, kind="scripted", capabilities=can), SamplingParams(max_tokens=4096), LIMIT)
    made.engine = engine  # type: ignore[attr-defined]
    return made


def engine_of(made: Generation) -> Speaking:
    return made.engine  # type: ignore[attr-defined]


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


async def test_tools_are_rendered_and_calls_are_parsed() -> None:
    made = worker(f"Let me see.\n{CALL}<|im_end|>")
    found = {}
    for stream in (False, True):
        pieces = await answers(made, asked(chat(user("What is 2+2?"), tools=[SEARCH, NOW]), stream=stream))
        found[stream] = joined(pieces)
        assert pieces[-1].finish_reason == "stop", "the finish reason is the engine's"
        assert '"name": "search"' in prompt_text(pieces[-1]) and '"name": "now"' in prompt_text(pieces[-1])
        assert (len(pieces) > 5) == stream
    content, reasoning, [(name, tool, arguments)] = found[False]
    assert found[True] == found[False]
    assert (content, reasoning, tool, json.loads(arguments)) == ("Let me see.", "", "search", {"query": "sums"})
    assert name.startswith("call_")


async def test_ids_of_calls_are_stable_and_different() -> None:
    made = worker(f"{CALL}\n{CALL}")
    first = await answers(made, asked(chat(user("a"), tools=[SEARCH]), n=2))
    ids = [name for sample in (0, 1) for name, _, _ in joined(first, sample)[2]]
    again = await answers(made, asked(chat(user("a"), tools=[SEARCH]), n=2))
    assert len(set(ids)) == 4 and [name for sample in (0, 1) for name, _, _ in joined(again, sample)[2]] == ids
    other = await answers(made, asked(chat(user("a"), tools=[SEARCH]), name="r2"))
    assert joined(other)[2][0][0] not in ids


async def test_one_call_without_parallel_calls() -> None:
    made = worker(f"{CALL}\n{CALL}")
    pieces = await answers(made, asked(chat(user("a"), tools=[SEARCH], parallel_tool_calls=False)))
    assert len(joined(pieces)[2]) == 1


async def test_no_tools_are_rendered_for_tool_choice_none() -> None:
    made = worker(CALL)
    none = pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)
    pieces = await answers(made, asked(chat(user("a"), tools=[SEARCH], tool_choice=none)))
    assert "search" not in prompt_text(pieces[-1]) and joined(pieces) == (CALL, "", [])


@pytest.mark.parametrize(("name", "names"), [("", ["search", "now"]), ("search", ["search"])])
async def test_a_required_call_constrains_the_completion(name: str, names: list[str]) -> None:
    made = worker('[{"name": "search", "parameters": {"query": "sums"}}]')
    required = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED, name=name)
    pieces = await answers(made, asked(chat(user("a"), tools=[SEARCH, NOW], tool_choice=required, parallel_tool_calls=False)))
    assert [call[1] for call in joined(pieces)[2]] == ["search"] and joined(pieces)[0] == ""
    constraint = engine_of(made).requests[0].params.constraint
    assert constraint is not None and constraint.kind == "json_schema"
    schema = json.loads(constraint.value)
    assert [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]] == names
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == json.loads(SEARCH.parameters)
    assert '"name": "now"' in prompt_text(pieces[-1]), "all tools are rendered"


async def test_a_required_call_needs_an_engine_with_constraints() -> None:
    required = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)
    with pytest.raises(UnsupportedByEngine, match=r"engine scripted does not support prompts.0..chat.tool_choice"):
        await answers(worker(CALL, can=Capabilities()), asked(chat(user("a"), tools=[SEARCH], tool_choice=required)))
    params = pb.SamplingParams(constraint=pb.Constraint(regex="a"))
    with pytest.raises(InvalidRequest, match="can't be combined"):
        await answers(worker(CALL), asked(chat(user("a"), tools=[SEARCH], tool_choice=required), params=params))


@pytest.mark.parametrize(
    ("path", "of"),
    [
        ("tools[0].parameters", chat(user("a"), tools=[pb.Tool(name="f", parameters="{")])),
        ("tools[0].parameters", chat(user("a"), tools=[pb.Tool(name="f", parameters="[]")])),
        ("tools[1].name", chat(user("a"), tools=[NOW, NOW])),
        ("template_variables", chat(user("a"), template_variables="1")),
        ("template_variables", chat(user("a"), template_variables='{"tokenize": true}')),
        ("tool_choice", chat(user("a"), tool_choice=pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED))),
        ("tool_choice.name", chat(user("a"), tools=[NOW], tool_choice=pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED, name="x"))),
        ("tool_choice.name", chat(user("a"), tools=[NOW], tool_choice=pb.ToolChoice(name="now"))),
        ("continue_final_message", chat(user("a"), continue_final_message=True)),
        ("continue_final_message", chat(user("a"), said(""), continue_final_message=True)),
    ],
)
async def test_invalid_chats_are_refused_by_field(path: str, of: pb.Chat) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await answers(worker("a"), asked(of))
    assert [where for where, _ in caught.value.violations] == [f"prompts[0].chat.{path}"]


async def test_messages_of_tools_and_reasoning_are_rendered() -> None:
    call = pb.ToolCall(id="c1", name="search", arguments='{"query": "sums"}')
    history = [
        user("What is 2+2?"),
        said("", reasoning="I search.", tool_calls=[call]),
        pb.ChatMessage(role="tool", content="four", tool_call_id="c1", name="search"),
    ]
    [piece] = await answers(worker("It is 4.", "qwen3"), asked(chat(*history, tools=[SEARCH])))
    text = prompt_text(piece, "qwen3")
    assert '{"name": "search", "arguments": {"query": "sums"}}' in text and "<tool_response>\nfour\n</tool_response>" in text
    assert "<think>\nI search.\n</think>" in text


async def test_variables_reach_the_template() -> None:
    made = worker("Hm.</think>4", "thinks")
    [piece] = await answers(made, asked(chat(user("a"))))
    assert prompt_text(piece, "thinks").endswith("assistant\n<think>\n")
    assert (piece.delta.reasoning, piece.delta.content) == ("Hm.", "4"), "the prompt began the reasoning"
    [piece] = await answers(made, asked(chat(user("a"), template_variables='{"quiet": true}')))
    assert prompt_text(piece, "thinks").endswith("assistant\n") and piece.delta.content == "Hm.</think>4"


async def test_the_final_message_is_continued() -> None:
    of = chat(user("What is 2+2?"), said("It is"), continue_final_message=True)
    [piece] = await answers(worker(" 4.<|im_end|>"), asked(of))
    assert prompt_text(piece).endswith("<|im_start|>assistant\nIt is") and piece.delta.content == " 4."
    thinking = chat(user("What is 2+2?"), said("<think>\nTwo"), continue_final_message=True)
    [piece] = await answers(worker(" and two.\n</think>\n\n4<|im_end|>", "thinks"), asked(thinking))
    assert (piece.delta.reasoning, piece.delta.content) == ("and two.", "4")


async def test_the_stop_string_is_not_part_of_the_message() -> None:
    for stream in (False, True):
        params = pb.SamplingParams(stop=["4."])
        pieces = await answers(worker("It is 4. Or 5."), asked(chat(user("a")), stream=stream, params=params))
        assert joined(pieces)[0] == "It is " and pieces[-1].stop_string == "4."


async def test_a_continued_completion_goes_on_within_its_message() -> None:
    made = worker(f"Let me see.\n{CALL}<|im_end|>")
    of = chat(user("a"), tools=[SEARCH])
    whole = await answers(made, asked(of, stream=True, params=pb.SamplingParams(seed=1)))
    ids = [i for piece in whole for i in piece.token_ids]
    for cut in range(1, len(ids)):
        before = [piece for piece in whole if piece.token_ids][:cut]
        request = asked(of, params=pb.SamplingParams(seed=1), continuations=[pb.Continuation(token_ids=ids[:cut])], stream=True)
        after = await answers(made, request)
        assert joined([*before, *after]) == joined(whole), f"after {cut} tokens"


class Caller:
    """Keeps the segments of a session like the gateway, and the process that a worker is."""

    def __init__(self, made: Generation) -> None:
        self.made, self.segments, self.known, self.requests = made, list[session_pb2.Segment](), 0, 0

    def moved(self, made: Generation) -> None:
        """Continue on a worker that does not know the session."""
        self.made, self.known = made, 0

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


async def test_a_turn_continues_the_tokens_of_the_session() -> None:
    thought = "<think>\nHm.\n</think>\n\n" + CALL + "<|im_end|>"
    caller = Caller(worker(thought, "qwen3"))
    of = chat(user("What is 2+2?"), tools=[SEARCH])
    [first] = await caller.ask(of)
    assert [segment.role for segment in first.segments] == [session_pb2.ROLE_USER, session_pb2.ROLE_ASSISTANT]
    assert json.loads(first.segments[0].messages[0]) == {"role": "user", "content": "What is 2+2?"}
    assert json.loads(first.segments[0].tools)[0]["function"]["name"] == "search" and not first.segments[1].tools
    sent = json.loads(first.segments[1].messages[0])
    assert sent["tool_calls"][0]["id"] == joined([first])[2][0][0] and sent["reasoning_content"] == "Hm."
    answer = pb.ChatMessage(role="tool", content="four", tool_call_id=sent["tool_calls"][0]["id"])
    [second] = await caller.ask(chat(user("What is 2+2?"), back(first), answer, tools=[SEARCH]))
    known = [*first.prompt_token_ids, *first.token_ids]
    assert list(second.prompt_token_ids)[: len(known)] == known, "the reasoning stays, which the client left out"
    assert [segment.role for segment in second.segments] == [session_pb2.ROLE_TOOL, session_pb2.ROLE_ASSISTANT]
    assert caller.path(second.segments[-1].segment_id) == [*second.prompt_token_ids, *second.token_ids]
    assert engine_of(caller.made).requests[-1].session == "ses-1"


async def test_a_fresh_worker_continues_a_stored_session_with_the_same_ids() -> None:
    thought = "<think>\nHm.\n</think>\n\nIt is 4.<|im_end|>"
    caller = Caller(worker(thought, "qwen3"))
    history = [pb.ChatMessage(role="system", content="You plan."), user("What is 2+2?")]
    for turn in range(4):
        [piece] = await caller.ask(chat(*history, tools=[SEARCH]))
        history += [back(piece), user(f"And {turn}?")]
    of = [
        chat(*history, tools=[SEARCH]),
        chat(*history[:-1], user("Else?"), tools=[SEARCH]),
        chat(*history[:3], said("No."), tools=[SEARCH]),
    ]
    of += [chat(*history), chat(user("What is 2+2? "), *history[2:], tools=[SEARCH]), chat(*history[:2], tools=[SEARCH])]
    for each in of:
        [here] = await answers(caller.made, caller.request(each))
        [there] = await answers(worker(thought, "qwen3"), caller.request(each, known=0))
        assert here.prompt_token_ids == there.prompt_token_ids
        assert [s.SerializeToString(deterministic=True) for s in here.segments] == [
            s.SerializeToString(deterministic=True) for s in there.segments
        ], "both workers give new segments the same ids and reasons"


async def test_samples_of_one_prompt_are_siblings() -> None:
    caller = Caller(worker(lambda request, sample: f"It is {sample}.<|im_end|>"))
    pieces = await caller.ask(chat(user("a")), n=3, stream=True)
    turns = [segment for segment in caller.segments if segment.role == session_pb2.ROLE_ASSISTANT]
    assert len(turns) == 3 and len({turn.parent_segment_id for turn in turns}) == 1 and len(caller.segments) == 4
    assert [turn.fork_reason for turn in turns] == [0, session_pb2.FORK_REASON_RESAMPLED, session_pb2.FORK_REASON_RESAMPLED]
    assert sum(bool(piece.segments) for piece in pieces) == 3, "the last pieces have them"
    [again] = await caller.ask(chat(user("a"), said("It is 1."), user("b")))
    assert again.segments[0].parent_segment_id == turns[1].segment_id and not again.segments[0].fork_reason


async def test_a_fork_has_its_reason() -> None:
    caller = Caller(worker("It is 4.<|im_end|>"))
    history = [user("What is 2+2?")]
    for turn in range(3):
        [piece] = await caller.ask(chat(*history))
        history += [back(piece), user(f"And {turn}+3?")]
    [edited] = await caller.ask(chat(history[0], said("It is 5."), user("And 0+3?")))
    assert edited.segments[0].fork_reason == session_pb2.FORK_REASON_HISTORY_EDITED
    [dropped] = await caller.ask(chat(history[0], *history[3:]))
    assert dropped.segments[0].fork_reason == session_pb2.FORK_REASON_HISTORY_COMPACTED


async def test_missing_segments_are_reported() -> None:
    caller = Caller(worker("It is 4.<|im_end|>"))
    await caller.ask(chat(user("a")))
    other = worker("It is 4.")
    with pytest.raises(SegmentsMissing, match="has 0 segments of session ses-1, and not 2"):
        await answers(other, caller.request(chat(user("a"), said("It is 4."), user("b"))))
    [piece] = await answers(other, caller.request(chat(user("a"), said("It is 4."), user("b")), known=0))
    assert piece.segments[0].parent_segment_id == caller.segments[-1].segment_id


async def test_a_completion_that_the_caller_lost_is_forgotten() -> None:
    caller = Caller(worker("It is 4.<|im_end|>"))
    await caller.ask(chat(user("a")))
    history = chat(user("a"), said("It is 4."), user("b"))
    [lost] = await answers(caller.made, caller.request(history))
    [again] = await caller.ask(history)
    assert [segment.segment_id for segment in again.segments] == [segment.segment_id for segment in lost.segments]
    [later] = await answers(caller.made, caller.request(chat(*history.messages, said("It is 4."), user("c")), known=0))
    assert later.segments[0].parent_segment_id == again.segments[-1].segment_id


async def test_concurrent_requests_make_branches() -> None:
    """The worker can't know which of them the caller stores first, so it asks for the segments."""
    caller = Caller(worker(lambda request, sample: f"{request.request_id}<|im_end|>"))
    [first] = await caller.ask(chat(user("a")))
    engine = engine_of(caller.made)
    engine.gate.clear()
    histories = [chat(user("a"), back(first), user(text)) for text in ("b", "b", "c")]
    requests = [caller.request(history) for history in histories]
    running = [asyncio.create_task(answers(caller.made, request)) for request in requests]
    await asyncio.sleep(0)
    engine.gate.set()
    found = [piece for task in running for piece in await task]
    stored = {segment.segment_id: segment for segment in caller.segments}
    for piece in reversed(found):
        for segment in piece.segments:
            assert segment.parent_segment_id in stored, "each piece has all that the caller lacks"
            assert stored.setdefault(segment.segment_id, segment).inline == segment.inline
    assert len(stored) == 2 + 2 + 3, "two prompts and three turns"
    caller.segments = list(stored.values())
    with pytest.raises(SegmentsMissing):
        await answers(caller.made, caller.request(histories[0], known=len(stored)))
    caller.known = 0
    [piece] = await caller.ask(chat(*histories[2].messages, back(found[2]), user("d")))
    assert piece.segments[0].parent_segment_id == found[2].segments[-1].segment_id


async def test_the_oldest_sessions_are_dropped() -> None:
    made = worker("It is 4.<|im_end|>")
    cache = made._sessions = SessionCache(made._prompts.template, most_tokens=200)
    for at in range(20):
        state = pb.SessionState(session_id=f"ses-{at}")
        await answers(made, asked(chat(user("What is 2+2?" * 4)), session=state))
    assert 1 <= len(cache) < 10
    with pytest.raises(SegmentsMissing):
        await answers(made, asked(chat(user("a")), session=pb.SessionState(session_id="ses-0", known=2)))
    assert await answers(made, asked(chat(user("a")), session=pb.SessionState(session_id="ses-19", known=2)))


async def test_a_prefilled_answer_is_one_message() -> None:
    caller = Caller(worker(" 4.<|im_end|>"))
    [piece] = await caller.ask(chat(user("What is 2+2?"), said("It is"), continue_final_message=True))
    assert json.loads(piece.segments[-1].messages[0])["content"] == "It is 4."
    history = chat(user("What is 2+2?"), said("It is 4."), user("Sure?"))
    [second] = await caller.ask(history)
    assert second.segments[0].parent_segment_id == piece.segments[-1].segment_id and not second.segments[0].fork_reason
    [other] = await caller.ask(chat(user("What is 2+2?")))
    assert prompt_text(other).endswith("assistant\n"), "the prompt without the beginning is another one"


async def test_prompts_of_tokens_continue_a_session() -> None:
    caller = Caller(worker("It is 4.<|im_end|>"))
    ids = TEXTS["hermes"].encode(["What is 2+2?"], special=False)[0].tolist()

    async def ask(ids: list[int]) -> pb.GenerateResponse:
        request = caller.request(chat(user("a")))
        del request.prompts[:]
        request.prompts.add(tokens=pb.TokenIds(ids=ids))
        [piece] = await answers(caller.made, request)
        caller.store([piece])
        return piece

    first = await ask(ids)
    assert not first.segments[-1].messages and not first.HasField("delta")
    second = await ask([*ids, *first.token_ids, *ids])
    assert second.segments[0].parent_segment_id == first.segments[-1].segment_id
    assert list(second.prompt_token_ids) == [*ids, *first.token_ids, *ids]


async def test_many_turns_cost_the_same() -> None:
    caller = Caller(worker("It is 4.<|im_end|>"))
    history, costs = [user("Count: 100")], list[int]()
    for number in range(100, 228):
        with counted(TEXTS["hermes"]) as characters:
            [piece] = await caller.ask(chat(*history))
        costs.append(sum(characters))
        assert len(piece.segments) == 2
        history += [back(piece), user(f"Count: {number}")]
    assert max(costs[1:]) == min(costs[1:]), "each turn tokenizes its own messages"


async def test_a_chat_that_the_template_refuses_is_an_error_of_the_request() -> None:
    with pytest.raises(PromptInvalid, match="one call at a time"):
        call = pb.ToolCall(id="1", name="now", arguments="{}")
        await answers(worker("a", "llama3"), asked(chat(user("a"), said("", tool_calls=[call, call]), tools=[NOW])))
