"""The conformance suite of sessions, which every renderer passes for every kind of chat template.

@pytest.mark.parametrize("name", applicable(model))
def test_session(name: str) -> None:
    run(name, model)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.session.v1 import session_pb2 as pb
from rollout_workers.data.prompts import PromptInvalid, Text
from rollout_workers.engines.base import SamplingParams, VersionSpan
from rollout_workers.sessions.messages import Message
from rollout_workers.sessions.rows import training_rows
from rollout_workers.sessions.segment import InvalidSegment, Sampled, Segment
from rollout_workers.sessions.session import Prompt, SegmentConflict, Session, UnknownSegment
from rollout_workers.sessions.template import ChatTemplate, Renderer

Ids = NDArray[np.int32]
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "most": {"type": "integer"}}},
    },
}


@dataclass(frozen=True)
class Model:
    """A model under test. end: its end-of-turn token; empty if the next message's delimiter ends a
    turn. tools: how many calls a turn of the template may have. call: a sampled text with these
    calls. thinks: whether the template strips thinking from earlier turns."""

    text: Text
    renderer: Renderer
    end: str
    tools: int = 0
    call: Callable[[Sequence[tuple[str, str]]], str] | None = None
    thinks: bool = False
    system: bool = True

    def session(self) -> Session:
        return Session("ses-1", self.renderer)

    def encode(self, text: str) -> Ids:
        return self.text.encode([text], special=False)[0]

    def rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Ids:
        """What the template makes of a whole history, with the arguments of calls as objects."""
        return self.encode(self.text.render(list(map(_parsed, messages)), tools=tools))

    def turn(self, text: str, *, end: bool = True, pieces: bool = False, version: int = 1) -> Sampled:
        """A sampled turn. pieces: with tokens that are not those of the tokenizer."""
        ids = np.concatenate([self.encode(c) for c in text]) if pieces and text else self.encode(text)
        if end and self.end:
            ids = np.concatenate([ids, self.encode(self.end)])
        logprobs = np.linspace(-2, -0.125, len(ids)).astype(np.float32)
        return Sampled(ids.astype(np.int32), logprobs, None, (VersionSpan(version, 0, len(ids)),) if len(ids) else ())


Check = Callable[[Model], None]
CASES: dict[str, Check] = {}


def case(check: Check) -> Check:
    """Register a check."""
    CASES[check.__name__] = check
    return check


def applicable(model: Model) -> list[str]:
    """The cases that apply to a model."""
    return [
        name
        for name in CASES
        if (model.tools or "tool" not in name)
        and (model.tools > 1 or "parallel" not in name)
        and (model.thinks or "thinking" not in name)
        and (model.system or "system" not in name)
        and (model.end or "end_token" not in name)
    ]


def run(name: str, model: Model) -> None:
    """Run one case."""
    CASES[name](model)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def calls(*calls: tuple[str, str]) -> Message:
    """A message with calls of ``search``."""
    found = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": found}


def result(text: str, at: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{at}", "name": "search", "content": text}


def ask(session: Session, model: Model, messages: Sequence[Message], answer: str, **options: Any) -> Segment:
    """One turn; the sampled segment."""
    return session.append(session.prompt(messages, **options), model.turn(answer))[-1]


def continues(prompt: Prompt, session: Session, after: Segment) -> None:
    """Check that a prompt extends the path to a segment."""
    known = session.token_ids(after.segment_id)
    assert prompt.token_ids[: len(known)].tolist() == known.tolist(), "the prompt starts with the tokens of the path"
    assert prompt.parent == after.segment_id and prompt.fork == pb.FORK_REASON_UNSPECIFIED
    assert prompt.known == len(known)


@contextmanager
def counted(text: Text) -> Iterator[list[int]]:
    """Counts the characters that are tokenized."""
    found: list[int] = []
    encode = text.encode

    def counting(texts: Sequence[str], *, special: bool = True) -> list[Ids]:
        found.append(sum(map(len, texts)))
        return encode(texts, special=special)

    text.encode = counting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del text.encode


HELLO = [user("What is 2+2?")]
NEXT = [*HELLO, said("It is 4."), user("And 3+3?")]


@case
def the_first_prompt_is_what_the_template_renders(model: Model) -> None:
    assert model.session().prompt(HELLO).token_ids.tolist() == model.rendered(HELLO).tolist()


@case
def a_next_prompt_is_the_path_and_what_the_template_puts_after_it(model: Model) -> None:
    """The separator after the end-of-turn token is there, which a sampled turn lacks."""
    session = model.session()
    turn = ask(session, model, HELLO, "It is 4.")
    prompt = session.prompt(NEXT)
    continues(prompt, session, turn)
    assert prompt.token_ids.tolist() == model.rendered(NEXT).tolist()


@case
def an_end_token_that_the_engine_left_out_starts_the_bridge(model: Model) -> None:
    session = model.session()
    turn = session.append(session.prompt(HELLO), model.turn("It is 4.", end=False))[-1]
    prompt = session.prompt(NEXT)
    continues(prompt, session, turn)
    assert prompt.token_ids.tolist() == model.rendered(NEXT).tolist()


@case
def a_turn_without_tokens_is_continued(model: Model) -> None:
    session = model.session()
    turn = session.append(session.prompt(HELLO), model.turn("", end=False))[-1]
    continues(session.prompt([*HELLO, said(""), user("Please continue.")]), session, turn)


@case
def tokens_that_the_tokenizer_would_not_choose_stay(model: Model) -> None:
    session = model.session()
    odd = model.turn("It is 4.", pieces=True)
    assert odd.token_ids.tolist() != model.turn("It is 4.").token_ids.tolist(), "the pieces are other tokens"
    turn = session.append(session.prompt(HELLO), odd)[-1]
    continues(session.prompt(NEXT), session, turn)


@case
def a_client_may_change_whitespace_and_the_form_of_content(model: Model) -> None:
    session = model.session()
    turn = ask(session, model, HELLO, "\nIt is 4.\n\n")
    parts = {"role": "user", "content": [{"type": "text", "text": "What is 2+2?\n"}]}
    continues(session.prompt([parts, said("It is 4."), user("And 3+3?")]), session, turn)
    continues(session.prompt([parts, said("\r\nIt is 4.\r\n"), user("And 3+3?")]), session, turn)


@case
def stripped_thinking_is_the_same_message(model: Model) -> None:
    session = model.session()
    turn = ask(session, model, HELLO, "<think>\nTwo and two.\n</think>\n\nIt is 4.")
    prompt = session.prompt(NEXT)
    continues(prompt, session, turn)
    assert "Two and two" in model.text.decode([prompt.token_ids])[0], "the template would strip it; the path keeps it"
    assert "Two and two" not in model.text.decode([model.rendered(NEXT)])[0]
    continues(session.prompt([*HELLO, {**said("It is 4."), "reasoning_content": "Two."}, user("And 3+3?")]), session, turn)


@case
def thinking_that_never_ended_is_closed_by_the_template(model: Model) -> None:
    session = model.session()
    turn = session.append(session.prompt(HELLO), model.turn("<think>\nTwo and", end=False))[-1]
    continues(session.prompt([*HELLO, said(""), user("And 3+3?")]), session, turn)


def called(model: Model, session: Session, *queries: str) -> tuple[list[Message], Segment]:
    """A session whose last turn called ``search``; its history as the client sends it."""
    assert model.call is not None
    wanted = [("search", json.dumps({"query": query, "most": 3})) for query in queries]
    turn = ask(session, model, HELLO, model.call(wanted), tools=[TOOL])
    return [*HELLO, calls(*wanted)], turn


@case
def a_tool_result_continues_the_call(model: Model) -> None:
    session = model.session()
    history, turn = called(model, session, "sums")
    history = [*history, result("4")]
    prompt = session.prompt(history, tools=[TOOL])
    continues(prompt, session, turn)
    assert prompt.token_ids.tolist() == model.rendered(history, [TOOL]).tolist()
    assert session.append(prompt, model.turn("It is 4."))[0].role == pb.ROLE_TOOL


@case
def tool_arguments_may_be_serialized_again(model: Model) -> None:
    session = model.session()
    _, turn = called(model, session, "sums")
    for arguments in ('{"most":3,"query":"sums"}', '{\n  "query": "sums",\n  "most": 3\n}'):
        continues(session.prompt([*HELLO, calls(("search", arguments)), result("4")], tools=[TOOL]), session, turn)
    other = session.prompt([*HELLO, calls(("search", '{"query": "products"}')), result("4")], tools=[TOOL])
    assert other.parent != turn.segment_id and other.fork == pb.FORK_REASON_HISTORY_EDITED


@case
def parallel_tool_results_are_one_bridge(model: Model) -> None:
    """Consecutive tool messages stay together where the template puts them into one turn."""
    session = model.session()
    history, turn = called(model, session, "sums", "products")
    history = [*history, result("4", 0), result("6", 1)]
    prompt = session.prompt(history, tools=[TOOL])
    continues(prompt, session, turn)
    assert prompt.token_ids.tolist() == model.rendered(history, [TOOL]).tolist()
    assert len(session.append(prompt, model.turn("Both."))) == 2
    extended = session.prompt([*history, said("Both."), user("Sure?")], tools=[TOOL])
    assert extended.token_ids.tolist() == model.rendered([*history, said("Both."), user("Sure?")], [TOOL]).tolist()


@case
def other_tools_are_another_prompt(model: Model) -> None:
    session = model.session()
    ask(session, model, HELLO, "It is 4.")
    prompt = session.prompt(NEXT, tools=[TOOL])
    assert prompt.known < len(model.rendered(HELLO)) and prompt.fork != pb.FORK_REASON_UNSPECIFIED
    assert prompt.token_ids.tolist() == model.rendered(NEXT, [TOOL]).tolist()


@case
def a_prompt_that_is_sampled_again_is_a_fork(model: Model) -> None:
    session = model.session()
    one, two = ask(session, model, HELLO, "It is 4."), ask(session, model, HELLO, "Four.")
    assert one.fork == pb.FORK_REASON_UNSPECIFIED and two.fork == pb.FORK_REASON_RESAMPLED
    assert one.parent == two.parent and len(session.segments) == 3
    assert session.prompt(HELLO).fork == pb.FORK_REASON_RESAMPLED


@case
def siblings_with_one_text_are_told_apart(model: Model) -> None:
    session = model.session()
    prompt = session.prompt(HELLO)
    one = session.append(prompt, model.turn("It is 4."))[-1]
    two = session.append(prompt, model.turn("It is 4.", pieces=True))[-1]
    continues(session.prompt(NEXT), session, two)
    continues(session.prompt(NEXT, parent=one.segment_id), session, one)
    ask(session, model, NEXT, "It is 6.", parent=one.segment_id)
    last = session.prompt([*NEXT, said("It is 6."), user("And 4+4?")])
    assert one.segment_id in [s.segment_id for s in session.path(last.parent)], "the deeper path says more of the history"


@case
def an_edited_message_is_a_fork(model: Model) -> None:
    session = model.session()
    ask(session, model, HELLO, "It is 4.")
    ask(session, model, NEXT, "It is 6.")
    for changed in (
        [user("What is 2 + 2?"), *NEXT[1:]],
        [*HELLO, said("It is 5."), user("And 3+3?")],
        [*HELLO, said("It is 4."), user("And 3+5?")],
    ):
        prompt = session.prompt(changed)
        assert prompt.fork == pb.FORK_REASON_HISTORY_EDITED
        assert prompt.token_ids.tolist() == model.rendered(changed).tolist()
    new = session.append(session.prompt([*HELLO, said("It is 4."), user("And 3+5?")]), model.turn("8"))
    assert [s.fork for s in new] == [pb.FORK_REASON_HISTORY_EDITED, pb.FORK_REASON_UNSPECIFIED]


@case
def an_edited_answer_keeps_the_prompt_before_it(model: Model) -> None:
    session = model.session()
    turn = ask(session, model, HELLO, "It is 4.")
    history = [*HELLO, said("It is 5."), user("And 3+3?")]
    new = session.append(session.prompt(history), model.turn("It is 6."))
    assert new[0].parent == turn.parent, "the shared prompt is stored once"
    assert not new[0].loss_mask.any() and new[-1].loss_mask.all()
    ask(session, model, [*history, said("It is 6."), user("Sure?")], "Yes.")
    assert len(session.segments) == 6


@case
def dropped_and_summarized_messages_are_a_compaction(model: Model) -> None:
    session = model.session()
    long = [*HELLO]
    for number in range(4):
        ask(session, model, long, f"Answer {number}.")
        long += [said(f"Answer {number}."), user(f"Question {number}?")]
    dropped = [long[0], *long[5:]]
    assert session.prompt(dropped).fork == pb.FORK_REASON_HISTORY_COMPACTED
    summary = session.prompt([user("So far we have talked about sums; the last one was wrong. Continue from there.")])
    assert summary.fork == pb.FORK_REASON_HISTORY_COMPACTED
    assert session.prompt([user("Anything")], reason=pb.FORK_REASON_SUBAGENT).fork == pb.FORK_REASON_SUBAGENT


@case
def other_system_instructions_are_a_subagent(model: Model) -> None:
    session = model.session()
    main = [system("You plan."), *HELLO]
    ask(session, model, main, "It is 4.")
    prompt = session.prompt([system("You search."), user("Find sums.")])
    assert prompt.fork == pb.FORK_REASON_SUBAGENT and prompt.parent == ""
    new = session.append(prompt, model.turn("Found."))
    assert new[0].fork == pb.FORK_REASON_SUBAGENT and new[0].parent == ""


@case
def a_shared_system_message_is_stored_once(model: Model) -> None:
    session = model.session()
    ask(session, model, [system("You plan."), user("One?")], "1")
    new = session.append(session.prompt([system("You plan."), user("Two?")]), model.turn("2"))
    assert new[0].parent, "the second conversation starts after the system message of the first"
    assert [s.role for s in session.segments].count(pb.ROLE_SYSTEM) == 1


@case
def client_tokens_are_matched_and_retokenized_ones_are_a_fork(model: Model) -> None:
    session = model.session()
    turn = session.append(session.prompt(HELLO), model.turn("It is 4.", pieces=True))[-1]
    bridge = model.rendered(NEXT)[len(model.rendered(HELLO)) + len(model.turn("It is 4.").token_ids) :]
    exact = np.concatenate([session.token_ids(turn.segment_id), bridge])
    prompt = session.prompt_tokens(exact)
    continues(prompt, session, turn)
    assert prompt.token_ids.tolist() == exact.tolist()
    again = session.prompt_tokens(model.rendered(NEXT))
    assert again.fork == pb.FORK_REASON_RETOKENIZED and again.parent == turn.parent
    assert again.token_ids.tolist() == model.rendered(NEXT).tolist()


@case
def a_sampled_turn_is_extended_by_its_id(model: Model) -> None:
    session = model.session()
    turn = ask(session, model, HELLO, "It is 4.")
    prompt = session.extend(turn.segment_id, NEXT[2:])
    assert prompt.token_ids.tolist() == session.prompt(NEXT).token_ids.tolist()
    session.append(prompt, model.turn("It is 6."))
    assert session.extend(turn.segment_id, [user("Other")]).fork == pb.FORK_REASON_HISTORY_EDITED
    refused(UnknownSegment, "s99", lambda: session.extend("s99", NEXT[2:]))
    refused(PromptInvalid, "0 messages", lambda: session.extend(turn.segment_id, []))
    refused(PromptInvalid, "no messages", lambda: session.prompt([]))


@case
def the_same_turn_is_appended_once(model: Model) -> None:
    session = model.session()
    prompt = session.prompt(HELLO)
    first = session.append(prompt, model.turn("It is 4."), segment_id="req-1")
    again = session.append(session.prompt(HELLO), model.turn("It is 4."), segment_id="req-1")
    assert [s.segment_id for s in first] == [session.segments[0].segment_id, "req-1"] and again == first[-1:]
    assert len(session.segments) == 2
    refused(SegmentConflict, "req-1", lambda: session.append(prompt, model.turn("Four."), segment_id="req-1"))


@case
def prompts_do_not_change_the_session(model: Model) -> None:
    session = model.session()
    prompts = [session.prompt(HELLO), session.prompt(HELLO)]
    assert not session.segments
    for prompt in prompts:
        session.append(prompt, model.turn("It is 4."))
    assert [s.fork for s in session.segments] == [0, 0, pb.FORK_REASON_RESAMPLED]


@case
def each_turn_has_its_own_parameters(model: Model) -> None:
    session = model.session()
    of_run = SamplingParams(max_tokens=64, temperature=0.5, stop=("end",))
    limit = len(session.prompt(HELLO).token_ids) + 64
    first = session.prompt(HELLO).params(of_run, limit)
    ask(session, model, HELLO, "It is 4.")
    second = session.prompt(NEXT).params(of_run, limit)
    assert first == of_run and second == replace(of_run, max_tokens=limit - len(session.prompt(NEXT).token_ids))
    assert second.max_tokens < 64 and of_run == SamplingParams(max_tokens=64, temperature=0.5, stop=("end",))


@case
def a_session_is_restored_from_its_messages(model: Model) -> None:
    session = model.session()
    history = [*([system("You plan.")] if model.system else []), *HELLO]
    for number in range(3):
        ask(session, model, history, f"Answer {number}.")
        history += [said(f"Answer {number}."), user(f"Question {number}?")]
    ask(session, model, [*history[:-1], user("Something else?")], "Yes.")
    stored = [message.SerializeToString() for message in session.to_proto()]
    restored = Session.from_proto(model.renderer, [pb.Segment.FromString(data) for data in stored])
    assert [message.SerializeToString() for message in restored.to_proto()] == stored
    assert restored.leaves() == session.leaves()
    for messages in (history, [*history[:-1], user("Something else?"), said("Yes."), user("Why?")], [user("New?")]):
        one, two = session.prompt(messages), restored.prompt(messages)
        assert (one.parent, one.fork, one.token_ids.tolist()) == (two.parent, two.fork, two.token_ids.tolist())
    assert restored.path(restored.leaves()[0])[-1].version_spans[0].version == 1


@case
def broken_segments_are_refused(model: Model) -> None:
    session = model.session()
    ask(session, model, HELLO, "It is 4.")
    root, turn = session.to_proto()
    refused(InvalidSegment, "before its parent", lambda: Session.from_proto(model.renderer, [turn]))
    refused(InvalidSegment, "not a multiple", lambda: Segment.from_proto(changed(turn, "inline.token_ids", b"abc")))
    refused(InvalidSegment, "expected", lambda: Segment.from_proto(changed(turn, "tokens", turn.tokens + 1)))
    refused(InvalidSegment, "no inline tokens", lambda: Segment.from_proto(pb.Segment(segment_id="s", tokens_ref="blake3-a")))
    refused(InvalidSegment, "checksum", lambda: Segment.from_proto(changed(turn, "crc32c", turn.crc32c ^ 1)))
    refused(InvalidSegment, "logprobs", lambda: Segment.from_proto(changed(turn, "inline.logprobs", b"")))
    refused(InvalidSegment, "session", lambda: Session("other", model.renderer, [Segment.from_proto(root)]))
    other = changed(turn, "inline.logprobs", bytes(4 * turn.tokens))
    refused(SegmentConflict, "twice", lambda: Session.from_proto(model.renderer, [root, turn, other]))
    assert len(Session.from_proto(model.renderer, [root, turn, root, turn]).segments) == 2


@case
def many_turns_are_tokenized_once(model: Model) -> None:
    """128 turns; a turn costs as many characters at the end as at the beginning."""
    session = model.session()
    history, costs = [user("Count with me: 100")], list[int]()
    for number in range(100, 228):
        with counted(model.text) as characters:
            prompt = session.prompt(history)
        costs.append(sum(characters))
        turn = session.append(prompt, model.turn(f"{number}"))[-1]
        assert prompt.fork == pb.FORK_REASON_UNSPECIFIED
        history += [said(f"{number}"), user(f"Next: {number}")]
    assert len(session.path(turn.segment_id)) == 256
    steady = costs[2:]  # the first answer also tokenizes what follows each answer, once for all sessions of a template
    assert max(steady) == min(steady), "each turn tokenizes its own messages"


@case
def aborted_turns_are_not_trained(model: Model) -> None:
    session = model.session()
    turn = session.append(session.prompt(HELLO), replace(model.turn("It is"), trained=False))[-1]
    [row] = training_rows(session, {turn.segment_id: 1.0})
    assert not row.loss_mask.any() and not row.advantages.any() and not row.shares.any()


@case
def a_shared_turn_is_one_term_of_the_loss(model: Model) -> None:
    session = model.session()
    shared = ask(session, model, HELLO, "It is 4.")
    one = ask(session, model, NEXT, "It is 6.")
    two = ask(session, model, [*NEXT[:2], user("And 5+5?")], "It is 10.")
    three = ask(session, model, [*NEXT[:2], user("And 5+5?")], "Ten.")
    rows = training_rows(session, {one.segment_id: 1.0, two.segment_id: -0.5, three.segment_id: 0.25})
    sampled = sum(len(s.token_ids) for s in (shared, one, two, three))
    assert sum(int(row.loss_mask.sum()) for row in rows) == sampled
    start = rows[0].prompt_length
    assert np.allclose(rows[0].advantages[start : start + len(shared.token_ids)], 0.25)
    assert np.allclose(sum(row.shares.sum() for row in rows), sampled)
    for row, leaf in zip(rows, (one, two, three), strict=True):
        assert row.path == session.trajectory_path(leaf.segment_id)
        assert row.token_ids.tolist() == session.token_ids(leaf.segment_id).tolist()
        assert row.version_spans == (VersionSpan(1, 0, len(row.token_ids) - row.prompt_length),)
    refused(InvalidSegment, "reward", lambda: training_rows(session, {session.segments[0].segment_id: 1.0}))


def _parsed(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    found = [
        c | {"function": c["function"] | {"arguments": json.loads(c["function"]["arguments"])}} for c in message["tool_calls"]
    ]
    return {**message, "tool_calls": found}


def refused(error: type[Exception], text: str, call: Callable[[], object]) -> None:
    """Check that a call raises an error whose text contains ``text``."""
    try:
        call()
    except error as found:
        assert text in str(found), f"{text!r} is in {found}"
        return
    raise AssertionError(f"{error.__name__} was not raised")


def changed(message: pb.Segment, name: str, value: object) -> pb.Segment:
    """The message with another value in one field, and a matching checksum unless that is the
    field."""
    copy = pb.Segment.FromString(message.SerializeToString())
    where, field = (copy.inline, name.removeprefix("inline.")) if name.startswith("inline.") else (copy, name)
    if name != "crc32c":
        copy.crc32c = 0
    setattr(where, field, value)
    return copy


def chat_model(text: Text, end: str, **options: Any) -> Model:
    """A model with the chat template of its tokenizer."""
    return Model(text, ChatTemplate(text), end, **options)
