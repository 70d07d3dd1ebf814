"""Answers generation requests, for example those of the gateway, with pieces of completions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from google.rpc import code_pb2
from numpy.typing import NDArray

from rollout.inference.v1 import inference_pb2 as pb
from rollout_workers.engines.base import GroupRequest, SampleOutput, SamplingParams
from rollout_workers.environments.episode import sample_seed
from rollout_workers.inference.completion import Completion
from rollout_workers.inference.model import Model
from rollout_workers.inference.params import check, of_request
from rollout_workers.worker.status import EdgeError, InvalidRequest

_LONG_BYTES = 16 << 10  # longer prompts are tokenized in a thread; this many characters take about 0.02 s
_MOST_ID = np.iinfo(np.int32).max


class ContextOverflow(EdgeError):
    """The prompt and the requested tokens exceed the context."""

    reason: ClassVar[str] = "CONTEXT_OVERFLOW"


class DuplicateRequest(EdgeError):
    """A request with this id is still being answered."""

    reason: ClassVar[str] = "DUPLICATE_REQUEST"


class InvalidPrompt(EdgeError):
    """The prompt has no tokens, or token ids outside of the vocabulary."""

    reason: ClassVar[str] = "INVALID_PROMPT"


class WeightsNotFound(EdgeError):
    """The worker serves another version than the one that the request asks for."""

    reason: ClassVar[str] = "WEIGHTS_NOT_FOUND"
    status: ClassVar[int | None] = code_pb2.FAILED_PRECONDITION


@dataclass(slots=True)
class _Plan:
    """What a request asks of the engine. groups: the engine's requests by id, with the completions
    of their samples, in order. unsampled: completions that get no tokens."""

    completions: list[Completion] = field(default_factory=list)
    groups: dict[str, tuple[GroupRequest, list[Completion]]] = field(default_factory=dict)
    unsampled: list[Completion] = field(default_factory=list)


class Generation:
    """Answers Generate requests. Belongs to the worker's event loop."""

    def __init__(self, model: Model, params: SamplingParams, max_model_len: int) -> None:
        """params: of the run, for fields that a request does not set."""
        self._model, self._engine, self._text = model, model.engine, model.text
        self._params, self._limit = params, max_model_len
        self._running: dict[str, list[str]] = {}  # request id -> ids of the engine's requests

    async def tokenized(self, prompts: Sequence[pb.Prompt], *, bounded: bool = False) -> list[NDArray[np.int32]]:
        """The token ids of each prompt. Long prompts are tokenized in a thread.

        Raises ``PromptInvalid`` for a chat that the template rejects, ``InvalidPrompt`` for an id
        outside of the vocabulary, and, if ``bounded``, ``ContextOverflow`` for a text that can't
        fit, before it is tokenized.
        """
        if sum(prompt.ByteSize() for prompt in prompts) > _LONG_BYTES:
            return await asyncio.to_thread(self._tokenize, prompts, bounded)
        return self._tokenize(prompts, bounded)

    def _tokenize(self, prompts: Sequence[pb.Prompt], bounded: bool) -> list[NDArray[np.int32]]:
        out: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * len(prompts)
        texts: list[tuple[int, str, bool]] = []
        for at, prompt in enumerate(prompts):
            kind = prompt.WhichOneof("kind")
            if kind == "tokens":
                ids = np.array(prompt.tokens.ids, np.uint32)
                if len(ids) and (wrong := ids.max()) > _MOST_ID:
                    raise _outside(wrong, at, f"prompts[{at}].tokens.ids")
                out[at] = ids.astype(np.int32)
            elif kind == "chat":
                messages = [{"role": m.role, "content": m.content} for m in prompt.chat.messages]
                texts.append((at, self._text.render(messages), False))
            else:
                texts.append((at, prompt.text, True))
        for at, text, _ in texts:
            if bounded and len(text) > _LONG_BYTES and len(text) > self._limit * self._text.longest:
                problem = f"the text of prompt {at} has {len(text)} characters, too many for a context of {self._limit} tokens"
                raise ContextOverflow(problem, fix="shorten the prompt", violations=[(f"prompts[{at}]", problem)])
        for special in (False, True):
            chosen = [(at, text) for at, text, s in texts if s is special]
            for (at, _), ids in zip(chosen, self._text.encode([t for _, t in chosen], special=special), strict=True):
                out[at] = ids
        return out

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Pieces of completions as they are sampled if the request streams; else one message per
        completion."""
        self._check_version(request)
        prompts = await self.tokenized(request.prompts, bounded=True)
        self._check(prompts, request.params)
        name = request.request_id
        if name in self._running:
            raise DuplicateRequest(f"request {name} is still being answered", fix="use another id")
        planned = self._plan(request, prompts)
        self._running[name] = list(planned.groups)
        try:
            if request.prompt_logprobs:
                await self._score(request, planned)
            for completion in planned.unsampled:
                yield completion.unsampled()
            if not planned.groups:
                return
            groups = [group for group, _ in planned.groups.values()]
            async with aclosing(self._engine.generate(groups)) as items:  # type: ignore[type-var]
                async for item in items:
                    completion = planned.groups[item.request_id][1][item.sample]
                    if isinstance(item, SampleOutput):
                        yield completion.last(item, whole=not request.stream)
                    elif request.stream:
                        yield completion.piece(item)
        finally:
            self._running.pop(name, None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests. Ignores unknown ids."""
        await self._engine.abort([i for name in request_ids for i in self._running.get(name, ())])

    def detokenized(self, prompts: Sequence[pb.TokenIds]) -> list[str]:
        """The text of each list of ids, with special tokens. Raises ``InvalidPrompt``."""
        for at, prompt in enumerate(prompts):
            if (wrong := max(prompt.ids)) >= self._text.size:
                raise _outside(wrong, at, f"prompts[{at}].ids")
        return self._text.whole([prompt.ids for prompt in prompts])

    def _plan(self, request: pb.GenerateRequest, prompts: Sequence[NDArray[np.int32]]) -> _Plan:
        """The engine's requests: one per prompt, and one per continued completion."""
        continued = self._continued(request)
        seed = request.params.seed if request.params.HasField("seed") else secrets.randbits(63)
        none = request.params.HasField("max_tokens") and not request.params.max_tokens
        plan = _Plan()
        for at, ids in enumerate(prompts):
            params = of_request(request.params, self._params, self._limit - len(ids))
            check(request, params, self._model.kind, self._model.capabilities)
            self._check_bias(params)
            completions = [Completion(self._text, at, sample, ids, request.token_bytes) for sample in range(request.n)]
            begun = [c for c in completions if (at, c.sample) in continued]
            over = [c for c in begun if len(continued[at, c.sample]) >= params.max_tokens]
            fresh = [c for c in completions if c not in begun]
            plan.completions.extend(completions)
            if none:
                plan.unsampled.extend(completions)
                continue
            plan.unsampled.extend(over)
            for some in ([fresh] if fresh else []) + [[c] for c in begun if c not in over]:
                first = some[0].sample
                group = GroupRequest(
                    f"request/{request.request_id}/{at}" + (f"/{first}" if some[0] in begun else ""),
                    ids,
                    tuple(sample_seed(seed, 0, at, c.sample) for c in some),
                    params,
                    stream=True,  # texts without the end token and the stop text
                    continued=continued.get((at, first), ()) if some[0] in begun else (),
                    session=request.session.session_id,
                )
                plan.groups[group.request_id] = group, some
        return plan

    def _continued(self, request: pb.GenerateRequest) -> dict[tuple[int, int], NDArray[np.int32]]:
        """The tokens of each completion that continues. Raises ``InvalidRequest``."""
        found: dict[tuple[int, int], NDArray[np.int32]] = {}
        problems: list[tuple[str, str]] = []
        if request.continuations and not request.params.HasField("seed"):
            problems.append(("params.seed", "must be set with continuations, to the seed of the earlier request"))
        for at, each in enumerate(request.continuations):
            place = each.prompt, each.sample
            ids = np.array(each.token_ids, np.int64)
            if each.prompt >= len(request.prompts):
                problems.append(
                    (f"continuations[{at}].prompt", f"is {each.prompt}; the request has {len(request.prompts)} prompts")
                )
            elif each.sample >= request.n:
                problems.append(
                    (f"continuations[{at}].sample", f"is {each.sample}; the request has {request.n} samples per prompt")
                )
            elif place in found:
                problems.append((f"continuations[{at}]", "names the completion of another continuation"))
            elif len(ids) and ids.max() > _MOST_ID:
                problems.append((f"continuations[{at}].token_ids", f"has {ids.max()}, which is outside the vocabulary"))
            elif len(ids):
                found[place] = ids.astype(np.int32)
        if problems:
            raise InvalidRequest("; ".join(f"{path} {problem}" for path, problem in problems), violations=problems)
        return found

    async def _score(self, request: pb.GenerateRequest, plan: _Plan) -> None:
        """Compute the logprobs of the tokens of each prompt. Raises ``EngineError``."""
        prompts = {completion.prompt: completion.ids for completion in plan.completions}
        top = request.prompt_top_logprobs
        found = await asyncio.gather(*(self._engine.prompt_logprobs(ids, top) for ids in prompts.values()))
        scores = dict(zip(prompts, found, strict=True))
        for completion in plan.completions:
            completion.scored = scores[completion.prompt]

    def _check_version(self, request: pb.GenerateRequest) -> None:
        current = self._engine.stats().version
        if request.HasField("weights_version") and request.weights_version != current:
            raise WeightsNotFound(
                f"weights version {request.weights_version} is not loaded; this worker serves version {current}",
                fix="ask a worker that serves it, or leave `weights_version` out",
                metadata={"version": str(request.weights_version), "current": str(current)},
            )

    def _check_bias(self, params: SamplingParams) -> None:
        wrong = max((token for token, _ in params.logit_bias), default=0)
        if wrong >= self._text.size:
            problem = f"has token id {wrong}, which is outside the vocabulary of {self._text.size} tokens"
            raise InvalidRequest(f"params.logit_bias {problem}", violations=[("params.logit_bias", problem)])

    def _check(self, prompts: Sequence[NDArray[np.int32]], params: pb.SamplingParams) -> None:
        wanted = params.max_tokens if params.HasField("max_tokens") else 1
        for at, ids in enumerate(prompts):
            if not len(ids):
                raise InvalidPrompt(f"prompt {at} has no tokens", violations=[(f"prompts[{at}]", "must not be empty")])
            if len(ids) + wanted > self._limit:
                problem = f"a prompt of {len(ids)} and a completion of {wanted} tokens exceed the context of {self._limit} tokens"
                raise ContextOverflow(
                    problem,
                    fix="shorten the prompt or lower max_tokens",
                    metadata={
                        "prompt_tokens": str(len(ids)),
                        "max_tokens": str(wanted),
                        "max_model_len": str(self._limit),
                    },
                    violations=[(f"prompts[{at}]", problem)],
                )


def _outside(token: int, prompt: int, path: str) -> InvalidPrompt:
    return InvalidPrompt(
        f"token id {token} of prompt {prompt} is outside the vocabulary",
        fix="encode the prompt with the tokenizer of this model",
        violations=[(path, "must be in the vocabulary")],
    )
