"""Messages that say the same are equal; others are not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rollout.session.v1 import session_pb2 as pb
from rollout_workers.sessions.forks import fork_reason
from rollout_workers.sessions.messages import assistant_message, canonical


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a\r\nb\n"}, {"role": "user", "content": [{"type": "text", "text": "a\nb"}]}),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "assistant", "content": "<think>x</think>\n\nyes"}, {"role": "assistant", "content": "yes "}),
        ({"role": "assistant", "content": "x</think>yes"}, {"role": "assistant", "content": "yes"}),
        ({"role": "assistant", "content": "<think>never ended"}, {"role": "assistant", "content": None}),
        (call('{"b": 1, "a": [1, 2]}'), call({"a": [1, 2], "b": 1})),
        (call('{"a": 1}'), {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'}),
        (call('{"a": 1}'), {"role": "assistant", "content": '{"name": "f", "parameters": {"a": 1}}'}),
        ({"role": "tool", "content": '{"b":1,"a":2}'}, {"role": "tool", "content": '{"a": 2, "b": 1}'}),
    ],
)
def test_the_same_message(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "if a:\n  b"}, {"role": "user", "content": "if a:\nb"}),
        ({"role": "user", "content": "a"}, {"role": "tool", "content": "a"}),
        (call('{"a": 1}'), call('{"a": 2}')),
        (call("not json"), call("other text")),
        ({"role": "assistant", "content": "<tool_call>{broken</tool_call>"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": '{"answer": 1}'}, {"role": "assistant", "content": '{"answer": 2}'}),
    ],
)
def test_different_messages(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(one) != canonical(other)


def test_a_sampled_text_becomes_a_message_with_its_calls() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    message = assistant_message(f"<think>hm</think>{text}")
    assert message["content"] == "Let me see." and message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert canonical(message) == canonical({"role": "assistant", "content": text})


def test_the_reason_of_a_fork() -> None:
    def talk(*texts: str) -> list[Any]:
        return [canonical({"role": "assistant" if at % 2 else "user", "content": text}) for at, text in enumerate(texts)]

    known = talk("one two three", "a", "b", "c", "d")
    assert fork_reason(known, known, 5) == pb.FORK_REASON_RESAMPLED
    assert fork_reason(known, talk("one two four"), 0) == pb.FORK_REASON_HISTORY_EDITED
    assert fork_reason(known, talk("summary of it all"), 0) == pb.FORK_REASON_HISTORY_COMPACTED
    assert fork_reason(known, talk("one two three", "c", "d"), 1) == pb.FORK_REASON_HISTORY_COMPACTED
    assert fork_reason(known, talk("one two three", "a", "other"), 2) == pb.FORK_REASON_HISTORY_EDITED
    instructed = [canonical({"role": "system", "content": "search"}), *known]
    assert fork_reason(known, instructed, 0) == pb.FORK_REASON_SUBAGENT


def test_sessions_import_no_torch() -> None:
    script = "import sys, rollout_workers.sessions.rows, rollout_workers.sessions.template; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
