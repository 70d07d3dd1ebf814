"""Sessions with a model behind an OpenAI-compatible API, on a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.endpoint import Endpoint
from rollout.environment import Result, SessionError, SingleEpisode, Task, Turn
from rollout.hosting.episodes import Episodes
from rollout.secret import SecretError

Json = dict[str, Any]
TOOL: Json = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def said(text: str, finish: str = "stop", **more: Any) -> tuple[int, Json]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text, **more}, "finish_reason": finish}]}


class Model:
    """asked: the requests. answers: what is answered to each, the last one repeatedly."""

    def __init__(self) -> None:
        self.asked: list[Json] = []
        self.keys: list[str] = []
        self.answers: list[tuple[int, Json] | Callable[[], tuple[int, Json]]] = [said("yes")]
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                model.asked.append(body)
                model.keys.append(self.headers.get("Authorization", ""))
                answer = model.answers.pop(0) if len(model.answers) > 1 else model.answers[0]
                status, content = answer() if callable(answer) else answer
                data = content["raw"].encode() if "raw" in content else json.dumps(content).encode()
                self.send_response(status if self.path == "/v1/chat/completions" else 404)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model()
    yield made
    made.server.shutdown()
    made.server.server_close()


class Asks(SingleEpisode):
    """Asks another model after each turn. The first turn is followed by a second one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def reset(self, task: Task) -> str:
        self.other = self.sessions.open(self.endpoint, tools=[TOOL])
        return "begin"

    async def step(self, turn: Turn) -> Any:
        reply = await self.other.chat(turn.text)
        return reply.text if turn.number == 0 else Result(float(reply.text == "yes"))


def turn(number: int, text: str) -> Turn:
    return Turn(Task("t", b"{}", (0,), (1,)), 0, number, "", np.zeros(1, np.int32), text, False, content=text)


async def test_a_session_keeps_its_conversation(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", "secret")
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    model.answers = [said("", tool_calls=[call], reasoning_content="hm"), said("yes")]
    session = SingleEpisode().sessions.open(Endpoint(model.url, "m", api_key="env:OTHER_KEY", temperature=0), tools=[TOOL])
    first = await session.chat("add")
    [found] = first.tool_calls
    assert (found.name, found.arguments, first.reasoning) == ("add", {"x": 1}, "hm")
    second = await session.chat([{"role": "tool", "tool_call_id": "a", "content": "2"}])
    assert second.text == "yes" and not second.truncated
    assert model.asked[1] == {
        "model": "m",
        "temperature": 0,
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "2"},
        ],
    }
    assert model.keys == ["Bearer secret"] * 2


async def test_an_environment_asks_another_model(model: Model) -> None:
    endpoint = Endpoint(model.url, "m")
    episodes = Episodes(lambda: Asks(endpoint))
    task = turn(0, "").task
    await episodes.reset([task])
    [observation] = await episodes.step([turn(0, "one")])
    model.answers = [said("yes", "length")]
    [result] = await episodes.step([turn(1, "two")])
    assert observation == "yes" and isinstance(result, Result) and result.reward == 1
    assert [message["content"] for message in model.asked[1]["messages"]] == ["one", "yes", "two"]


async def test_an_overloaded_server_is_asked_again(model: Model) -> None:
    model.answers = [(503, {"error": "busy"}), (429, {"error": "busy"}), said("yes")]
    assert (await Endpoint(model.url, "m").chat([])).text == "yes" and len(model.asked) == 3


async def test_calls_at_the_same_time_are_not_queued(model: Model) -> None:
    barrier = threading.Barrier(16, timeout=20)

    def together() -> tuple[int, Json]:
        barrier.wait()
        return said("yes")

    model.answers = [together]
    endpoint = Endpoint(model.url, "m")
    assert len(await asyncio.gather(*(endpoint.chat([]) for _ in range(16)))) == 16


@pytest.mark.parametrize(
    ("answer", "reason", "text"),
    [
        ((401, {"error": "no key"}), "CHILD_REFUSED", 'answers 401: {"error": "no key"}; set `api_key`'),
        ((400, {"error": "no model m"}), "CHILD_REFUSED", "correct the URL, the model, or the parameters"),
        ((200, {"raw": "<html>"}), "CHILD_BAD_ANSWER", "is not JSON"),
        ((200, {"choices": []}), "CHILD_BAD_ANSWER", "has no message: {'choices': []}"),
        ((503, {"error": "down"}), "CHILD_UNREACHABLE", "answers 503"),
    ],
)
async def test_errors_have_a_reason_and_a_fix(model: Model, answer: tuple[int, Json], reason: str, text: str) -> None:
    model.answers = [answer]
    with pytest.raises(SessionError) as caught:
        await Endpoint(model.url, "m", timeout_seconds=0.6).chat([])
    assert caught.value.reason == reason and text in str(caught.value)


async def test_a_server_that_hangs_or_is_gone(model: Model) -> None:
    never = threading.Event()

    def hang() -> tuple[int, Json]:
        never.wait(30)
        return said("late")

    model.answers = [hang]
    with pytest.raises(SessionError, match=r"took longer than 0\.3 s; raise `timeout_seconds`") as caught:
        await Endpoint(model.url, "m", timeout_seconds=0.3).chat([])
    assert caught.value.reason == "CHILD_TIMEOUT"
    never.set()
    with pytest.raises(SessionError, match="can't reach the model") as caught:
        await Endpoint("http://127.0.0.1:9/v1", "m", timeout_seconds=0.6).chat([])
    assert caught.value.reason == "CHILD_UNREACHABLE"


def test_the_key_is_a_reference(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(" k \n")
    (tmp_path / "key").chmod(0o600)
    Endpoint("http://127.0.0.1:9/v1", "m", api_key=f"file:{tmp_path}/key")
    for wrong in ("sk-123", "env:", "env:NO_SUCH_KEY", f"file:{tmp_path}/none"):
        with pytest.raises(SecretError) as caught:
            Endpoint("http://127.0.0.1:9/v1", "m", api_key=wrong)
        assert "sk-123" not in str(caught.value)
