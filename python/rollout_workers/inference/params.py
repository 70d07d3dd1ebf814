"""The sampling parameters of runs and requests. Fields that a request does not set have the values
of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import ClassVar, Literal, cast

from rollout.config.v1.run_config_pb2 import SamplingConfig
from rollout.inference.v1 import inference_pb2 as pb
from rollout_workers.engines import registry
from rollout_workers.engines.base import Constraint, SamplingParams
from rollout_workers.engines.registry import Capabilities
from rollout_workers.worker.status import EdgeError, InvalidRequest

_OPTIONAL = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens")
"""Parameters that an engine supports if ``Capabilities.parameters`` names them."""
_OFF = SamplingParams(max_tokens=1)
_Kind = Literal["json_schema", "json_object", "regex", "grammar", "choices"]


class UnsupportedByEngine(EdgeError):
    """The engine of this worker can't do what the request asks for."""

    reason: ClassVar[str] = "UNSUPPORTED_BY_ENGINE"


def of_run(sampling: SamplingConfig) -> SamplingParams:
    """The sampling parameters for the groups of a run."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=tuple(sampling.stop),
    )


def of_request(given: pb.SamplingParams, run: SamplingParams, room: int) -> SamplingParams:
    """The sampling parameters of a request. room: number of tokens left in the context, the default
    of ``max_tokens``, which is 1 for a request that samples nothing. Raises ``InvalidRequest``."""
    most = given.max_tokens if given.HasField("max_tokens") else min(run.max_tokens, room)
    if given.min_tokens > most:
        problem = f"is {given.min_tokens}; it must be at most max_tokens, which is {most}"
        raise InvalidRequest(f"params.min_tokens {problem}", violations=[("params.min_tokens", problem)])
    try:
        return SamplingParams(
            max_tokens=max(1, most),
            temperature=given.temperature if given.HasField("temperature") else run.temperature,
            top_p=given.top_p if given.HasField("top_p") else run.top_p,
            top_k=given.top_k if given.HasField("top_k") else run.top_k,
            min_p=given.min_p if given.HasField("min_p") else run.min_p,
            stop=tuple(given.stop) or run.stop,
            stop_token_ids=tuple(given.stop_token_ids),
            ignore_eos=given.ignore_eos,
            repetition_penalty=given.repetition_penalty if given.HasField("repetition_penalty") else 1.0,
            presence_penalty=given.presence_penalty,
            frequency_penalty=given.frequency_penalty,
            logit_bias=tuple(sorted(given.logit_bias.items())),
            min_tokens=given.min_tokens,
            top_logprobs=given.top_logprobs,
            constraint=_constraint(given.constraint) if given.HasField("constraint") else None,
        )
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        raise InvalidRequest(f"params.{error}", violations=[(f"params.{name}", problem)]) from error


def check(
    request: pb.GenerateRequest, params: SamplingParams, engine: str, capabilities: Capabilities, constrained: str = ""
) -> None:
    """Raises ``UnsupportedByEngine`` with everything that the engine can't do. engine: its name.
    constrained: path of the field that the constraint is for, if it is not a constraint itself."""
    problems = list(_unsupported(request, params, capabilities, constrained))
    if not problems:
        return
    names = ", ".join(path for path, _ in problems)
    others = [
        name
        for name, entry in registry.ENGINES.items()
        if name != engine and not any(_unsupported(request, params, entry.capabilities, constrained))
    ]
    fix = "leave it out" if len(problems) == 1 else "leave them out"
    if others:
        fix += f", or use an engine that supports it: {', '.join(others)}"
    raise UnsupportedByEngine(
        f"engine {engine} does not support {names}",
        fix=fix,
        metadata={"engine": engine, "parameter": problems[0][0]},
        violations=[(path, f"{problem} by engine {engine}") for path, problem in problems],
    )


def _unsupported(
    request: pb.GenerateRequest, params: SamplingParams, can: Capabilities, constrained: str
) -> Iterator[tuple[str, str]]:
    """Field path and problem of each part of a request that an engine does not support."""
    for name in _OPTIONAL:
        if name not in can.parameters and getattr(params, name) != getattr(_OFF, name):
            yield f"params.{name}", "is not supported"
    if params.temperature == 0 and not can.greedy:
        yield "params.temperature", "0 (greedy) is not supported"
    if params.top_logprobs > can.top_logprobs:
        yield "params.top_logprobs", _at_most(can.top_logprobs)
    if request.prompt_top_logprobs > can.top_logprobs and can.prompt_logprobs:
        yield "prompt_top_logprobs", _at_most(can.top_logprobs)
    if request.prompt_logprobs and not can.prompt_logprobs:
        yield "prompt_logprobs", "is not supported"
    if params.constraint is not None and params.constraint.kind not in can.constraints:
        yield constrained or f"params.constraint.{params.constraint.kind}", "is not supported"
    if request.continuations and not can.continues:
        yield "continuations", "is not supported"


def _at_most(most: int) -> str:
    return f"above {most} is not supported" if most else "is not supported"


def _constraint(given: pb.Constraint) -> Constraint:
    kind = cast(_Kind, given.WhichOneof("kind"))
    if kind == "json_object":
        return Constraint(kind)
    if kind == "choices":
        return Constraint(kind, json.dumps(list(given.choices.texts)))
    value = getattr(given, kind)
    if kind == "json_schema":
        try:
            json.loads(value)
        except ValueError as error:
            raise ValueError(f"constraint.json_schema is not JSON: {error}") from error
    return Constraint(kind, value)
