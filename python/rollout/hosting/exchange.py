# pyright: basic
"""Splits requests to sidecars, and checks their answers: a program in any language makes them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rollout.environment import Refusal, Result, Turn
from rollout.errors import RolloutError
from rollout.hosting import wire
from rollout.hosting.answers import EnvironmentBadResult, answers_of, observation_of, starts_of
from rollout.hosting.rows import RowsBadResult
from rollout.plugin.result import OWN, flaw
from rollout.plugin.score import RewardShapeError
from rollout.plugin.v1 import plugin_pb2 as pb

_ITEMS = {"ResetEnvironment": "tasks", "StepEnvironment": "turns", "CallTool": "calls"}
_ROWS = "return at most `limit` JSON objects"
_FIX = "return one item for each of the request, in order"


class ToolBadResult(RolloutError):
    """The results of a tool do not fit its calls."""

    reason = "TOOL_BAD_RESULT"


def split(method: str, request: Any, most: int) -> list[Any]:
    """The request as requests of at most ``most`` items; 0: no limit."""
    if most and method in ("Reward", "Evaluate"):
        return _split_groups(request, most)
    field = _ITEMS.get(method)
    if not most or field is None or len(getattr(request, field)) <= most:
        return [request]
    items = getattr(request, field)
    parts: list[Any] = []
    for start in range(0, len(items), most):
        part = type(request)()
        part.CopyFrom(request)
        part.ClearField(field)
        getattr(part, field).extend(items[start : start + most])
        parts.append(part)
    return parts


def _split_groups(request: Any, most: int) -> list[Any]:
    """The request of ``Reward`` or ``Evaluate`` in parts."""
    parts: list[Any] = []
    left = 0
    for group in request.groups:
        for start in range(0, len(group.samples), most):
            samples = group.samples[start : start + most]
            if len(samples) > left:
                parts.append(type(request)(plugin=request.plugin))
                left = most
            parts[-1].groups.add(row_json=group.row_json, samples=samples)
            left -= len(samples)
    return parts or [request]


def checked(name: str, method: str, request: Any, answer: Any) -> Any:
    """The answer, if it fits the request. name: of the plugin. A wrong item of an environment
    becomes a failure of its episode. Raises ``RewardShapeError``, ``EnvironmentBadResult``,
    ``ToolBadResult``, ``RowsBadResult``."""
    match method:
        case "Reward" | "Evaluate":
            samples = [sample for group in request.groups for sample in group.samples]
            _check_scores(name, samples, answer.scores)
        case "ResetEnvironment":
            starts = [_start(name, start) for start in answer.starts]
            starts_of([wire.task_from(task) for task in request.tasks], starts, name.strip("`"))
        case "StepEnvironment":
            return _answers(name, request, answer)
        case "ReadRows":
            _check_rows(name, request, answer)
        case "CallTool":
            _check_results(name, request.calls, answer.results)
    return answer


def _check_scores(name: str, samples: Sequence[pb.RewardSample], scores: Sequence[pb.RewardScore]) -> None:
    if len(scores) != len(samples):
        raise RewardShapeError(f"{name} returned {len(scores)} scores for {len(samples)} samples", fix=_FIX)
    for sample, score in zip(samples, scores, strict=True):
        if why := flaw(score.reward):
            raise RewardShapeError(f"{name} returned {why} as a reward", fix="return a finite number")
        for metric, value in score.metrics.items():
            if metric in OWN:
                raise RewardShapeError(f"{name} returned the metric `{metric}`, whose name is taken", fix="rename it")
            if not math.isfinite(value):
                raise RewardShapeError(f"{name} returned {value} as the metric `{metric}`", fix="return a finite number")
        tokens = len(sample.token_ids) // 4
        if score.token_rewards and len(score.token_rewards) != tokens:
            text = f"{name} returned {len(score.token_rewards)} token_rewards for {tokens} tokens"
            raise RewardShapeError(text, fix="return one number for each of `token_ids`, or none")
        if why := next((why for value in score.token_rewards if (why := flaw(value))), ""):
            raise RewardShapeError(f"{name} returned {why} as a token reward", fix="return finite numbers")
        at = 0
        for step in score.steps:
            if not at <= step.start < step.end <= len(sample.completion) or flaw(step.reward):
                raise RewardShapeError(
                    f"{name} returned a step [{step.start}, {step.end}) of {step.reward} in {len(sample.completion)} characters",
                    fix="return steps in ascending order, without overlap, within the completion",
                )
            at = step.end


def _check_rows(name: str, request: pb.ReadRowsRequest, answer: pb.ReadRowsResponse) -> None:
    if len(answer.rows_json) > request.limit:
        raise RowsBadResult(f"{name} returned {len(answer.rows_json)} rows, more than the {request.limit} asked for", fix=_ROWS)
    if not answer.rows_json and not answer.end:
        raise RowsBadResult(f"{name} returned no rows, and not that no row follows", fix="set `end` in the response")
    for number, row in enumerate(answer.rows_json, request.offset + 1):
        try:
            fields: Any = json.loads(row)
        except ValueError as error:
            raise RowsBadResult(f"row {number} of {name} is not JSON: {error}", fix=_ROWS) from error
        if not isinstance(fields, dict):
            raise RowsBadResult(f"row {number} of {name} is not a JSON object", fix=_ROWS)


def _start(name: str, start: pb.EnvironmentStart) -> Any:
    if start.WhichOneof("kind") is None:
        raise EnvironmentBadResult(f"{name} returned a start without an observation or a refusal", fix=_FIX)
    try:
        made = wire.start_from(start)
    except (ValueError, TypeError) as error:
        raise EnvironmentBadResult(f"{name} returned a start that can't be read: {error}", fix="send JSON objects") from error
    if isinstance(made, Refusal) and not made.reason:
        raise EnvironmentBadResult(f"{name} refused a task without a reason", fix="name the reason, such as `ROW_INVALID`")
    return made if isinstance(made, Refusal) else observation_of(made, name)


def _answers(name: str, request: pb.StepEnvironmentRequest, answer: pb.StepEnvironmentResponse) -> pb.StepEnvironmentResponse:
    if len(answer.answers) != len(request.turns):
        raise EnvironmentBadResult(f"{name} returned {len(answer.answers)} answers for {len(request.turns)} turns", fix=_FIX)
    if request.save and len(answer.states) not in (0, len(request.turns)):
        raise EnvironmentBadResult(f"{name} returned {len(answer.states)} states for {len(request.turns)} turns", fix=_FIX)
    for at, (asked, found) in enumerate(zip(request.turns, answer.answers, strict=True)):
        if (failure := _flaw(name, wire.turn_from(asked), found)) is not None:
            answer.answers[at].CopyFrom(wire.answer_to(failure))
    return answer


def _flaw(name: str, turn: Turn, found: pb.EnvironmentAnswer) -> Result | None:
    """The failure of an episode whose answer is wrong; None if it is not."""
    try:
        if found.WhichOneof("kind") is None:
            raise EnvironmentBadResult(f"{name} returned an empty answer", fix="set an observation, a result, or children")
        [made] = answers_of([turn], [wire.answer_from(found)], name.strip("`"))
    except (ValueError, TypeError, KeyError) as error:
        text = f"{name} returned an answer that can't be read: {type(error).__name__}: {error}"
        return Result(outcome="infra_failed", reason=EnvironmentBadResult.reason, message=text)
    except EnvironmentBadResult as error:
        return Result(outcome="infra_failed", reason=error.reason, message=str(error))
    return made if isinstance(made, Result) and made.reason == EnvironmentBadResult.reason else None


def _check_results(name: str, calls: Sequence[pb.ToolCall], results: Sequence[pb.ToolResult]) -> None:
    if len(results) != len(calls):
        raise ToolBadResult(f"{name} returned {len(results)} results for {len(calls)} calls", fix=_FIX)
    for call, result in zip(calls, results, strict=True):
        if result.call_id != call.call_id:
            raise ToolBadResult(f"{name} returned the result of {result.call_id!r} for the call {call.call_id!r}", fix=_FIX)


def tool_schema(handshake: pb.HandshakeResponse, name: str) -> dict[str, Any]:
    """A tool as the policy reads it (OpenAI's format). Raises ``ToolBadResult``."""
    info = next(each for each in handshake.plugins if each.kind == pb.PLUGIN_KIND_TOOL and each.name == name)
    try:
        schema = json.loads(info.parameters_json or '{"type": "object"}')
    except ValueError as error:
        text = f"the parameters of the tool `{name}` are not JSON: {error}"
        raise ToolBadResult(text, fix="send a JSON schema of an object") from error
    if not isinstance(schema, dict):
        raise ToolBadResult(f"the parameters of the tool `{name}` are not a JSON object", fix="send a JSON schema of an object")
    return {"type": "function", "function": {"name": name, "description": info.description, "parameters": schema}}
