"""What a request asks of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollout.inference.v1 import inference_pb2 as pb
from rollout_workers.chat.families import ParserChoice
from rollout_workers.chat.requests import call_id
from rollout_workers.chat.writer import MessageWriter
from rollout_workers.engines.base import GroupRequest, SamplingParams
from rollout_workers.environments.episode import sample_seed
from rollout_workers.inference.completion import Completion
from rollout_workers.inference.model import Model
from rollout_workers.inference.params import check, of_request
from rollout_workers.inference.prompts import Asked
from rollout_workers.worker.status import InvalidRequest

_NO_IDS = np.zeros(0, np.int32)
Places = dict[tuple[int, int], NDArray[np.int32]]
"""Prompt and sample -> token ids."""


@dataclass(slots=True)
class Plan:
    """The completions of a request. groups: the engine's requests by id, with the completions of
    their samples, in order. unsampled: completions that get no tokens."""

    completions: list[Completion] = field(default_factory=list)
    groups: dict[str, tuple[GroupRequest, list[Completion]]] = field(default_factory=dict)
    unsampled: list[Completion] = field(default_factory=list)


class Planner:
    """Makes the engine's requests: one per prompt, and one per continued completion."""

    def __init__(self, model: Model, params: SamplingParams, max_model_len: int, choice: ParserChoice) -> None:
        """params: of the run. choice: of the parser of chats."""
        self._model, self._params, self._limit, self._choice = model, params, max_model_len, choice

    def plan(self, request: pb.GenerateRequest, prompts: Sequence[Asked]) -> Plan:
        """Raises ``InvalidRequest``, ``UnsupportedByEngine``."""
        continued = _continued(request)
        ended = {(each.prompt, each.sample) for each in request.continuations if each.ended}
        seed = request.params.seed if request.params.HasField("seed") else secrets.randbits(63)
        none = request.params.HasField("max_tokens") and not request.params.max_tokens
        plan = Plan()
        for at, asked in enumerate(prompts):
            params = self._parameters(request, at, asked)
            fresh: list[Completion] = []
            for sample in range(request.n):
                if (at, sample) in ended:
                    continue
                before = continued.get((at, sample), _NO_IDS)
                completion = self._completion(request, params, at, sample, asked, before)
                plan.completions.append(completion)
                if none or len(before) >= params.max_tokens:
                    plan.unsampled.append(completion)
                elif len(before):
                    _add(plan, request, f"{at}/{sample}", params, seed, [completion], before)
                else:
                    fresh.append(completion)
            if fresh:
                _add(plan, request, str(at), params, seed, fresh, ())
        return plan

    def _parameters(self, request: pb.GenerateRequest, at: int, asked: Asked) -> SamplingParams:
        params = of_request(request.params, self._params, self._limit - len(asked.ids))
        constrained = ""
        if asked.chat is not None and asked.chat.required:
            constrained = f"prompts[{at}].chat.tool_choice"
            if params.constraint is not None and not params.constraint.kind.startswith("json"):
                problem = f"can't be combined with a required call ({constrained})"
                raise InvalidRequest(f"params.constraint {problem}", violations=[("params.constraint", problem)])
            params = replace(params, constraint=asked.chat.constraint())  # a JSON format applies to text, which a call has not
        check(request, params, self._model.kind, self._model.capabilities, constrained)
        wrong = max((token for token, _ in params.logit_bias), default=-1)
        if wrong >= 0 and wrong >= self._model.text.size:
            problem = f"has token id {wrong}, which is outside the vocabulary of {self._model.text.size} tokens"
            raise InvalidRequest(f"params.logit_bias {problem}", violations=[("params.logit_bias", problem)])
        return params

    def _completion(
        self, request: pb.GenerateRequest, params: SamplingParams, at: int, sample: int, asked: Asked, before: NDArray[np.int32]
    ) -> Completion:
        writer = None
        if request.parse and asked.chat is not None:
            length = self._choice.family.id_length

            def named(index: int) -> str:
                return call_id(request.request_id, at, sample, index, length)

            writer = MessageWriter(self._model.text, self._choice, asked.chat, asked.ids, params.stop, named)
            writer.add(before)
        return Completion(self._model.text, at, sample, asked, request.token_bytes, before, writer)


def _add(
    plan: Plan,
    request: pb.GenerateRequest,
    name: str,
    params: SamplingParams,
    seed: int,
    completions: list[Completion],
    continued: NDArray[np.int32] | tuple[()],
) -> None:
    group = GroupRequest(
        f"request/{request.request_id}/{name}",
        completions[0].asked.ids,
        tuple(sample_seed(seed, 0, c.prompt, c.sample) for c in completions),
        params,
        stream=True,  # texts without the end token and the stop text
        continued=continued,
        session=request.session.session_id,
    )
    plan.groups[group.request_id] = group, completions


def _continued(request: pb.GenerateRequest) -> Places:
    """The tokens of each completion that continues. Raises ``InvalidRequest``."""
    found: Places = {}
    problems: list[tuple[str, str]] = []
    if request.continuations and not request.params.HasField("seed"):
        problems.append(("params.seed", "must be set with continuations, to the seed of the earlier request"))
    for at, each in enumerate(request.continuations):
        place = each.prompt, each.sample
        ids = np.array(each.token_ids, np.int64)
        if each.prompt >= len(request.prompts):
            problems.append((f"continuations[{at}].prompt", f"is {each.prompt}, of {len(request.prompts)} prompts"))
        elif each.sample >= request.n:
            problems.append((f"continuations[{at}].sample", f"is {each.sample}, of {request.n} samples per prompt"))
        elif place in found:
            problems.append((f"continuations[{at}]", "names the completion of another continuation"))
        elif len(ids) and ids.max() > np.iinfo(np.int32).max:
            problems.append((f"continuations[{at}].token_ids", f"has {ids.max()}, which is outside the vocabulary"))
        else:
            found[place] = ids.astype(np.int32)
    if problems:
        raise InvalidRequest("; ".join(f"{path} {problem}" for path, problem in problems), violations=problems)
    return found
