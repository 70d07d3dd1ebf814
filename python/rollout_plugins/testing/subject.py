"""A plugin under test: it answers items, and each kind has its own form of them.

An item is a golden sample without what is expected. An answer is JSON, so that it can be compared
with the expected part of the sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollout.environment import Observation, Refusal, Result, Task, Turn
from rollout.hosting import wire
from rollout.hosting.child import ChildProcess
from rollout.hosting.host import KINDS
from rollout.hosting.manifest import Manifest
from rollout.hosting.supervised import SupervisedSidecar
from rollout.plugin.v1 import plugin_pb2 as pb
from rollout_plugins.testing.report import CheckFailed

Json = dict[str, Any]
_LONG = "word 1 " * 20_000
_STRANGE = "\u202e\U0001f600 \x00\ufeff e\u0301"


class Subject(Protocol):
    """A plugin under test. pid: of its process."""

    @property
    def pid(self) -> int: ...

    @property
    def starts(self) -> int:
        """How often its process was started."""
        ...

    async def start(self) -> str:
        """Load it; returns what it is. Raises ``RolloutError``."""
        ...

    async def answers(self, items: Sequence[Json]) -> list[Json]:
        """Its answers to items, in one batch where the kind has batches. Raises
        ``RolloutError``."""
        ...

    def unusual(self, item: Json) -> list[tuple[str, Json]]:
        """Items that data or a policy may contain, with names, made from a good one."""
        ...

    async def close(self) -> None: ...


class Hosted:
    """A plugin that answers ``rollout.plugin.v1``: a Python file or an installed package in a child
    process, or a sidecar."""

    def __init__(self, kind: str, name: str, source: Mapping[str, str] | Manifest, timeout: float) -> None:
        """name: by which it is called. timeout: seconds of a call."""
        self._kind, self._name, self._timeout = kind, name, timeout
        self._source = source
        self._runner: ChildProcess | SupervisedSidecar
        if isinstance(source, Manifest):
            self._runner = SupervisedSidecar(source)
        else:
            self._runner = ChildProcess([{"kind": kind, **source}])
        self._episode = 0
        self._starts = 0
        self._seen = 0

    @property
    def pid(self) -> int:
        return self._runner.pid

    @property
    def starts(self) -> int:
        if self._runner.pid != self._seen:
            self._starts, self._seen = self._starts + 1, self._runner.pid
        return self._starts

    async def start(self) -> str:
        handshake = await self._runner.start()
        info = next((each for each in handshake.plugins if each.kind == KINDS[self._kind] and each.name == self._name), None)
        if info is None:
            raise CheckFailed(f"it serves no {self._kind} `{self._name}`", fix="correct its name, or --kind")
        where = "in a child process"
        if isinstance(self._source, Manifest):
            where = f"at {self._source.address}" if self._source.address else f"started by {self._source.command[0]}"
        version = f" {info.version}" if info.version else ""
        return f"{self._kind} `{self._name}`{version}, {where}"

    async def close(self) -> None:
        await self._runner.close()

    async def answers(self, items: Sequence[Json]) -> list[Json]:
        match self._kind:
            case "reward" | "evaluation":
                return await self._scores(items)
            case "tool":
                return await self._results(items)
            case "environment":
                return await self._episodes(items)
            case _:
                return await self._rows(items)

    def unusual(self, item: Json) -> list[tuple[str, Json]]:
        match self._kind:
            case "reward" | "evaluation":
                return [
                    ("an empty completion", item | {"completion": ""}),
                    ("a completion of 140,000 characters", item | {"completion": _LONG}),
                    ("unusual characters", item | {"completion": _STRANGE}),
                    ("a row without fields", item | {"row": {}}),
                ]
            case "tool":
                given: Json = item.get("arguments", {})
                return [
                    ("no arguments", {"arguments": {}}),
                    ("an unknown argument", {"arguments": given | {"unknown_argument": 1}}),
                    ("arguments of other types", {"arguments": {key: ["x", None] for key in given}}),
                    ("a text of 140,000 characters", {"arguments": dict.fromkeys(given, _LONG)}),
                ]
            case "environment":
                turns: list[Json] = item.get("turns", [])
                return [
                    ("a row without fields", {"row": {}, "turns": turns[:1]}),
                    ("an empty answer", item | {"turns": [{"text": ""}]}),
                    ("an answer of 140,000 characters", item | {"turns": [{"text": _LONG}]}),
                    ("unusual characters", item | {"turns": [{"text": _STRANGE}]}),
                ]
            case _:
                return [("a split without a name", {"split": "", "index": 0}), ("an index after the end", {"index": 1 << 40})]

    async def _scores(self, items: Sequence[Json]) -> list[Json]:
        groups = [
            pb.RewardGroup(
                row_json=json.dumps(item.get("row", {})).encode(),
                samples=[
                    pb.RewardSample(
                        prompt=item.get("prompt", ""),
                        completion=item.get("completion", ""),
                        token_ids=np.array(item.get("token_ids", []), "<i4").tobytes(),
                    )
                ],
            )
            for item in items
        ]
        request: Any = pb.RewardRequest(plugin=self._name, groups=groups)
        method = "Reward"
        if self._kind == "evaluation":
            method, request = "Evaluate", pb.EvaluateRequest(plugin=self._name, groups=groups)
        scores = wire.scores_from((await self._runner.call(method, request, self._timeout)).scores)
        if len(scores) != len(items):
            raise CheckFailed(f"it returned {len(scores)} scores for {len(items)} samples", fix="return one for each, in order")
        return [
            {"reward": score.reward, "metrics": dict(score.metrics)}
            | ({"token_rewards": list(score.token_rewards)} if score.token_rewards else {})
            for score in scores
        ]

    async def _results(self, items: Sequence[Json]) -> list[Json]:
        calls = [
            pb.ToolCall(tool=self._name, call_id=str(number), arguments_json=json.dumps(item.get("arguments", {})))
            for number, item in enumerate(items)
        ]
        results = (await self._runner.call("CallTool", pb.CallToolRequest(calls=calls), self._timeout)).results
        if [each.call_id for each in results] != [each.call_id for each in calls]:
            raise CheckFailed(f"it returned {len(results)} results for {len(calls)} calls", fix="return one for each, in order")
        return [{"content": each.content, "reason": each.reason} for each in results]

    async def _episodes(self, items: Sequence[Json]) -> list[Json]:
        """Play the episodes of the items at the same time, turn by turn."""
        tasks: list[Task] = []
        for item in items:
            self._episode += 1
            tasks.append(Task(f"test/{self._episode}", json.dumps(item.get("row", {})).encode(), (0,), (7,), 0))
        reset = pb.ResetEnvironmentRequest(plugin=self._name, tasks=[wire.task_to(task) for task in tasks])
        starts = [wire.start_from(each) for each in (await self._runner.call("ResetEnvironment", reset, self._timeout)).starts]
        found: list[Json] = []
        for start in starts:
            found.append({"refused": start.reason} if isinstance(start, Refusal) else {"start": _text(start), "turns": []})
        number = 0
        while True:
            playing = [
                at for at, item in enumerate(items)
                if isinstance(starts[at], Observation) and len(item.get("turns", [])) > number
                and not any("outcome" in turn for turn in found[at]["turns"])
            ]  # fmt: skip
            if not playing:
                break
            turns = [_turn(tasks[at], starts[at], number, str(items[at]["turns"][number].get("text", ""))) for at in playing]
            step = pb.StepEnvironmentRequest(plugin=self._name, turns=[wire.turn_to(turn) for turn in turns])
            answers = (await self._runner.call("StepEnvironment", step, self._timeout)).answers
            for at, answer in zip(playing, answers, strict=True):
                found[at]["turns"].append(_answer(wire.answer_from(answer)))
            number += 1
        keys = [pb.EpisodeKey(task=task.key, sample=0) for task in tasks]
        await self._runner.call("CloseEnvironment", pb.CloseEnvironmentRequest(plugin=self._name, episodes=keys), self._timeout)
        return found

    async def _rows(self, items: Sequence[Json]) -> list[Json]:
        found: list[Json] = []
        for item in items:
            request = pb.ReadRowsRequest(
                plugin=self._name, split=item.get("split", "train"), offset=item.get("index", 0), limit=1
            )  # fmt: skip
            answer = await self._runner.call("ReadRows", request, self._timeout)
            if not answer.rows_json and not answer.end:
                raise CheckFailed("it returned no row, and not that no row follows", fix="set `end`")
            found.append({"row": json.loads(answer.rows_json[0]) if answer.rows_json else None})
        return found


def _turn(task: Task, start: Any, number: int, text: str) -> Turn:
    return Turn(task, 0, number, start.text, np.zeros(0, np.int32), text, False, start.token_ids, content=text)


def _text(found: Observation) -> Any:
    return [dict(message) for message in found.messages] or found.text or found.token_ids.tolist()


def _answer(found: Any) -> Json:
    if isinstance(found, Observation):
        return {"observation": _text(found)} | ({"reward": found.reward} if found.reward else {})
    if isinstance(found, Result):
        return {"reward": found.reward, "outcome": found.outcome, "reason": found.reason, "metrics": dict(found.metrics)}
    return {"children": len(found.turns)}


def samples_folder(plugin: str, base_dir: str) -> Path:
    """The folder of ``file.py:NAME`` or ``plugin.toml:NAME``; ``base_dir`` for others."""
    file = plugin.rpartition(":")[0]
    return Path(base_dir, file).parent if file.endswith((".py", ".toml")) else Path(base_dir)
