"""The dry calls of sidecars: each is started, called once, and ended."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollout.environment import Refusal, Task, Turn
from rollout.hosting import wire
from rollout.hosting.answers import EnvironmentBadResult
from rollout.hosting.exchange import tool_schema
from rollout.hosting.host import request_type
from rollout.hosting.manifest import read_manifest
from rollout.hosting.scorers import kind_of
from rollout.hosting.supervised import SupervisedSidecar
from rollout.plugin import RewardError, Sample
from rollout.plugin.v1 import plugin_pb2 as pb
from rollout.probe.tokenizer import Json


async def sidecar_call(request: Json, samples_of: Callable[[list[Json], str], list[Sample]], began: Callable[[], None]) -> Json:
    """Call the reward of a manifest once. Calls ``began`` before. Raises ``RolloutError``."""
    model, limit = request.get("model", ""), float(request["timeout_seconds"])
    kind = kind_of(request["plugin"], request["base_dir"], evaluates=bool(request.get("evaluates")))
    manifest = read_manifest(request["plugin"], request["base_dir"], kind=kind)
    method = "Evaluate" if kind == "evaluation" else "Reward"
    sidecar = SupervisedSidecar(manifest)
    samples, held_out = samples_of(request["samples"], model), samples_of(request.get("held_out", []), model)
    try:
        await sidecar.start()
        began()
        start = time.monotonic()
        scores = wire.scores_from((await sidecar.call(method, reward_request(manifest.name, samples, method), limit)).scores)
        if held_out:
            try:
                await sidecar.call(method, reward_request(manifest.name, held_out, method), limit)
            except RewardError as error:
                error.message = f"on the first held-out row: {error.message}"
                raise
    finally:
        await sidecar.close()
    return {
        "scores": [{"reward": score.reward, "metrics": dict(score.metrics)} for score in scores],
        "parts": any(score.token_rewards or score.steps for score in scores),
        "files": [str(path) for path in manifest.files],
        "seconds": time.monotonic() - start,
    }


async def sidecar_episode(request: Json, began: Callable[[], None]) -> Json:
    """Play the first turn of the rows in the environment of a manifest, with an empty answer. Calls
    ``began`` before. Raises ``RolloutError``."""
    limit = float(request["timeout_seconds"])
    manifest = read_manifest(request["plugin"], request["base_dir"], kind="environment")
    sidecar = SupervisedSidecar(manifest, args=request.get("args") or "{}")
    tasks = [
        Task(f"plan/{number}", json.dumps(row).encode(), (0, 1), (2 * number, 2 * number + 1), number)
        for number, row in enumerate(request["rows"])
    ]
    name = manifest.name
    try:
        handshake = await sidecar.start()
        began()
        start = time.monotonic()
        reset = pb.ResetEnvironmentRequest(plugin=name, tasks=[wire.task_to(task) for task in tasks])
        starts = [wire.start_from(each) for each in (await sidecar.call("ResetEnvironment", reset, limit)).starts]
        turns: list[Turn] = []
        for task, first in zip(tasks, starts, strict=True):
            if isinstance(first, Refusal):
                raise EnvironmentBadResult(
                    f"`{name}` refused training row {task.row + 1}: {first.message} ({first.reason})",
                    fix="correct the row, or what the environment expects of it",
                )
            turns.append(Turn(task, 0, 0, first.text, np.zeros(0, np.int32), "", False, first.token_ids))
        step = pb.StepEnvironmentRequest(plugin=name, turns=[wire.turn_to(turn) for turn in turns])
        for answer in (await sidecar.call("StepEnvironment", step, limit)).answers:
            if answer.result.reason == EnvironmentBadResult.reason:
                message, _, fix = answer.result.message.partition("; ")
                raise EnvironmentBadResult(message, fix=fix)
        keys = [pb.EpisodeKey(task=task.key, sample=sample) for task in tasks for sample in task.samples]
        await sidecar.call("CloseEnvironment", pb.CloseEnvironmentRequest(plugin=name, episodes=keys), limit)
    finally:
        await sidecar.close()
    saves = any(info.saves_episodes for info in handshake.plugins if info.name == name)
    files = [str(path) for path in manifest.files]
    return {"files": files, "name": name, "seconds": time.monotonic() - start, "saves_episodes": saves}


async def sidecar_tool(plugin: str, base_dir: str) -> list[str]:
    """Start the tool of a manifest, and check how it describes itself. Returns its files. Raises
    ``RolloutError``."""
    manifest = read_manifest(plugin, base_dir, kind="tool")
    sidecar = SupervisedSidecar(manifest)
    try:
        tool_schema(await sidecar.start(), manifest.name)
    finally:
        await sidecar.close()
    return [str(path) for path in manifest.files]


def reward_request(name: str, samples: Sequence[Sample], method: str = "Reward") -> Any:
    """A request of ``Reward`` or ``Evaluate`` with a group for each sample."""
    request: Any = request_type(method)(plugin=name)
    for each in samples:
        ids = array("i", each.token_ids).tobytes()
        sample = pb.RewardSample(prompt=each.prompt, completion=each.completion, token_ids=ids)
        request.groups.add(row_json=json.dumps(dict(each.row)).encode(), samples=[sample])
    return request
