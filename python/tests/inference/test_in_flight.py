"""What a worker does for each group is read from its parts when someone asks."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollout.environment import Result, Task, failed
from rollout.hosting.lines import At
from rollout.hosting.look import Look
from rollout.hosting.supervised import Condition
from rollout.run.v1.run_pb2 import PromptGroup
from rollout_workers.environments.episode import FinishedGroup
from rollout_workers.environments.limits import Limits
from rollout_workers.inference.in_flight import InFlight
from rollout_workers.inference.sampler import Failure, Failures, Refusal, _refusal  # pyright: ignore[reportPrivateUsage]
from rollout_workers.worker.calls import Call, Calls
from rollout_workers.worker.spec import Identity
from rollout_workers.worker.stream import WorkItem


def item(index: int, age: float) -> WorkItem:
    group = PromptGroup(run_id="run-1", index=index, position=80 + index, row_json=f'{{"row": {index}}}'.encode())
    return WorkItem(group, "reply", 1, arrived=time.monotonic() - age)


class Parts:
    """The puller and the sampler of a worker with six groups."""

    def __init__(self) -> None:
        self.generating = 3.0
        self.refusal: Refusal | None = None
        self.failed = Failures()
        self.items = [item(index, 10.0 * (6 - index)) for index in range(6)]

    def waiting_items(self) -> list[tuple[WorkItem, bool]]:
        return [(self.items[0], True), (self.items[1], False)]

    def active_items(self) -> list[WorkItem]:
        return self.items[2:]

    def doing(self) -> dict[str, tuple[str, float]]:
        now = time.time()
        return {
            "0/2/0": ("ENVIRONMENT_STEP", now - 30),
            "0/3/0": ("ENVIRONMENT_STEP", now - 29),
            "0/4/0": ("GENERATE", now - self.generating),
        }

    def unsent(self) -> dict[str, float]:
        return {"0/5/0": time.time() - 1}

    def refused(self) -> Refusal | None:
        return self.refusal

    def failures(self) -> list[tuple[int, Failure]]:
        return self.failed.items()


def in_flight(parts: Any, calls: Calls, speed: float = 0.0) -> InFlight:
    limits = Limits(name="game.py:Game", turns=True, turn_seconds=300)
    who = Identity("run-1", "inference-2", "inference", 1)
    return InFlight(who, parts, parts, calls, limits, speed=lambda: speed, version=lambda: 11)


def test_each_group_is_in_one_wait_and_the_longest_comes_first() -> None:
    calls = Calls()
    flight = in_flight(cast(Any, Parts()), calls)
    with calls.open(Call("REWARD_CALL", "judge.py:judge", (b'{"row": 2}',), 60.0, since=time.time() - 25)):
        found = flight.waits()
    assert [(w.reason, w.owner, w.limit_seconds, list(w.positions), w.groups) for w in found] == [
        ("WEIGHTS", "learner-controller", 0, [80], 1),
        ("SLOT", "inference-2", 0, [81], 1),
        ("ENVIRONMENT_STEP", "game.py:Game", 300, [83], 1),
        ("REWARD_CALL", "judge.py:judge", 60, [82], 1),
        ("GENERATE", "inference-2", 0, [84], 1),
        ("PUBLISH", "nats", 0, [85], 1),
    ]
    assert [w.evidence for w in found] == [
        "inference-2 has weights version 11 and waits for newer ones, for 60 s",
        "the groups wait for a free slot of the engine, for 50 s",
        "the environment game.py:Game has computed a step for 29 s of 5 min",
        "the reward call to judge.py:judge has taken 25 s of 60 s",
        "the engine has generated for 3 s, and made no token in the last seconds",
        "the samples are finished, and NATS or the storage service has not accepted them for 1 s",
    ]
    assert all(w.fix and list(w.subjects) == ["inference-2"] for w in found)
    assert time.time() - found[3].since.ToMilliseconds() / 1000 == pytest.approx(25, abs=1)
    steps = [list(w.positions) for w in flight.waits() if w.reason == "ENVIRONMENT_STEP"]
    assert steps == [[82, 83]], "the call has returned"


def test_an_environment_worker_that_shows_no_life_is_named() -> None:
    class Playing(Parts):
        def doing(self) -> dict[str, tuple[str, float]]:
            return {key: ("environment-1", time.time() - 7) for key in super().doing()}

    found = next(w for w in in_flight(cast(Any, Playing()), Calls()).waits() if w.reason == "ENVIRONMENT_WORKER")
    assert (found.owner, found.limit_seconds, list(found.positions), found.groups) == ("environment-1", 0, [82, 83, 84], 3)
    assert found.evidence == "environment-1 has not answered for 7 s" and "`rollout logs worker run-1 environment-1`" in found.fix


def test_an_evaluation_names_what_it_does_longest_and_no_groups() -> None:
    calls, now = Calls(), time.time()
    rows = [(("GENERATE", now - 3), b"a"), (("ENVIRONMENT_STEP", now - 40), b"b")]
    flight = replace(in_flight(cast(Any, Parts()), calls), held_out=lambda: rows)
    with calls.open(Call("TEACHER_CALL", "http://teacher/v1", (b"b",), 0.0, since=now - 39)):
        found = flight.waits()[-1]
    assert (found.reason, found.owner, found.groups, list(found.positions)) == ("TEACHER_CALL", "teacher", 0, [])
    assert found.evidence == (
        "the logprobs of the teacher at http://teacher/v1 have taken 39 s, with retries; "
        "the evaluation waits for 2 held-out prompts"
    )
    assert "eval.max_prompts" in found.fix
    generating = [(("GENERATE", now - 30), b"a"), (("ENVIRONMENT_STEP", now - 20), b"b")]
    for speed, reason in ((0.0, "ENVIRONMENT_STEP"), (7.0, "GENERATE")):
        flight = replace(flight, held_out=lambda: generating, speed=lambda speed=speed: speed)
        assert flight.waits()[-1].reason == reason, "an idle engine is not the cause while something else computes"


def test_the_process_and_the_line_of_the_longest_call_are_named() -> None:
    calls = Calls()
    flight = in_flight(cast(Any, Parts()), calls)
    reward = Look(4711, "Reward", At("/job/judge.py", 12, "judge"), "waits for an answer of 10.0.0.7:443", "restart 10.0.0.7:443")
    step = Look(4712, "StepEnvironment", None, "", "")
    with calls.open(Call("REWARD_CALL", "judge.py:judge", (b'{"row": 2}',), 60.0, since=time.time() - 25)):
        found = {w.reason: w for w in flight.waits([reward, step])}
    called, stepped = found["REWARD_CALL"], found["ENVIRONMENT_STEP"]
    assert (called.process, called.location) == (4711, "/job/judge.py:12")
    assert called.evidence == (
        "the reward call to judge.py:judge has taken 25 s of 60 s; its process 4711 is at judge.py:12 (judge) "
        "and waits for an answer of 10.0.0.7:443"
    )
    assert called.fix == (
        "restart 10.0.0.7:443; `kill -9 4711` ends the call now, and its groups are tried again; "
        "after the limit (reward.timeout_seconds) the call is ended and repeated"
    )
    assert (stepped.process, stepped.location) == (4712, "")
    assert "in process 4712" in stepped.evidence and "see why it is slow" in stepped.fix
    assert found["GENERATE"].process == 0, "no user code"
    waiting = replace(step, does="waits for the tool `lookup` of the MCP server `capitals`", fix="see process 4713")
    stepped = next(w for w in flight.waits([waiting]) if w.reason == "ENVIRONMENT_STEP")
    assert stepped.evidence.endswith("; its process 4712 waits for the tool `lookup` of the MCP server `capitals`")
    assert stepped.fix.startswith("see process 4713; `kill -9 4712`")
    read = replace(reward, at=At("/job/judge.py", 12, "judge", source="return ask(text)"))
    for each, end in ((read, ", and waits for an answer of 10.0.0.7:443"), (replace(read, does=""), "")):
        with calls.open(Call("REWARD_CALL", "judge.py:judge", (b'{"row": 2}',), 60.0)):
            called = next(w for w in flight.waits([each]) if w.reason == "REWARD_CALL")
        assert called.evidence.endswith(f"is at judge.py:12 (judge), `return ask(text)`{end}")
    boxed = replace(reward, pid=0, does="", fix="")
    with calls.open(Call("REWARD_CALL", "judge.py:judge", (b'{"row": 2}',), 60.0)):
        called = next(w for w in flight.waits([boxed]) if w.reason == "REWARD_CALL")
    assert called.evidence.endswith("; its process in the sandbox is at judge.py:12 (judge)")
    assert (called.process, called.location) == (0, "/job/judge.py:12") and "kill" not in called.fix


def test_samples_that_a_disk_without_inodes_refuses_have_that_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    flight = in_flight(cast(Any, parts), Calls())
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=9, f_favail=0))
    for name, words, fix in ((None, "No space left", "free some"), ("/state/payload", "no inodes are left", "delete files")):
        parts.refusal = _refusal(OSError(errno.ENOSPC, "No space left on device", name), None)
        [found] = [wait for wait in flight.waits() if wait.reason == "DISK_FULL"]
        assert words in found.evidence and found.fix.startswith(fix)


def _finished(*results: Result) -> FinishedGroup:
    task = Task(key="0/0/0", row_json=b"{}", samples=tuple(range(len(results))), seeds=(0,) * len(results))
    return FinishedGroup(task, cast(Any, tuple(SimpleNamespace(result=result) for result in results)))


def test_why_groups_failed_is_known_until_an_attempt_succeeds() -> None:
    parts, good = Parts(), Result(reward=1.0)
    for position in (7, 5, 9):
        parts.failed.add(position, _finished(good, failed("REWARD_RAISED", f"judge.py:12: KeyError: 'unit {position}'")))
    parts.failed.add(5, _finished(failed("REWARD_TIMEOUT", "the reward of 2 samples took longer than 1 s")))
    parts.failed.add(9, _finished(good, good))
    timeout, raised = in_flight(cast(Any, parts), Calls()).waits()[-2:]
    assert (timeout.reason, list(timeout.positions), timeout.failures, timeout.groups) == ("REWARD_TIMEOUT", [5], 1, 0)
    assert (raised.reason, list(raised.positions), raised.failures) == ("REWARD_RAISED", [7], 1)
    assert raised.evidence == "an attempt failed on inference-2, the last one 0 s ago: judge.py:12: KeyError: 'unit 7'"


def test_failures_with_other_numbers_are_one_wait() -> None:
    parts = Parts()
    for position in [3, *range(40)]:
        parts.failed.add(position, _finished(failed("REWARD_TIMEOUT", f"the reward of {position} samples took longer than 1 s")))
    [found] = [wait for wait in in_flight(cast(Any, parts), Calls()).waits() if wait.failures]
    assert list(found.positions) == list(range(32)) and found.failures == 41


def test_a_group_that_waits_for_the_reward_of_others_names_their_call() -> None:
    calls, parts = Calls(), Parts()
    flight = replace(in_flight(cast(Any, parts), calls), limits=Limits(name="judge.py:judge"))
    with calls.open(Call("REWARD_CALL", "judge.py:judge", (b'{"row": 2}',), 60.0, since=time.time() - 25)):
        [found] = [wait for wait in flight.waits() if wait.reason == "REWARD_CALL"]
    assert list(found.positions) == [82, 83]


def test_a_slow_engine_and_a_hanging_one_differ() -> None:
    parts = Parts()
    parts.generating = 40.0
    hanging, slow = (
        next(w for w in in_flight(cast(Any, parts), Calls(), speed).waits() if w.reason == "GENERATE") for speed in (0.0, 31.0)
    )
    assert hanging.evidence.endswith("made no token in the last seconds") and "limits.stall_seconds" in hanging.fix
    assert slow.evidence == "the engine has generated for 40 s, at 31 tokens a second" and "engine.workers" in slow.fix


def test_a_full_disk_is_named_while_samples_are_refused() -> None:
    parts = Parts()
    parts.refusal = Refusal("storage: 10 MiB are free", time.time() - 20, full=True)
    refused = in_flight(cast(Any, parts), Calls()).waits()[-1]
    assert (refused.owner, refused.reason, refused.groups) == ("user", "DISK_FULL", 0)
    assert refused.evidence == "the samples of inference-2 are not accepted, and sampled again: storage: 10 MiB are free"
    parts.refusal = Refusal("the payload is not known", time.time(), full=False)
    assert in_flight(cast(Any, parts), Calls()).waits()[-1].reason == "PUBLISH_REFUSED"


def test_a_call_is_open_until_it_returns() -> None:
    calls = Calls()
    with pytest.raises(KeyError), calls.open(Call("TOOL_CALL", "search", (b"a", b"b"), 30.0)):
        found = calls.of(b"b")
        assert found is not None and found.name == "search" and calls.of(b"c") is None
        raise KeyError
    assert calls.of(b"b") is None


def test_attempts_that_a_sidecar_failed_have_its_reason_and_fix() -> None:
    calls, parts = Calls(), Parts()
    condition = Condition("PLUGIN_BLOCKED", "judge", "it did not answer health checks", "let it answer", time.time() - 5, True)
    calls.supervise("judge.toml:judge", lambda: condition)
    late = "the sidecar `judge` did not start again within 3 s: it did not answer health checks"
    parts.failed._of[82] = Failure("PLUGIN_RESTARTING", late, time.time() - 2, 3)
    parts.failed._of[83] = Failure("PLUGIN_EXITED", "of another sidecar", time.time() - 3, 1)
    found = {tuple(wait.positions): wait for wait in in_flight(cast(Any, parts), calls).waits() if wait.failures}
    assert (found[82,].reason, found[82,].owner, found[82,].fix) == ("PLUGIN_BLOCKED", "judge", "let it answer")
    assert found[82,].evidence.count("did not answer health checks") == 1 and found[83,].reason == "PLUGIN_EXITED"


@pytest.mark.parametrize("ongoing", [True, False])
def test_a_sidecar_that_restarts_is_named_while_groups_wait_and_a_minute_after(ongoing: bool) -> None:
    calls = Calls()
    condition = Condition("PLUGIN_RESTARTING", "judge", "it ended with signal 9", "see its output", time.time() - 5, ongoing)
    calls.supervise("judge.toml:judge", lambda: condition)
    flight = in_flight(cast(Any, Parts()), calls)
    with calls.open(Call("REWARD_CALL", "judge.toml:judge", (b'{"row": 2}',), 60.0, since=time.time() - 25)):
        found = {(wait.reason, wait.owner): wait for wait in flight.waits()}
    named = found["PLUGIN_RESTARTING", "judge"]
    assert named.evidence == "the sidecar judge: it ended with signal 9" and named.fix == "see its output"
    assert list(named.positions) == ([82] if ongoing else [])
    assert (("REWARD_CALL", "judge.toml:judge") in found) is not ongoing
