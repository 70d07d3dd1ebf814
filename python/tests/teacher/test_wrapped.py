"""The teacher's environment around environments of several turns."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from rollout.environment import ManagedEnvironment, Observation, Result, SingleEpisode, Task, Turn
from rollout.hosting.episodes import Checked, Episodes
from rollout.run.v1.run_pb2 import PromptGroup
from rollout.trajectory.v1.trajectory_pb2 import Trajectory
from rollout.weights.v1.weights_pb2 import WeightsReceipt
from rollout_testing.engine import ScriptedEngine
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import GroupRequest, SamplingParams
from rollout_workers.environments.episode import EpisodeRunner
from rollout_workers.environments.limits import Limits
from rollout_workers.environments.teacher import TeacherEnvironment
from rollout_workers.inference.encode import encode_group

HOLDINGS: Any = SimpleNamespace(of=lambda version: WeightsReceipt(version=version or 0), digest=lambda version: "")


class Teacher:
    """Its logprob of a token is minus the number of tokens before it."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def logprobs(self, token_ids: Sequence[int], prompt_tokens: int) -> list[float]:
        self.asked.append(list(token_ids))
        return [-float(n) for n in range(prompt_tokens, len(token_ids))]

    def close(self) -> None: ...


def around(inner: Any, teacher: Teacher) -> TeacherEnvironment:
    return TeacherEnvironment(inner, cast(Any, teacher), retries=0, concurrency=2)


class Two(SingleEpisode):
    """Ends after two turns."""

    def reset(self, task: Task) -> str:
        return "1+1="

    def step(self, turn: Turn) -> Observation | Result:
        return Result(1.0) if turn.number else Observation(text="+1=")


async def test_the_teacher_scores_all_turns_of_an_episode(text: Text) -> None:
    teacher = Teacher()
    environment = around(Checked(Episodes(Two), "Two", None), teacher)

    def answer(request: GroupRequest, sample: int) -> list[int]:
        return text.encode(["33" if "#" in request.request_id else "2"], special=False)[0].tolist()

    limits = Limits("test", turns=True)
    runner = EpisodeRunner(ScriptedEngine(answer), environment, text, SamplingParams(max_tokens=64), limits=limits)
    [groups] = [groups async for groups in runner.run([Task("t", b"{}", (0,), (1,))])]
    [envelope] = encode_group(PromptGroup(run_id="run", group_size=1), groups[0], HOLDINGS, "inference-0")
    trajectory = Trajectory.FromString(envelope.payload)
    ids = np.frombuffer(trajectory.token_ids, "<i4").tolist()
    assert text.decode([np.array(ids, np.int32)]) == ["1+1=2+1=33"] and teacher.asked == [ids]
    prompt = trajectory.prompt_tokens
    logprobs = np.frombuffer(trajectory.teacher_logprobs, "<f4").tolist()
    assert logprobs == [0.0] * prompt + [-float(n) for n in range(prompt, len(ids))]
    environment.stop()


class Managed(Episodes):
    """Declares how it is called when it has started."""

    batched, waits_for_siblings = True, False
    started, stopped = False, False

    async def start(self) -> None:
        self.started, self.batched, self.waits_for_siblings = True, False, True

    async def shutdown(self) -> None:
        self.stopped = True


async def test_the_wrapped_environment_is_started_and_called_as_it_declares() -> None:
    inner = Managed(Two)
    before = around(inner, Teacher())
    assert isinstance(before, ManagedEnvironment) and (before.batched, before.waits_for_siblings) == (True, False)
    await before.start()
    after = around(inner, Teacher())
    for each in (before, after):
        assert inner.started and (each.batched, each.waits_for_siblings) == (False, True)
    await before.shutdown()
    assert inner.stopped
    after.stop()
