"""The client of a teacher endpoint returns the log-probabilities of a plain call of the model, and
typed errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollout.config.v1.algorithm_pb2 import TeacherEndpointConfig
from rollout.teacher import TeacherBusy, TeacherEndpoint, TeacherError
from rollout_workers.data.prompts import Text
from rollout_workers.environments.teacher import client
from tests.teacher.server import Json, Served

IDS = [5, 6, 7, 8, 9, 10]


def endpoint(served: Served, text: Text, protocol: str = "echo", api_key: str = "") -> TeacherEndpoint:
    config = TeacherEndpointConfig(base_url=served.url, model="teacher", protocol=protocol, timeout_seconds=20.0, api_key=api_key)
    return client(config, text)


@pytest.mark.parametrize("protocol", ["echo", "prompt_logprobs"])
def test_logprobs_equal_a_plain_call_of_the_model(protocol: str, served: Served, text: Text) -> None:
    with torch.no_grad():
        logprobs = torch.log_softmax(served.model(input_ids=torch.tensor([IDS])).logits[0].double(), -1)
    wanted = [float(logprobs[place - 1, IDS[place]]) for place in range(3, len(IDS))]
    assert endpoint(served, text, protocol).logprobs(IDS, 3) == pytest.approx(wanted, abs=1e-6)
    assert served.asked[0]["prompt"] == IDS and served.asked[0]["model"] == "teacher"


def test_the_key_is_read_from_its_reference(served: Served, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    served.key = "secret"
    monkeypatch.setenv("TEACHER_KEY", "secret")
    assert endpoint(served, text, api_key="env:TEACHER_KEY").logprobs(IDS, 5)
    with pytest.raises(TeacherError) as caught:
        endpoint(served, text).logprobs(IDS, 5)
    assert caught.value.reason == "TEACHER_REFUSED" and "api_key" in caught.value.fix


def _choice(change: Callable[[Json], object]) -> Callable[[Json], Json]:
    def spoil(answer: Json) -> Json:
        change(answer["choices"][0])
        return answer

    return spoil


def _shift(choice: Json) -> None:
    choice["logprobs"]["tokens"] = [*choice["logprobs"]["tokens"][1:], "x"]


def _begin(choice: Json) -> None:
    for values in choice["logprobs"].values():
        values.insert(0, None)
        values.insert(0, None)


SPOILED: dict[str, tuple[str, str, bool, str, Callable[[Json], Any]]] = {
    "it has a failure": ("TEACHER_UNREACHABLE", "answers 503", True, "echo", lambda _: 503),
    "it is too busy": ("TEACHER_BUSY", "answers 429", True, "echo", lambda _: 429),
    "no such model": ("TEACHER_REFUSED", "answers 404", False, "echo", lambda _: 404),
    "no JSON": ("TEACHER_BAD_ANSWER", "is not JSON", False, "echo", lambda _: b"<html>"),
    "a list": ("TEACHER_BAD_ANSWER", "not a JSON object", False, "echo", lambda _: b"[]"),
    "no choices": ("TEACHER_BAD_ANSWER", "no log-probabilities", False, "echo", lambda _: {"choices": []}),
    "no echo": ("TEACHER_BAD_ANSWER", "no log-probabilities", False, "echo", _choice(lambda c: c.update(logprobs=None))),
    "no prompt_logprobs": ("TEACHER_BAD_ANSWER", "other `protocol`", False, "prompt_logprobs", _choice(lambda c: c.clear())),
    "a begin token": ("TEACHER_TOKENS_DIFFER", "the request had 6 tokens", False, "echo", _choice(_begin)),
    "other texts": ("TEACHER_TOKENS_DIFFER", "token 0 of the request is 5", False, "echo", _choice(_shift)),
    "other ids": (
        "TEACHER_TOKENS_DIFFER", "token 2 of the request is 7", False, "prompt_logprobs",
        _choice(lambda c: c["prompt_logprobs"].__setitem__(2, {"9": {"logprob": -1.0}})),
    ),
    "fewer": ("TEACHER_TOKENS_DIFFER", "has 5", False, "prompt_logprobs", _choice(lambda c: c["prompt_logprobs"].pop())),
    "no number": (
        "TEACHER_BAD_ANSWER", "of token 4 is None", False, "echo",
        _choice(lambda c: c["logprobs"]["token_logprobs"].__setitem__(4, None)),
    ),
    "more than certain": (
        "TEACHER_BAD_ANSWER", "of token 4 is 0.5", False, "echo",
        _choice(lambda c: c["logprobs"]["token_logprobs"].__setitem__(4, 0.5)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_failures_have_typed_errors(name: str, served: Served, text: Text) -> None:
    reason, words, again, protocol, served.spoil = SPOILED[name]
    with pytest.raises(TeacherError) as caught:
        endpoint(served, text, protocol).logprobs(IDS, 3)
    assert (caught.value.reason, caught.value.again) == (reason, again) and words in str(caught.value), caught.value


@pytest.mark.parametrize(("header", "after"), [("7", 7.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 5.0), ("", 5.0)])
def test_a_busy_server_says_when_to_ask_again(header: str, after: float, served: Served, text: Text) -> None:
    served.spoil, served.headers = lambda _: 429, {"Retry-After": header} if header else {}
    with pytest.raises(TeacherBusy) as caught:
        endpoint(served, text).logprobs(IDS, 3)
    assert caught.value.after == after


def test_an_unreachable_server_is_a_typed_error(served: Served, text: Text) -> None:
    asked = endpoint(served, text)
    served.close()
    with pytest.raises(TeacherError) as caught:
        asked.logprobs(IDS, 3)
    assert caught.value.reason == "TEACHER_UNREACHABLE" and caught.value.again
