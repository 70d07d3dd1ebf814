"""Answers generation requests, for example those of the gateway, with pieces of completions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rollout.inference.v1 import inference_pb2 as pb
from rollout.trajectory.v1.trajectory_pb2 import VersionSpan
from rollout_workers.data.prompts import Text
from rollout_workers.engines.base import Engine, GroupRequest, SampleDelta, SampleOutput, SamplingParams
from rollout_workers.environments.episode import sample_seed
from rollout_workers.inference.params import of_request
from rollout_workers.worker.status import EdgeError

_LONG_BYTES = 16 << 10  # longer prompts are tokenized in a thread; this many characters take about 0.02 s
_MOST_ID = np.iinfo(np.int32).max
_FINISH = {"stop": "stop", "length": "length", "aborted": "abort"}


class ContextOverflow(EdgeError):
    """The prompt and the requested tokens exceed the context."""

    reason: ClassVar[str] = "CONTEXT_OVERFLOW"


class DuplicateRequest(EdgeError):
    """A request with this id is still being answered."""

    reason: ClassVar[str] = "DUPLICATE_REQUEST"


class InvalidPrompt(EdgeError):
    """The prompt has no tokens, or token ids outside of the vocabulary."""

    reason: ClassVar[str] = "INVALID_PROMPT"


class Generation:
    """Answers Generate requests. Belongs to the worker's event loop."""

    def __init__(self, engine: Engine, text: Text, params: SamplingParams, max_model_len: int) -> None:
        """params: of the run, for fields that a request does not set."""
        self._engine, self._text, self._params, self._limit = engine, text, params, max_model_len
        self._running: dict[str, list[str]] = {}  # request id -> ids of the engine's samples

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
                    raise InvalidPrompt(
                        f"token id {wrong} of prompt {at} is outside the vocabulary",
                        fix="encode the prompt with the tokenizer of this model",
                        violations=[(f"prompts[{at}].tokens.ids", "must be in the vocabulary")],
                    )
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
        prompts = await self.tokenized(request.prompts, bounded=True)
        self._check(prompts, request.params)
        seed = request.params.seed if request.params.HasField("seed") else secrets.randbits(63)
        name = request.request_id
        if name in self._running:
            raise DuplicateRequest(f"request {name} is still being answered", fix="use another id")
        groups = [
            GroupRequest(
                f"request/{name}/{at}",
                ids,
                tuple(sample_seed(seed, 0, at, sample) for sample in range(request.n)),
                of_request(request.params, self._params, self._limit - len(ids)),
                stream=True,  # texts without the end token and the stop text
            )
            for at, ids in enumerate(prompts)
        ]
        places = {group.request_id: at for at, group in enumerate(groups)}
        self._running[name] = list(places)
        try:
            scored = await self._scored(prompts) if request.prompt_logprobs else []
            async with aclosing(self._engine.generate(groups)) as items:  # type: ignore[type-var]
                async for item in items:
                    at = places[item.request_id]
                    if isinstance(item, SampleOutput):
                        last = _last(item, at, prompts[at], whole=not request.stream)
                        if scored:
                            last.prompt_logprobs.extend(scored[at].tolist())
                            last.prompt_texts.extend(self._text.pieces(prompts[at]))
                        yield last
                    elif request.stream:
                        yield _piece(item, at)
        finally:
            self._running.pop(name, None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests. Ignores unknown ids."""
        await self._engine.abort([i for name in request_ids for i in self._running.get(name, ())])

    async def _scored(self, prompts: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """The logprobs of the tokens of each prompt. Raises ``EngineError``."""
        found = await asyncio.gather(*(self._engine.prompt_logprobs(ids) for ids in prompts))
        return [scored.logprobs for scored in found]

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


def _piece(delta: SampleDelta, prompt: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        prompt=prompt,
        sample=delta.sample,
        text=delta.text,
        token_ids=delta.token_ids.tolist(),
        logprobs=delta.logprobs.tolist(),
        raw_logprobs=() if delta.raw_logprobs is None else delta.raw_logprobs.tolist(),
        weights_version=delta.version,
    )


def _last(output: SampleOutput, prompt: int, ids: NDArray[np.int32], *, whole: bool) -> pb.GenerateResponse:
    """The last piece of a completion, or the whole completion if no piece was sent. Raises the
    sample's error."""
    if output.error is not None:
        raise output.error
    response = pb.GenerateResponse(
        prompt=prompt,
        sample=output.sample,
        finish_reason=_FINISH[output.finish_reason],
        version_spans=[VersionSpan(version=s.version, start=s.start, end=s.end) for s in output.version_spans],
        prompt_tokens=len(ids),
        prompt_token_ids=ids.tolist(),
    )
    if whole:
        response.text = output.text or ""
        response.token_ids.extend(output.token_ids.tolist())
        response.logprobs.extend(output.logprobs.tolist())
        response.raw_logprobs.extend(() if output.raw_logprobs is None else output.raw_logprobs.tolist())
    return response
