"""Runs episodes: alternates between samples of the engine and steps of the environment.

Groups do not wait for each other: while some are decoded, others are scored. Turns that are sampled
at the same time are passed to the environment in one step.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollout.environment import Environment, Observation, Refusal, Result, Task, Turn, failed, reason_of
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import Engine, GroupRequest, SampleOutput, SamplingParams, VersionSpan

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Episode:
    """One sample of a task, which grows until it has a result.

    prompt: the first observation. parts: the sampled outputs and further observations (without
    logprobs), in order. last_version: the weights of the last sampled token; None if nothing was
    sampled.
    """

    task: Task
    place: int  # index into task.samples
    prompt: Observation
    parts: list[SampleOutput | Observation] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    result: Result | None = None

    @property
    def sample(self) -> int:
        return self.task.samples[self.place]

    @property
    def turns(self) -> int:
        return sum(isinstance(part, SampleOutput) for part in self.parts)

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

    def context(self) -> NDArray[np.int32]:
        """All tokens of the episode."""
        return np.concatenate([self.prompt.token_ids, *(part.token_ids for part in self.parts)])


@dataclass(frozen=True, slots=True, eq=False)
class FinishedGroup:
    """A task whose samples are all finished, in the order of ``task.samples``."""

    task: Task
    episodes: tuple[Episode, ...]


class EpisodeRunner:
    """Runs tasks. Concurrent ``run`` calls share the batches of the engine and the reward."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        text: Text,
        params: SamplingParams,
        sampled: Callable[[str], None] = lambda key: None,
    ) -> None:
        """sampled: called with the key of a task when the engine has finished the first turn of one
        of its samples."""
        self._engine, self._environment, self._text, self._params = engine, environment, text, params
        self._sampled = sampled

    async def run(self, tasks: Sequence[Task]) -> AsyncGenerator[list[FinishedGroup], None]:
        """Yield groups when they finish; each list has the groups that finished together. Closing
        the iterator aborts the others."""
        run = _Run(self._engine, self._environment, self._text, self._params, self._sampled)
        try:
            await run.begin(tasks)
            while run.open:
                yield await run.finished()
        finally:
            await run.close()


class _Run:
    def __init__(
        self, engine: Engine, environment: Environment, text: Text, params: SamplingParams, sampled: Callable[[str], None]
    ) -> None:
        self._engine, self._environment, self._text, self._params = engine, environment, text, params
        self._sampled = sampled
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups: dict[str, list[Episode]] = {}
        self._left: dict[str, int] = {}  # number of unfinished episodes by task
        self._requests: dict[str, tuple[list[Episode], int]] = {}  # request -> its episodes, and the number of missing outputs
        self._ready: list[Episode] = []  # episodes whose turn was just sampled
        self._done: list[FinishedGroup] = []
        self._wake = asyncio.Event()
        self._step_planned = False

    @property
    def open(self) -> bool:
        return bool(self._left) or bool(self._done)

    async def begin(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._left[task.key] = len(task.samples)
        try:
            first = await self._environment.reset(tasks)
        except Exception as error:
            log.exception("the environment failed to reset %d tasks", len(tasks))
            first = [Refusal(reason_of(error, "ENVIRONMENT_FAILED"), str(error))] * len(tasks)
        requests: list[GroupRequest] = []
        for task, observation in zip(tasks, first, strict=True):
            refused = isinstance(observation, Refusal)
            prompt = Observation(np.zeros(0, np.int32)) if refused else observation
            episodes = [Episode(task, place, prompt) for place in range(len(task.samples))]
            self._groups[task.key] = episodes
            if refused:
                log.warning("task %s can't start: %s", task.key, observation.message)
                self._end(episodes, [failed(observation.reason)] * len(episodes))
            else:
                requests.append(self._request(task.key, episodes, prompt.token_ids, task.seeds))
        if requests:
            self._spawn(self._sample(requests))

    async def finished(self) -> list[FinishedGroup]:
        while not self._done:
            await self._wake.wait()
            self._wake.clear()
        done, self._done = self._done, []
        return done

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._left:
            given_up = [(e.task.key, e.sample) for es in self._groups.values() for e in es if e.result is None]
            await self._environment.close(given_up)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _request(self, name: str, episodes: list[Episode], prompt: NDArray[np.int32], seeds: tuple[int, ...]) -> GroupRequest:
        self._requests[name] = (episodes, len(episodes))
        return GroupRequest(name, prompt, seeds, self._params)

    async def _sample(self, requests: list[GroupRequest]) -> None:
        outputs = self._engine.generate(requests)
        try:
            async for output in outputs:
                if isinstance(output, SampleOutput):
                    self._take(output)
        except Exception as error:
            log.exception("the engine failed %d requests", len(requests))
            for request in requests:
                episodes, _ = self._requests.pop(request.request_id, ([], 0))
                self._end(episodes, [failed(reason_of(error, "ENGINE_FAILED"))] * len(episodes))
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    def _take(self, output: SampleOutput) -> None:
        episodes, missing = self._requests[output.request_id]
        episode = episodes[output.sample]
        episode.parts.append(output)
        if len(episode.parts) == 1:
            self._sampled(episode.task.key)
        if missing > 1:
            self._requests[output.request_id] = (episodes, missing - 1)
            return
        del self._requests[output.request_id]
        self._ready.extend(episodes)
        if not self._step_planned:  # step all outputs that the engine has delivered by now
            self._step_planned = True
            asyncio.get_running_loop().call_soon(self._plan_step)

    def _plan_step(self) -> None:
        self._step_planned = False
        ready, self._ready = self._ready, []
        self._spawn(self._step(ready))

    async def _step(self, episodes: list[Episode]) -> None:
        turns: list[Turn] = []
        answered: list[Episode] = []
        ended: list[Episode] = []
        results: list[Result] = []
        for episode, output, text in self._texts(episodes):
            episode.texts.append(text)
            if output.finish_reason == "aborted":
                ended.append(episode)
                results.append(Result(outcome="aborted", reason="ABORTED"))
            elif output.finish_reason == "error":
                ended.append(episode)
                results.append(failed(reason_of(output.error or RuntimeError(), "ENGINE_ERROR")))
            else:
                answered.append(episode)
                turns.append(self._turn(episode, output, text))
        self._end(ended, results)
        if not turns:
            return
        try:
            answers = await self._environment.step(turns)
        except Exception as error:
            log.exception("the environment failed %d turns", len(turns))
            answers = [failed(reason_of(error, "ENVIRONMENT_FAILED"))] * len(turns)
        self._continue(answered, turns, answers)

    def _texts(self, episodes: list[Episode]) -> list[tuple[Episode, SampleOutput, str]]:
        """The last output of each episode with its text. Outputs without a text are decoded
        together."""
        outputs = [episode.parts[-1] for episode in episodes]
        bare = [i for i, o in enumerate(outputs) if isinstance(o, SampleOutput) and o.text is None]
        texts = [o.text if isinstance(o, SampleOutput) and o.text is not None else "" for o in outputs]
        for i, text in zip(bare, self._text.decode(outputs[i].token_ids for i in bare), strict=True):
            texts[i] = text
        return [(e, o, t) for e, o, t in zip(episodes, outputs, texts, strict=True) if isinstance(o, SampleOutput)]

    def _turn(self, episode: Episode, output: SampleOutput, text: str) -> Turn:
        return Turn(
            task=episode.task,
            sample=episode.sample,
            number=episode.turns - 1,
            prompt=episode.prompt.text,
            token_ids=output.token_ids,
            text=text,
            truncated=output.finish_reason == "length",
            prompt_ids=episode.prompt.token_ids,
        )

    def _continue(self, episodes: list[Episode], turns: list[Turn], answers: Sequence[Observation | Result]) -> None:
        requests: list[GroupRequest] = []
        ended: list[Episode] = []
        results: list[Result] = []
        for episode, turn, answer in zip(episodes, turns, answers, strict=True):
            if isinstance(answer, Result):
                cut = turn.truncated and answer.outcome == "completed"
                ended.append(episode)
                results.append(replace(answer, outcome="truncated") if cut else answer)
                continue
            episode.parts.append(answer)
            episode.texts.append(answer.text)
            seed = turn_seed(episode.task.seeds[episode.place], turn.number + 1)
            name = f"{episode.task.key}#{episode.sample}.{turn.number + 1}"
            requests.append(self._request(name, [episode], episode.context(), (seed,)))
        self._end(ended, results)
        if requests:
            self._spawn(self._sample(requests))

    def _end(self, episodes: Sequence[Episode], results: Sequence[Result]) -> None:
        for episode, result in zip(episodes, results, strict=True):
            episode.result = result
            key = episode.task.key
            self._left[key] -= 1
            if not self._left[key]:
                del self._left[key]
                self._done.append(FinishedGroup(episode.task, tuple(self._groups.pop(key))))
                self._wake.set()


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a later turn of a sample: the first 8 bytes of the blake3 digest of label, seed,
    and turn, with the top bit cleared."""
    digest = blake3(b"rollout.turn.v1" + struct.pack("<QQ", seed, turn)).digest()
    return int.from_bytes(digest[:8], "little") & (1 << 63) - 1


def sample_seed(seed: int, epoch: int, index: int, sample: int) -> int:
    """The seed of a sample (docs/wire.md, "Seeds")."""
    digest = blake3(b"rollout.seed.v1" + struct.pack("<QQQQ", seed, epoch, index, sample)).digest()
    return int.from_bytes(digest[:8], "little") & (1 << 63) - 1
