"""Chats with tools: what is rendered, what is parsed, and what a session keeps of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from rollout.inference.v1 import inference_pb2 as pb
from rollout.session.v1 import session_pb2
from rollout_testing.sessiontest import counted
from rollout_workers.data.prompts import PromptInvalid
from rollout_workers.engines.registry import Capabilities
from rollout_workers.inference.params import UnsupportedByEngine
from rollout_workers.sessions.cache import SegmentsMissing, SessionCache
from rollout_workers.worker.status import InvalidRequest

from .chats import (
    CALL,
    NOW,
    SEARCH,
    TEXTS,
    Caller,
    answers,
    asked,
    back,
    chat,
    engine_of,
    joined,
    prompt_text,
    said,
    user,
    worker,
)


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


async def test_the_family_can_be_set() -> None:
    made = worker('{"name": "search", "parameters": {"query": "sums"}}', family="llama_json")
    [piece] = await answers(made, asked(chat(user("a"), tools=[SEARCH])))
    assert joined([piece])[0] == "" and joined([piece])[2][0][1] == "search"


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


async def test_the_format_of_an_answer_does_not_apply_to_a_required_call() -> None:
    """Agents send both: the answer that follows the call has the format."""
    made = worker('[{"name": "search", "parameters": {"query": "sums"}}]')
    required = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)
    params = pb.SamplingParams(constraint=pb.Constraint(json_schema='{"type": "object"}'))
    pieces = await answers(made, asked(chat(user("a"), tools=[SEARCH], tool_choice=required), params=params))
    assert [call[1] for call in joined(pieces)[2]] == ["search"]
    constraint = engine_of(made).requests[0].params.constraint
    assert constraint is not None and json.loads(constraint.value)["type"] == "array"


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


async def test_a_completion_that_is_stored_late_makes_the_order_uncertain() -> None:
    caller = Caller(worker(lambda request, sample: f"{request.request_id}<|im_end|>"))
    [first] = await caller.ask(chat(user("a")))
    late = await answers(caller.made, caller.request(chat(user("a"), back(first), user("b"))))
    await answers(caller.made, caller.request(chat(user("a"), back(first), user("c"))))
    caller.store(late)  # the worker has the segments of the other request at these places
    with pytest.raises(SegmentsMissing):
        await answers(caller.made, caller.request(chat(user("a"), back(first), user("b"), back(late[0]), user("d"))))


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


async def test_a_turn_after_other_variables_is_found_again() -> None:
    caller = Caller(worker("Hm.</think>4<|im_end|>", "thinks"))
    await caller.ask(chat(user("a"), template_variables='{"quiet": true}'))
    [piece] = await caller.ask(chat(user("a")))
    assert prompt_text(piece, "thinks").endswith("<think>\n") and len(piece.segments) == 2
    [later] = await caller.ask(chat(user("a"), back(piece), user("b")))
    assert later.segments[0].parent_segment_id == piece.segments[-1].segment_id and not later.segments[0].fork_reason
