"""Runs episodes: alternates between samples of the engine and steps of the environment.

Groups do not wait for each other: while some are decoded, others are scored. Turns that are sampled
at the same time are passed to the environment in one step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollout.environment import (
    Answer,
    ChildTurn,
    ChildTurns,
    Environment,
    Message,
    Observation,
    Refusal,
    Reply,
    Result,
    Task,
    Turn,
    calls_of,
    failed,
    reason_of,
)
from rollout.errors import RolloutError
from rollout.hosting.answers import answers_of, starts_of
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import Engine, GroupRequest, SampleOutput, SamplingParams, VersionSpan
from rollout_workers.environments.dialogue import Dialogue
from rollout_workers.environments.limits import Limits, credited
from rollout_workers.worker.telemetry import span

log = logging.getLogger(__name__)


_NOTHING = Observation()
_UNLIMITED = Limits()


@dataclass(slots=True)
class Clock:
    """When a turn was asked for, sampled, and answered: seconds since 1970. 0: not yet. tools:
    duration of each tool call in seconds."""

    asked: float
    sampled: float = 0.0
    answered: float = 0.0
    tools: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class Episode:
    """One sample of a task, which grows until it has a result.

    prompt: the first observation. parts: the sampled outputs and further observations (without
    logprobs), in order, with the text of each in ``texts``. rewards, turn_metrics: of each turn so
    far. said: what the policy said in each turn, in an episode of messages. clocks: of each turn.

    children: the child sessions by number. asked: the turn after which the environment asked some
    of them, until all have replied; replies: so far. Of a child, parent is the episode that opened
    it, after the turn ``since``.
    """

    task: Task
    place: int  # index into task.samples
    prompt: Observation
    parts: list[SampleOutput | Observation] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turn_metrics: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    said: list[Message] = field(default_factory=list[Message])
    began: float = field(default_factory=time.time)
    clocks: list[Clock] = field(default_factory=list["Clock"])
    result: Result | None = None
    children: dict[int, Episode] = field(default_factory=dict[int, "Episode"])
    asked: tuple[Turn, ChildTurns] | None = None
    replies: dict[int, Reply] = field(default_factory=dict[int, Reply])
    parent: Episode | None = None
    number: int = 0
    since: int = 0

    @property
    def root(self) -> Episode:
        """The episode that the environment runs: this one, or the one that opened it."""
        return self.parent or self

    @property
    def seed(self) -> int:
        """The seed of the first turn."""
        seed = self.task.seeds[self.place]
        return seed if self.parent is None else child_seed(seed, self.number)

    @property
    def name(self) -> str:
        """Unique among the open episodes."""
        name = f"{self.task.key}#{self.sample}"
        return name if self.parent is None else f"{name}/{self.number}"

    @property
    def sample(self) -> int:
        return self.task.samples[self.place]

    @property
    def key(self) -> tuple[str, int]:
        """The name of the episode for the environment."""
        return self.task.key, self.sample

    @property
    def turns(self) -> int:
        return sum(isinstance(part, SampleOutput) for part in self.parts)

    @property
    def cut(self) -> bool:
        """Whether the last turn ended at the token limit."""
        last = self.parts[-1] if self.parts else None
        return isinstance(last, SampleOutput) and last.finish_reason == "length"

    def spans(self) -> list[VersionSpan]:
        """The versions of the weights over the completion, without gaps: an observation between two
        turns belongs to the turn after it."""
        if len(self.parts) == 1 and isinstance(self.parts[0], SampleOutput):
            return list(self.parts[0].version_spans)
        spans: list[VersionSpan] = []
        start = at = 0
        for part in self.parts:
            if isinstance(part, SampleOutput):
                for span in part.version_spans:
                    end = at + span.end
                    if spans and spans[-1].version == span.version:
                        spans[-1] = VersionSpan(span.version, spans[-1].start, end)
                    else:
                        spans.append(VersionSpan(span.version, start, end))
                    start = end
            at += len(part.token_ids)
        return spans

    def turn_spans(self) -> list[tuple[int, int]]:
        """The first token of each turn and one past the last, in the completion."""
        spans: list[tuple[int, int]] = []
        at = 0
        for part in self.parts:
            if isinstance(part, SampleOutput):
                spans.append((at, at + len(part.token_ids)))
            at += len(part.token_ids)
        return spans

    @property
    def tokens(self) -> int:
        """Number of tokens, with those of the child sessions."""
        own = len(self.prompt.token_ids) + sum(len(part.token_ids) for part in self.parts)
        return own + sum(child.tokens for child in self.children.values())

    def context(self) -> NDArray[np.int32]:
        """All tokens of the episode, without those of the child sessions."""
        return np.concatenate([self.prompt.token_ids, *(part.token_ids for part in self.parts)])


@dataclass(frozen=True, slots=True, eq=False)
class FinishedGroup:
    """A task whose samples are all finished, in the order of ``task.samples``."""

    task: Task
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """An episode after a turn, which ends with an observation, and the environment's state of it as
    JSON."""

    episode: Episode
    state: bytes


@dataclass(frozen=True, slots=True)
class _Parts:
    """What every run of a runner uses."""

    engine: Engine
    environment: Environment
    text: Text
    params: SamplingParams
    limits: Limits
    dialogue: Dialogue
    freed: Callable[[str], None]
    keep: Callable[[Episode, bytes], None] | None
    releases: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    runs: set[_Run] = field(default_factory=set["_Run"])


class EpisodeRunner:
    """Runs tasks. Concurrent ``run`` calls share the batches of the engine and the reward."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        text: Text,
        params: SamplingParams,
        sampled: Callable[[str], None] = lambda key: None,
        *,
        limits: Limits = _UNLIMITED,
        chat: bool = False,
        keep: Callable[[Episode, bytes], None] | None = None,
    ) -> None:
        """keep: called after each turn of an episode that continues, with the environment's state
        of it, if the environment saves episodes (``Hosted.saves_episodes``).

        sampled: called with the key of a task when one of its samples needs no slot any more:
        after its first turn, or at its end if episodes may have several turns. chat: whether an
        observation of text is a message of the user."""
        dialogue = Dialogue(text, chat=chat, stop=params.stop)
        self._parts = _Parts(engine, environment, text, params, limits, dialogue, sampled, keep)

    @property
    def saves_episodes(self) -> bool:
        """Whether the environment saves episodes, so that they can be continued."""
        return bool(getattr(self._parts.environment, "saves_episodes", False))

    async def run(self, tasks: Sequence[Task], kept: Sequence[Kept] = ()) -> AsyncGenerator[list[FinishedGroup], None]:
        """Yield groups when they finish; each list has the groups that finished together. Closing
        the iterator aborts the others. kept: episodes of the tasks that continue after their last
        turn."""
        run = _Run(self._parts)
        self._parts.runs.add(run)
        try:
            run.begin(tasks, kept)
            while run.open:
                yield await run.finished()
        finally:
            self._parts.runs.discard(run)
            await run.close()

    def doing(self) -> dict[str, tuple[str, float]]:
        """What is done for each unfinished task, by its key: ``GENERATE`` or ``ENVIRONMENT_STEP``,
        and since when, in seconds since 1970. If its samples differ, the oldest."""
        found: dict[str, tuple[str, float]] = {}
        for run in self._parts.runs:
            for key, doing, since in run.doing():
                if key not in found or since < found[key][1]:
                    found[key] = doing, since
        return found


class _Run:
    def __init__(self, parts: _Parts) -> None:
        self._engine, self._environment, self._text, self._params = parts.engine, parts.environment, parts.text, parts.params
        self._limits, self._dialogue, self._freed = parts.limits, parts.dialogue, parts.freed
        self._keep = parts.keep if getattr(parts.environment, "saves_episodes", False) else None
        self._kept: dict[str, list[Kept]] = {}  # by task, until they continue
        self._releases = parts.releases  # they outlive the run
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups: dict[str, list[Episode]] = {}
        self._left: dict[str, int] = {}  # number of unfinished episodes by task
        self._requests: dict[str, tuple[list[Episode], int]] = {}  # request -> its episodes, and the number of missing outputs
        self._ready: list[Episode] = []  # episodes whose turn was just sampled
        self._done: list[FinishedGroup] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._wake = asyncio.Event()
        self._step_planned = False
        self._calls: dict[object, tuple[float, Sequence[str]]] = {}  # calls of the environment: since when, keys of tasks

    @property
    def open(self) -> bool:
        return bool(self._left) or bool(self._done)

    def begin(self, tasks: Sequence[Task], kept: Sequence[Kept] = ()) -> None:
        """Start or continue the episodes of these tasks in the background."""
        for task in tasks:
            self._left[task.key] = len(task.samples)
            self._groups[task.key] = [Episode(task, place, _NOTHING) for place in range(len(task.samples))]
            self._kept[task.key] = [each for each in kept if each.episode.task.key == task.key]
            for each in self._kept[task.key]:
                self._groups[task.key][each.episode.place] = each.episode
            self._expire(self._groups[task.key], self._limits.group_seconds, "GROUP_TIMEOUT")
            self._expire(self._groups[task.key], self._limits.episode_seconds, "EPISODE_TIMEOUT")
        batched = getattr(self._environment, "batched", True)
        for some in [list(tasks)] if batched else [[task] for task in tasks]:
            self._spawn(self._begin(some))

    async def finished(self) -> list[FinishedGroup]:
        while not self._done:
            await self._wake.wait()
            self._wake.clear()
        done, self._done = self._done, []
        return done

    def doing(self) -> Iterator[tuple[str, str, float]]:
        """Key of the task, what is done, since when."""
        for since, keys in self._calls.values():
            for key in keys:
                yield key, "ENVIRONMENT_STEP", since
        for episodes, _ in self._requests.values():
            for episode in episodes:
                if episode.result is None:
                    yield episode.task.key, "GENERATE", episode.clocks[-1].asked if episode.clocks else episode.began

    @contextmanager
    def _calling(self, method: str, keys: Sequence[str]) -> Iterator[None]:
        call = object()
        self._calls[call] = time.time(), keys
        try:
            with span(f"environment {method}", environment=self._limits.name, episodes=len(keys)):
                yield
        finally:
            del self._calls[call]

    async def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._left:
            await self._release([e for es in self._groups.values() for e in es if e.result is None])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Beginning

    async def _begin(self, tasks: Sequence[Task]) -> None:
        requests: list[GroupRequest] = []
        begun = [episode for task in tasks for episode in self._groups[task.key]]
        keys = [task.key for task in tasks]
        tasks = [fresh for task in tasks if (fresh := self._fresh(task)) is not None]
        try:
            starts = await self._reset(tasks) if tasks else ()
            requests.extend([request for key in keys for request in await self._continued(key)])
        finally:
            over = [episode for episode in begun if episode.result is not None]
            if over and self._limits.turns:
                self._release_soon(over)  # they were closed before the environment had begun them
        for task, first in zip(tasks, starts, strict=True):
            episodes = [each for each in self._groups.get(task.key, ()) if each.result is None and each.sample in task.samples]
            if not isinstance(first, Refusal):
                try:
                    first = self._dialogue.begin(first)
                except Exception as error:
                    first = Refusal(_reason(error, f"task {task.key} can't be rendered"), str(error))
            if isinstance(first, Refusal):
                log.warning("task %s can't start: %s", task.key, first.message)
                self._give_up(episodes, failed(first.reason, first.message))
                continue
            for episode in episodes:
                episode.prompt = first
            if len(episodes) == len(task.samples):
                requests.append(self._request(task.key, episodes, first.token_ids, task.seeds, task.key))
        if requests:
            await self._sample(requests)

    def _fresh(self, task: Task) -> Task | None:
        """The task with the samples that begin; None if all continue."""
        kept = {each.episode.sample for each in self._kept[task.key]}
        samples = [place for place, sample in enumerate(task.samples) if sample not in kept]
        if not samples:
            return None
        return replace(task, samples=tuple(task.samples[i] for i in samples), seeds=tuple(task.seeds[i] for i in samples))

    async def _continued(self, key: str) -> list[GroupRequest]:
        """The next turns of the episodes of a task that continue. Those that the environment can't
        continue end as INFRA_FAILED, and their group is sampled again."""
        kept = self._kept.pop(key)
        if not kept:
            return []
        try:
            async with asyncio.timeout(_seconds(self._limits.turn_seconds)):
                await self._environment.add(key, {each.episode.sample: each.state for each in kept})  # type: ignore[attr-defined]
        except Exception as error:
            reason = "ENVIRONMENT_TIMEOUT" if isinstance(error, TimeoutError) else reason_of(error, "ENVIRONMENT_FAILED")
            log.warning("%d episodes of %s can't continue: %s", len(kept), key, error)
            self._give_up([each.episode for each in kept], failed(reason))
            return []
        return [self._further(each.episode) for each in kept if each.episode.result is None]

    async def _reset(self, tasks: Sequence[Task]) -> Sequence[Observation | Refusal]:
        try:
            async with asyncio.timeout(_seconds(self._limits.turn_seconds)):
                with self._calling("reset", [task.key for task in tasks]):
                    return starts_of(tasks, await self._environment.reset(tasks), self._limits.name)
        except TimeoutError:
            refusal = Refusal("ENVIRONMENT_TIMEOUT", self._late("reset"))
        except Exception as error:
            if not isinstance(error, RolloutError):
                log.exception("the environment failed to reset %d tasks", len(tasks))
            refusal = Refusal(reason_of(error, "ENVIRONMENT_FAILED"), str(error))
        return [refusal] * len(tasks)

    # Sampling

    def _request(
        self,
        name: str,
        episodes: list[Episode],
        prompt: NDArray[np.int32],
        seeds: tuple[int, ...],
        session: str,
        share: int = 1,
    ) -> GroupRequest:
        """share: number of sessions among which the rest of the episode's tokens is divided."""
        self._requests[name] = (episodes, len(episodes))
        params = self._params
        if self._limits.turns:
            now = time.time()
            for episode in episodes:
                episode.clocks.append(Clock(now))
            left = (self._limits.max_tokens - episodes[0].root.tokens) // share
            room = min(left, self._limits.context - len(prompt))
            params = replace(params, max_tokens=max(1, min(params.max_tokens, room)))
        return GroupRequest(name, prompt, seeds, params, session=session if self._limits.turns else "")

    async def _sample(self, requests: list[GroupRequest]) -> None:
        outputs = self._engine.generate(requests)
        try:
            with span("generate", requests=len(requests)):
                async for output in outputs:
                    if isinstance(output, SampleOutput):
                        self._take(output)
        except Exception as error:
            log.exception("the engine failed %d requests", len(requests))
            for request in requests:
                episodes, _ = self._requests.pop(request.request_id, ([], 0))
                self._give_up([episode.root for episode in episodes], failed(reason_of(error, "ENGINE_FAILED")))
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    def _take(self, output: SampleOutput) -> None:
        episodes, missing = self._requests[output.request_id]
        episode = episodes[output.sample]
        if episode.result is None:
            episode.parts.append(output)
            if episode.clocks:
                episode.clocks[-1].sampled = time.time()
        if missing > 1:
            self._requests[output.request_id] = (episodes, missing - 1)
        else:
            del self._requests[output.request_id]
        if self._limits.turns:  # the other samples of the group may still be sampled
            episodes = [episode]
        else:
            self._freed(episode.task.key)
            if missing > 1:
                return
        self._ready.extend(each for each in episodes if each.result is None)
        if not self._step_planned:  # step all outputs that the engine has delivered by now
            self._step_planned = True
            asyncio.get_running_loop().call_soon(self._plan_step)

    # Steps

    def _plan_step(self) -> None:
        self._step_planned = False
        ready, self._ready = self._ready, []
        answered: list[Episode] = []
        turns: list[Turn] = []
        for episode, output, text in self._texts(ready):
            episode.texts.append(text)
            if output.finish_reason == "aborted":
                self._give_up([episode.root], Result(outcome="aborted", reason="ABORTED"))
            elif output.finish_reason == "error":
                self._give_up([episode.root], failed(reason_of(output.error or RuntimeError(), "ENGINE_ERROR")))
            else:
                try:
                    turn = self._turn(episode, output, text)
                except Exception as error:
                    self._break(episode.root, error)
                    continue
                if episode.parent is not None:
                    turn = _replied(episode, turn)
                if turn is not None:
                    answered.append(episode.root)
                    turns.append(turn)
        if not turns:
            return
        if getattr(self._environment, "batched", True):
            self._spawn(self._step(answered, turns))
            return
        for episode, turn in zip(answered, turns, strict=True):
            self._spawn(self._step([episode], [turn]))

    async def _step(self, episodes: list[Episode], turns: list[Turn]) -> None:
        waits = getattr(self._environment, "waits_for_siblings", False)
        try:
            async with asyncio.timeout(None if waits else _seconds(self._limits.turn_seconds)):
                with self._calling("step", [episode.task.key for episode in episodes]):
                    answers = answers_of(turns, await self._environment.step(turns), self._limits.name)
        except TimeoutError:
            answers = [replace(failed("ENVIRONMENT_TIMEOUT"), message=self._late("step"))] * len(turns)
        except Exception as error:
            if not isinstance(error, RolloutError):
                log.exception("the environment failed %d turns", len(turns))
            answers = [replace(failed(reason_of(error, "ENVIRONMENT_FAILED")), message=str(error))] * len(turns)
        for episode, answer in zip(episodes, answers, strict=True):
            logged = isinstance(answer, Result) and answer.reason.startswith("REWARD_")  # by the reward
            if isinstance(answer, Result) and answer.message and not logged and episode.result is None:
                key, row = episode.task.key, episode.task.row
                log.warning("sample %d of %s (row %d) has no result: %s", episode.sample, key, row, answer.message)
        broken = [e for e, a in zip(episodes, answers, strict=True) if isinstance(a, Result) and a.outcome == "infra_failed"]
        if broken:
            self._release_soon(broken)
        self._continue(episodes, turns, answers)

    def _texts(self, episodes: list[Episode]) -> list[tuple[Episode, SampleOutput, str]]:
        """The last output of each episode with its text, without the episodes whose output can't be
        decoded."""
        try:
            return self._decoded(episodes)
        except Exception as error:
            if len(episodes) > 1:
                return [each for episode in episodes for each in self._texts([episode])]
            self._break(episodes[0], error)
            return []

    def _decoded(self, episodes: list[Episode]) -> list[tuple[Episode, SampleOutput, str]]:
        """The last output of each episode with its text. Outputs without a text are decoded
        together."""
        outputs = [episode.parts[-1] for episode in episodes]
        bare = [i for i, o in enumerate(outputs) if isinstance(o, SampleOutput) and o.text is None]
        texts = [o.text if isinstance(o, SampleOutput) and o.text is not None else "" for o in outputs]
        for i, text in zip(bare, self._text.decode(outputs[i].token_ids for i in bare), strict=True):
            texts[i] = text
        return [(e, o, t) for e, o, t in zip(episodes, outputs, texts, strict=True) if isinstance(o, SampleOutput)]

    def _turn(self, episode: Episode, output: SampleOutput, text: str) -> Turn:
        number, prompt = episode.turns - 1, episode.prompt
        content, reasoning, calls = text, "", ()
        if prompt.messages:
            before = episode.parts[-2].token_ids if len(episode.parts) > 1 else prompt.token_ids
            message = self._dialogue.message(before, output, prompt.tools, f"{episode.name}.{number}")
            episode.said.append(message)
            content, reasoning = str(message["content"]), str(message.get("reasoning_content", ""))
            calls = calls_of(message)
        return Turn(
            task=episode.task,
            sample=episode.sample,
            number=number,
            prompt=prompt.text,
            token_ids=output.token_ids,
            text=text,
            truncated=output.finish_reason == "length",
            prompt_ids=prompt.token_ids,
            context_ids=episode.context()[: -len(output.token_ids) or None] if episode.turns > 1 else prompt.token_ids,
            content=content,
            reasoning=reasoning,
            tool_calls=calls,
        )

    def _continue(self, episodes: list[Episode], turns: list[Turn], answers: Sequence[Answer]) -> None:
        requests: list[GroupRequest] = []
        ended: list[Episode] = []
        results: list[Result] = []
        for episode, turn, answer in zip(episodes, turns, answers, strict=True):
            if episode.result is not None:  # its time was over
                continue
            for child in episode.children.values():
                child.clocks[-1].answered = child.clocks[-1].answered or time.time()
            if isinstance(answer, ChildTurns):
                requests.extend(self._ask(episode, turn, answer))
                continue
            for name, value in answer.metrics.items():
                episode.metrics[name] = episode.metrics.get(name, 0.0) + value
            if episode.clocks:
                episode.clocks[-1].answered = time.time()
            if isinstance(answer, Result):
                episode.rewards.append(0.0)
                cut = turn.truncated and answer.outcome == "completed"
                ended.append(episode)
                results.append(replace(answer, outcome="truncated") if cut else answer)
                continue
            episode.rewards.append(answer.reward)
            if episode.clocks:
                episode.turn_metrics.append(answer.metrics)
                episode.clocks[-1].tools = answer.tool_seconds
            try:
                further = self._following(episode, turn, answer)
            except Exception as error:
                self._break(episode, error)
                continue
            if further is None:
                self._give_up([episode], Result(outcome="truncated"))
                continue
            episode.parts.append(further)
            episode.texts.append(further.text)
            if self._keep is not None and not episode.children:
                self._keep_after(episode)
            requests.append(self._further(episode))
        self._end(ended, results)
        if requests:
            self._spawn(self._sample(requests))

    def _keep_after(self, episode: Episode) -> None:
        """Pass on the episode after a turn. Episodes with child sessions are not kept."""
        assert self._keep is not None
        if state := self._environment.saved(*episode.key):  # type: ignore[attr-defined]
            self._keep(episode, state)

    def _following(self, episode: Episode, turn: Turn, answer: Observation) -> Observation | None:
        """The observation with its tokens; None if the episode has no room for another turn."""
        if turn.number + 1 >= self._limits.max_turns:
            return None
        further = self._after(episode, answer)
        size, limits = len(further.token_ids), self._limits
        if episode.tokens + size >= limits.max_tokens or len(episode.context()) + size >= limits.context:
            return None
        return further

    def _after(self, episode: Episode, answer: Observation) -> Observation:
        """An observation after the last turn of an episode, with its tokens."""
        said = episode.said[-1] if episode.said else {"role": "assistant", "content": episode.texts[-1]}
        return self._dialogue.following(said, episode.parts[-1].token_ids, answer, episode.prompt.tools)

    def _further(self, episode: Episode, share: int = 1) -> GroupRequest:
        """The request of the next turn of an episode."""
        number = episode.turns
        seed = turn_seed(episode.seed, number) if number else episode.seed
        return self._request(f"{episode.name}.{number}", [episode], episode.context(), (seed,), episode.name, share)

    # Child sessions

    def _ask(self, episode: Episode, turn: Turn, asked: ChildTurns) -> list[GroupRequest]:
        """The requests of child sessions. Sessions beyond the limit have an error as their
        reply."""
        turn = replace(turn, replies=())
        episode.asked, episode.replies = (turn, asked), {}
        try:
            found = [self._child(episode, turn, each) for each in asked.turns]
        except Exception as error:
            self._break(episode, error)
            return []
        children = [child for child in found if child is not None]
        limits = self._limits
        if episode.tokens + len(children) > limits.max_tokens or any(len(c.context()) >= limits.context for c in children):
            self._give_up([episode], Result(outcome="truncated"))
            return []
        if not children:
            self._spawn(self._step([episode], [_with_replies(episode)]))
        return [self._further(child, len(children)) for child in children]

    def _child(self, episode: Episode, turn: Turn, asked: ChildTurn) -> Episode | None:
        """The child session with what it reads next; None if there may be no further one."""
        if asked.model != "policy":
            message = f"`open({asked.model!r})`: unknown model; open `policy` or a `rollout.endpoint.Endpoint`"
            episode.replies[asked.child] = Reply(asked.child, error="CHILD_MODEL", message=message)
            return None
        child = episode.children.get(asked.child)
        if child is None and len(episode.children) >= self._limits.max_children:
            message = f"the episode has {len(episode.children)} child sessions already; raise `environment.max_child_sessions`"
            episode.replies[asked.child] = Reply(asked.child, error="CHILD_SESSIONS", message=message)
            return None
        if child is None:
            prompt = self._dialogue.begin(asked.observation)
            child = Episode(episode.task, episode.place, prompt, parent=episode, number=asked.child, since=turn.number)
            episode.children[asked.child] = child
            return child
        further = self._after(child, asked.observation)
        child.parts.append(further)
        child.texts.append(further.text)
        return child

    # Ending

    def _expire(self, episodes: list[Episode], seconds: float, reason: str) -> None:
        """End the episodes that are open after this time."""
        if _seconds(seconds) is None:
            return

        def over() -> None:
            late = [episode for episode in episodes if episode.result is None]
            if not late:
                return
            log.warning("%d samples of %s took longer than %g s in %s", len(late), late[0].task.key, seconds, self._limits.name)
            open_ = self._requests.items()
            requests = [name for name, (of, _) in open_ if of and all(e.root in late for e in of if e.result is None)]
            self._give_up(late, failed(reason))
            if requests:
                self._spawn(self._abort(requests))

        self._timers.append(asyncio.get_running_loop().call_later(seconds, over))

    async def _abort(self, requests: list[str]) -> None:
        await self._engine.abort(requests)

    def _break(self, episode: Episode, error: Exception) -> None:
        """End an episode whose turn can't be parsed or continued."""
        what = f"sample {episode.sample} of {episode.task.key} can't continue"
        log.warning("%s: %s", what, error)
        self._give_up([episode], failed(_reason(error, what)))

    def _give_up(self, episodes: Sequence[Episode], result: Result) -> None:
        """End episodes that the environment has not ended."""
        open_ = [episode for episode in episodes if episode.result is None]
        if open_ and self._limits.turns:
            self._release_soon(open_)
        asking = [name for name, (of, _) in self._requests.items() if any(e.parent in open_ for e in of if e.parent)]
        if asking:
            self._spawn(self._abort(asking))
        self._end(open_, [result] * len(open_))

    def _release_soon(self, episodes: Sequence[Episode]) -> None:
        task = asyncio.create_task(self._release(episodes))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, episodes: Sequence[Episode]) -> None:
        try:
            async with asyncio.timeout(_seconds(self._limits.turn_seconds)):
                await self._environment.close([episode.key for episode in episodes])
        except Exception as error:
            log.warning("%s failed to close %d episodes: %r", self._limits.name, len(episodes), error)

    def _end(self, episodes: Sequence[Episode], results: Sequence[Result]) -> None:
        for episode, result in zip(episodes, results, strict=True):
            episode.result = self._credited(episode, result)
            reward = result.reward + sum(episode.rewards) + sum(result.token_rewards)
            for child in episode.children.values():
                outcome = "truncated" if result.outcome == "completed" and child.cut else result.outcome
                child.result = Result(result.child_rewards.get(child.number, reward), outcome=outcome, reason=result.reason)
            key = episode.task.key
            if self._limits.turns:
                self._freed(key)
            self._left[key] -= 1
            if not self._left[key]:
                del self._left[key]
                self._done.append(FinishedGroup(episode.task, tuple(self._groups.pop(key))))
                self._wake.set()

    def _credited(self, episode: Episode, result: Result) -> Result:
        if result.outcome not in ("completed", "truncated"):
            return replace(result, token_rewards=(), turn_rewards=(), teacher_logprobs=())
        if not self._limits.turns:
            return result
        rewards = episode.rewards + [0.0] * (episode.turns - len(episode.rewards))
        metrics = {**episode.metrics, "episode/turns": float(episode.turns)}
        if episode.children:
            metrics["episode/child_sessions"] = float(len(episode.children))
        episode.rewards = [a + b for a, b in zip(rewards, result.turn_rewards or [0.0] * len(rewards), strict=True)]
        if total := sum(episode.rewards):
            metrics["reward/turns"] = total
        return replace(credited(result, episode.turn_spans(), rewards, self._limits.credit), metrics=metrics)

    def _late(self, method: str) -> str:
        limit = self._limits
        return f"{method} of `{limit.name}` took longer than {limit.turn_seconds:g} s; raise `environment.turn_timeout_seconds`"


def _reason(error: Exception, what: str) -> str:
    """The reason of an error while rendering or parsing. An unexpected one is logged with its
    traceback."""
    if not isinstance(error, RolloutError):
        log.error("%s", what, exc_info=error)
    return reason_of(error, "ENVIRONMENT_FAILED")


def _seconds(limit: float) -> float | None:
    return None if math.isinf(limit) else limit


def _replied(child: Episode, turn: Turn) -> Turn | None:
    """Record the reply of a child session. Returns the turn of the parent if all have replied."""
    parent = child.root
    parent.replies[child.number] = Reply(
        child.number, turn.text, turn.token_ids, turn.truncated, turn.content, turn.reasoning, turn.tool_calls
    )
    assert parent.asked is not None
    return _with_replies(parent) if len(parent.replies) == len(parent.asked[1].turns) else None


def _with_replies(episode: Episode) -> Turn:
    """The turn after which the environment asked, with the replies in the order of asking."""
    assert episode.asked is not None
    turn, asked = episode.asked
    return replace(turn, replies=tuple(episode.replies[each.child] for each in asked.turns))


def child_seed(seed: int, child: int) -> int:
    """The seed of the first turn of a child session (docs/wire.md, "Seeds")."""
    digest = blake3(b"rollout.child.v1" + struct.pack("<QQ", seed, child)).digest()
    return int.from_bytes(digest[:8], "little") & (1 << 63) - 1


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a later turn of a sample: the first 8 bytes of the blake3 digest of label, seed,
    and turn, with the top bit cleared."""
    digest = blake3(b"rollout.turn.v1" + struct.pack("<QQ", seed, turn)).digest()
    return int.from_bytes(digest[:8], "little") & (1 << 63) - 1


def sample_seed(seed: int, epoch: int, index: int, sample: int) -> int:
    """The seed of a sample (docs/wire.md, "Seeds")."""
    digest = blake3(b"rollout.seed.v1" + struct.pack("<QQQQ", seed, epoch, index, sample)).digest()
    return int.from_bytes(digest[:8], "little") & (1 << 63) - 1
