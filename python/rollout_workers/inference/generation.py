"""Answers generation requests, for example those of the gateway, with pieces of completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from typing import ClassVar

import numpy as np
from google.rpc import code_pb2
from numpy.typing import NDArray

from rollout.inference.v1 import inference_pb2 as pb
from rollout_workers.chat.families import ParserChoice
from rollout_workers.engines.base import SampleDelta, SampleOutput, SamplingParams
from rollout_workers.inference.completion import Completion
from rollout_workers.inference.model import Model
from rollout_workers.inference.plan import Plan, Planner
from rollout_workers.inference.prompts import Asked, ContextOverflow, InvalidPrompt, Prompts, outside
from rollout_workers.sessions.cache import OpenSession, SessionCache
from rollout_workers.worker.status import EdgeError


class DuplicateRequest(EdgeError):
    """A request with this id is still being answered."""

    reason: ClassVar[str] = "DUPLICATE_REQUEST"


class WeightsNotFound(EdgeError):
    """The worker serves another version than the one that the request asks for."""

    reason: ClassVar[str] = "WEIGHTS_NOT_FOUND"
    status: ClassVar[int | None] = code_pb2.FAILED_PRECONDITION


class Generation:
    """Answers Generate requests. Belongs to the worker's event loop."""

    def __init__(self, model: Model, params: SamplingParams, max_model_len: int, *, family: str = "") -> None:
        """params: of the run, for fields that a request does not set. family: of chats
        (``rollout_workers.chat.families``); empty: that of the chat template. Raises
        ``UnknownFamily``."""
        self._engine, self._text, self._limit = model.engine, model.text, max_model_len
        self._prompts = Prompts(model.text, max_model_len)
        self._sessions = SessionCache(self._prompts.template)
        self._planner = Planner(model, params, max_model_len, ParserChoice(model.text.template, family))
        self._running: dict[str, list[str]] = {}  # request id -> ids of the engine's requests

    async def tokenized(self, prompts: Sequence[pb.Prompt]) -> list[NDArray[np.int32]]:
        """The token ids of each prompt. Raises the errors of ``Prompts.read``."""
        return [asked.ids for asked in await self._prompts.read(prompts)]

    def detokenized(self, prompts: Sequence[pb.TokenIds]) -> list[str]:
        """The text of each list of ids, with special tokens. Raises ``InvalidPrompt``."""
        for at, prompt in enumerate(prompts):
            if (wrong := max(prompt.ids)) >= self._text.size:
                raise outside(wrong, at, f"prompts[{at}].ids")
        return self._text.whole([prompt.ids for prompt in prompts])

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Pieces of completions as they are sampled if the request streams; else one message per
        completion."""
        _check_version(request, self._engine.stats().version)
        name = request.request_id
        with ExitStack() as cleanup:
            session = None
            if request.HasField("session"):
                session = cleanup.enter_context(self._sessions.open(request.session))
                prompts = await self._prompts.read_turns(request.prompts, session)
            else:
                prompts = await self._prompts.read(request.prompts, bounded=True)
            self._check(prompts, request.params)
            if name in self._running:
                raise DuplicateRequest(f"request {name} is still being answered", fix="use another id")
            plan = self._planner.plan(request, prompts)
            self._running[name] = list(plan.groups)
            cleanup.callback(self._running.pop, name)
            if request.prompt_logprobs:
                await self._score(request, plan)
            for completion in plan.unsampled:
                yield await _stored(session, completion, completion.unsampled())
            if not plan.groups:
                return
            groups = [group for group, _ in plan.groups.values()]
            async with aclosing(self._engine.generate(groups)) as items:  # type: ignore[type-var]
                async for item in items:
                    _check_version(request, _first_version(item))  # the engine may have held the request back
                    completion = plan.groups[item.request_id][1][item.sample]
                    if isinstance(item, SampleOutput):
                        yield await _stored(session, completion, completion.last(item))
                    elif request.stream:
                        yield completion.piece(item)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests. Ignores unknown ids."""
        await self._engine.abort([i for name in request_ids for i in self._running.get(name, ())])

    async def _score(self, request: pb.GenerateRequest, plan: Plan) -> None:
        """Compute the logprobs of the tokens of each prompt. Raises ``EngineError``."""
        prompts = {completion.prompt: completion.asked.ids for completion in plan.completions}
        top = request.prompt_top_logprobs
        found = await asyncio.gather(*(self._engine.prompt_logprobs(ids, top) for ids in prompts.values()))
        scores = dict(zip(prompts, found, strict=True))
        for completion in plan.completions:
            completion.scored = scores[completion.prompt]

    def _check(self, prompts: Sequence[Asked], params: pb.SamplingParams) -> None:
        wanted = params.max_tokens if params.HasField("max_tokens") else 1
        for at, asked in enumerate(prompts):
            size = len(asked.ids)
            if not size:
                raise InvalidPrompt(f"prompt {at} has no tokens", violations=[(f"prompts[{at}]", "must not be empty")])
            if size + wanted > self._limit:
                problem = f"a prompt of {size} and a completion of {wanted} tokens exceed the context of {self._limit} tokens"
                raise ContextOverflow(
                    problem,
                    fix="shorten the prompt or lower max_tokens",
                    metadata={
                        "prompt_tokens": str(size),
                        "max_tokens": str(wanted),
                        "max_model_len": str(self._limit),
                    },
                    violations=[(f"prompts[{at}]", problem)],
                )


async def _stored(session: OpenSession | None, completion: Completion, last: pb.GenerateResponse) -> pb.GenerateResponse:
    """The last piece of a completion, with the new segments of its session."""
    if session is not None and completion.asked.turn is not None:
        segments = await session.append(completion.asked.turn, completion.sampled())
        last.segments.extend(segment.to_proto() for segment in segments)
    return last


def _check_version(request: pb.GenerateRequest, current: int | None) -> None:
    """Raises ``WeightsNotFound`` if the request asks for another version. current: None:
    unknown."""
    if request.HasField("weights_version") and current is not None and request.weights_version != current:
        raise WeightsNotFound(
            f"weights version {request.weights_version} is not loaded; this worker serves version {current}",
            fix="ask a worker that serves it, or leave `weights_version` out",
            metadata={"version": str(request.weights_version), "current": str(current)},
        )


def _first_version(item: SampleDelta | SampleOutput) -> int | None:
    """The version that sampled the first token of a sample, as far as the item has it."""
    if isinstance(item, SampleDelta):
        return item.version if item.start == 0 else None
    return item.version_spans[0].version if item.version_spans else None
