"""The process behind ``rollout episodes replay`` and ``branch``. It needs no services: it plays the
environment of a plan, with the recorded turns of an episode or with a model.

Standard output gets one JSON object: ``steps`` and ``same`` of a replay, ``branches`` of a branch,
or ``error``.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
from blake3 import blake3
from google.protobuf import json_format

from rollout.environment import Task
from rollout.errors import RolloutError
from rollout.plan.v1.plan_pb2 import Plan
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout.snapshot.v1.snapshot_pb2 import Episode as Saved
from rollout_workers.data.prompts import PromptReader
from rollout_workers.engines.base import Engine, GroupRequest, SampleOutput, SamplingParams
from rollout_workers.environments import registry as environments
from rollout_workers.environments.episode import Episode, EpisodeRunner, Kept
from rollout_workers.environments.limits import Limits
from rollout_workers.inference.checkpoints import decode
from rollout_workers.inference.params import of_run
from rollout_workers.rewards.pinned import Pinned


class EpisodeNotSaved(RolloutError):
    """The environment has no state of the episode at the turn."""

    reason: ClassVar[str] = "EPISODE_NOT_SAVED"


class EpisodeDiverged(RolloutError):
    """The environment answers a recorded turn with something else."""

    reason: ClassVar[str] = "EPISODE_DIVERGED"


def episodes(path: str) -> int:
    """Answer the request at ``path``. Returns the exit code."""
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what the environment prints, also in its own process, is not a part of the answer
        try:
            answer = asyncio.run(_answer(request))
        except RolloutError as error:
            answer = {"error": {"reason": error.reason, "message": error.message, "fix": error.fix}}
        print(json.dumps(answer, ensure_ascii=False), file=out)
    return 0


async def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from rollout_workers.inference import worker  # the simulation replaces `load` there

    saved = Saved()
    json_format.ParseDict(request["episode"], saved)
    plan = Plan()
    json_format.ParseDict(request["plan"], plan, ignore_unknown_fields=True)
    spec = WorkerSpec(
        plan=plan,
        base_dir=request["base_dir"],
        run_directory=request["folder"],
        worker_id="episodes",
        initial_weights=request.get("weights", ""),
        initial_version=request.get("version", 0),
        threads=request.get("threads", 1),
    )
    config = plan.config
    model = worker.load(spec)

    def changed(message: str) -> None:
        raise EpisodeDiverged(message, fix="restore the files of the environment")

    pinned = Pinned(plan.inputs, spec.base_dir, changed, environment=True, plugins=plan.plugins)
    prompts = PromptReader.of_samples(config, model.text)
    context = environments.Context(config, prompts, None, model.text, spec.base_dir, pinned.verify_running, plan.tools, changed)
    player = _Player(Limits.of(config), of_run(config.sampling), model.text, config.model.chat_template)
    try:
        async with environments.opened(context) as environment:
            if request["do"] == "replay":
                steps = await player.replay(environment, saved, saved.turns)
                return {"steps": steps.steps, "same": not steps.problem, "problem": steps.problem}
            at = request.get("at") or saved.turns
            return {"branches": await player.branch(model.engine, environment, saved, at, request["branches"])}
    finally:
        await model.engine.shutdown()


@dataclass(slots=True)
class Replay:
    """What the environment answered to recorded turns. steps: one per turn. problem: where it first
    differs; empty if nowhere. kept: the episode after the last turn; None if it was not saved."""

    steps: list[dict[str, Any]]
    problem: str = ""
    kept: Kept | None = None


class _Player:
    def __init__(self, limits: Limits, params: SamplingParams, text: Any, chat: bool) -> None:
        self._limits, self._params, self._text, self._chat = limits, params, text, chat

    async def replay(self, environment: Any, saved: Saved, turns: int) -> Replay:
        """Play the first turns of an episode again."""
        task = Task("replay", saved.row_json, (saved.key.sample,), (saved.seed,), saved.row)
        want = decode(saved, task)
        said = [part for part in want.parts if isinstance(part, SampleOutput)][:turns]
        states: list[bytes] = []
        seen: list[Episode] = []

        def keep(episode: Episode, state: bytes) -> None:
            states.append(state)
            seen[:] = [episode]

        runner = self._runner(cast(Engine, _Recorded(said)), environment, keep)
        async with aclosing(runner.run([task])) as finished:
            async for [group] in finished:
                [got] = group.episodes
        steps = [{"turn": 0, "text": got.prompt.text, "same": np.array_equal(got.prompt.token_ids, want.prompt.token_ids)}]
        number = 0
        for place, (part, text) in enumerate(zip(want.parts, want.texts, strict=True)):
            if isinstance(part, SampleOutput):
                if number == turns:
                    break
                steps.append({"turn": number + 1, "said": text, "reward": want.rewards[number]})
                number += 1
                continue
            now = got.parts[place] if place < len(got.parts) else None
            answer = got.texts[place] if now is not None else ""
            reward = got.rewards[number - 1] if number <= len(got.rewards) else 0.0
            same = now is not None and np.array_equal(now.token_ids, part.token_ids) and reward == want.rewards[number - 1]
            steps[-1] |= {"text": text, "same": same} | ({} if same else {"answered": answer, "answered_reward": reward})
        wrong = next((step["turn"] for step in steps if not step.get("same")), None)
        problem = "" if wrong is None else "the environment answers differently " + (f"after turn {wrong}" if wrong else "first")
        if got.result is not None and got.result.outcome == "infra_failed":
            problem = f"the environment failed: {got.result.reason} {got.result.message}".strip()
        state = states[turns - 1] if len(states) >= turns else b""
        return Replay(steps, problem, Kept(seen[0], state) if state else None)

    async def branch(self, engine: Engine, environment: Any, saved: Saved, at: int, count: int) -> list[dict[str, Any]]:
        """Continue an episode several times after its turn ``at``: the first time with its own
        seed."""
        if not getattr(environment, "saves_episodes", False):
            raise EpisodeNotSaved(missing(self._limits.name), fix="define `state_dict(self)` and `load_state_dict(self, state)`")
        state = saved.environment_state
        if at != saved.turns:
            if not 1 <= at < saved.turns:
                raise EpisodeNotSaved(f"the episode has no turn {at}", fix=f"name a turn from 1 to {saved.turns}")
            played = await self.replay(environment, saved, at)
            if played.problem or played.kept is None:
                raise EpisodeDiverged(
                    f"the episode can't be played again up to turn {at}: {played.problem or 'it was not saved'}",
                    fix="make the environment depend on its row, its seed, and its turns only",
                )
            state = played.kept.state
        seeds = tuple(branch_seed(saved.seed, number) for number in range(count))
        task = Task("branch", saved.row_json, tuple(range(count)), seeds, saved.row)
        kept = []
        for number in range(count):
            copy = Saved.FromString(saved.SerializeToString())
            copy.key.sample = number
            kept.append(Kept(_cut(decode(copy, task), at), state))
        out: list[dict[str, Any]] = []
        async with aclosing(self._runner(engine, environment, None).run([task], kept)) as finished:
            async for [group] in finished:
                out = [_branch(number, episode, at) for number, episode in enumerate(group.episodes)]
        return out

    def _runner(self, engine: Engine, environment: Any, keep: Any) -> EpisodeRunner:
        return EpisodeRunner(engine, environment, self._text, self._params, limits=self._limits, chat=self._chat, keep=keep)


def missing(name: str) -> str:
    """What an environment lacks to save episodes."""
    return f"the environment `{name}` can't save single episodes: it has no method `state_dict` of one episode"


def branch_seed(seed: int, branch: int) -> int:
    """The seed of a branch (docs/wire.md, "Seeds"): branch 0 has the seed of its episode."""
    if branch == 0:
        return seed
    digest = blake3(b"rollout.branch.v1" + struct.pack("<QQ", seed, branch)).digest()
    return int.from_bytes(digest[:8], "little") & (1 << 63) - 1


def _cut(episode: Episode, turns: int) -> Episode:
    """The episode after its first turns, with the observation that follows them."""
    number = 0
    for place, part in enumerate(episode.parts):
        number += isinstance(part, SampleOutput)
        if number == turns and not isinstance(part, SampleOutput):
            del episode.parts[place + 1 :], episode.texts[place + 1 :]
            break
    for values in (episode.rewards, episode.turn_metrics, episode.clocks, episode.said):
        del values[turns:]
    return episode


def _branch(number: int, episode: Episode, at: int) -> dict[str, Any]:
    result = episode.result
    assert result is not None
    turns: list[dict[str, Any]] = []
    for part, text in zip(episode.parts, episode.texts, strict=False):
        if isinstance(part, SampleOutput):
            turns.append({"said": text, "reward": episode.rewards[len(turns)] if len(turns) < len(episode.rewards) else 0.0})
        elif turns:
            turns[-1]["text"] = text
    return {
        "branch": number,
        "turns": turns[at:],
        "reward": result.reward + sum(result.token_rewards),
        "outcome": result.outcome,
        "reason": result.reason,
    }


class _Recorded:
    """An engine that repeats recorded turns, and then ends the episode."""

    def __init__(self, turns: Sequence[SampleOutput]) -> None:
        self._turns = list(turns)

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncGenerator[SampleOutput]:
        for request in requests:
            if self._turns:
                turn = self._turns.pop(0)
                spans, text = turn.version_spans, turn.text
                yield SampleOutput(
                    request.request_id, 0, turn.token_ids, turn.logprobs, turn.raw_logprobs, spans, "stop", text=text
                )
            else:
                none = np.zeros(0, np.int32), np.zeros(0, np.float32)
                yield SampleOutput(request.request_id, 0, *none, None, (), "aborted", text="")

    async def abort(self, request_ids: Sequence[str]) -> None:
        pass
