# pyright: basic
"""Encodes plugin calls as messages of ``rollout.plugin.v1``: samples, scores, environments, and
failures."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from rollout.environment import (
    Answer,
    ChildTurn,
    ChildTurns,
    Observation,
    Outcome,
    Refusal,
    Reply,
    Result,
    Task,
    ToolCall,
    Turn,
)
from rollout.errors import Place, RolloutError
from rollout.outcomes import OUTCOMES
from rollout.plugin.score import (
    RewardError,
    RewardFailed,
    RewardImportError,
    RewardShapeError,
    RewardTimeout,
    Sample,
    Score,
    Step,
)
from rollout.plugin.v1 import plugin_pb2 as pb

SCHEMA_VERSION = 1
DOMAIN = "rollout"
_NAMES = {number: name for name, number in OUTCOMES.items()}
_CODES = {"PLUGIN_UNKNOWN": code_pb2.NOT_FOUND, "PLUGIN_UNSUPPORTED": code_pb2.UNIMPLEMENTED}


class PluginError(RolloutError):
    """A failure of a plugin call. ``reason`` comes from the plugin if it has one."""

    reason = "PLUGIN_FAILED"


class PluginUnknown(PluginError):
    """The service has no plugin with this kind and name."""

    reason = "PLUGIN_UNKNOWN"


class PluginUnsupported(PluginError):
    """The plugin does not implement the call."""

    reason = "PLUGIN_UNSUPPORTED"


class PluginSchema(PluginError):
    """The service uses another version of the contract."""

    reason = "PLUGIN_SCHEMA"


class PluginTimeout(PluginError):
    """The call did not return within its deadline."""

    reason = "PLUGIN_TIMEOUT"


class EnvironmentTimeout(PluginError):
    """A method of an environment did not return within its deadline."""

    reason = "ENVIRONMENT_TIMEOUT"


class EnvironmentExited(PluginError):
    """The environment's process has exited. Its open episodes are lost."""

    reason = "ENVIRONMENT_EXITED"


class PluginUnavailable(PluginError):
    """The plugin's process has exited or can't be reached."""

    reason = "PLUGIN_UNAVAILABLE"


class PluginExited(PluginError):
    """The sidecar ended, or its connection was lost, during the call."""

    reason = "PLUGIN_EXITED"


class PluginRestarting(PluginError):
    """The sidecar had not started again when the call's time was over."""

    reason = "PLUGIN_RESTARTING"


class PluginBlocked(PluginError):
    """The sidecar answered neither the call nor a health check, and was ended."""

    reason = "PLUGIN_BLOCKED"


class PluginVersion(PluginError):
    """The sidecar has another version than its manifest."""

    reason = "PLUGIN_VERSION"


_ERRORS: dict[str, type[RolloutError]] = {
    error.reason: error
    for error in (
        RewardFailed,
        RewardImportError,
        RewardShapeError,
        RewardTimeout,
        PluginUnknown,
        PluginUnsupported,
        PluginSchema,
        PluginTimeout,
        PluginUnavailable,
        PluginExited,
        PluginRestarting,
        PluginBlocked,
        PluginVersion,
    )
}


def timeout_error(method: str, seconds: float, what: str, *, blocked: bool = False) -> RolloutError:
    """The error of a call that missed its deadline. blocked: whether it did not let others run."""
    text = f"{what} took longer than {seconds:g} s"
    if blocked:
        fix = "await in it, or run its work in a thread; if it only needs longer, raise `environment.turn_timeout_seconds`"
        return EnvironmentTimeout(f"{text} and blocked the process, which was ended", fix=fix)
    if method in ("Reward", "Evaluate", "Load"):
        return RewardTimeout(text, fix="make it faster or raise `reward.timeout_seconds`")
    if of_environment(method):
        return EnvironmentTimeout(text, fix="make it faster or raise `environment.turn_timeout_seconds`")
    return PluginTimeout(text, fix="make it faster or raise its timeout")


def ended_error(method: str, text: str, fix: str) -> RolloutError:
    """The error of a call whose process has exited."""
    if of_environment(method):
        return EnvironmentExited(text, fix=fix)
    return RewardFailed(text, fix=fix) if method in ("Reward", "Evaluate", "Load") else PluginUnavailable(text, fix=fix)


def of_environment(method: str) -> bool:
    """Whether a method is one of environments, whose calls overlap."""
    return method.endswith("Environment")


def describe(method: str, request: Any) -> str:
    """A description of a call, for errors."""
    if method == "Reward":
        return f"the reward of {sum(len(group.samples) for group in request.groups)} samples"
    if of_environment(method):
        return f"`{request.plugin}.{method.removesuffix('Environment').lower()}`"
    return "importing the plugin" if method == "Load" else f"the plugin's {method}"


def status_of(error: BaseException) -> status_pb2.Status:
    """An exception as a status with ErrorInfo."""
    reason = getattr(error, "reason", None)
    reason = reason if isinstance(reason, str) and reason else PluginError.reason
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)
    message = str(error)
    if isinstance(error, RolloutError):
        message, info.metadata["fix"] = error.message, error.fix
        if error.place is not None:
            place = error.place
            info.metadata.update(file=place.file, line=str(place.line), column=str(place.column), text=place.text)
    detail = any_pb2.Any()
    detail.Pack(info)
    return status_pb2.Status(code=_CODES.get(reason, code_pb2.FAILED_PRECONDITION), message=message, details=[detail])


def error_of(status: status_pb2.Status) -> RolloutError:
    """The exception for a status."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.type_url.endswith("/google.rpc.ErrorInfo"):
            detail.Unpack(info)
    data = dict(info.metadata)
    place = Place(data["file"], int(data["line"]), int(data["column"]), data["text"]) if "text" in data else None
    kind = _ERRORS.get(info.reason)
    if info.reason == "REWARD_EXPRESSION":
        from rollout.expression import ExpressionError

        kind = ExpressionError
    if kind is not None:
        return kind(status.message, fix=data.get("fix", ""), place=place)
    error = PluginError(status.message, fix=data.get("fix", ""), place=place)
    error.__dict__["reason"] = info.reason or PluginError.reason
    return error


def with_reason(error: Exception, reason: str) -> RolloutError:
    """The same error with another reason."""
    found = error if isinstance(error, RolloutError) else RolloutError(f"{type(error).__name__}: {error}")
    other = PluginError(found.message, fix=found.fix, place=found.place)
    other.__dict__["reason"] = reason
    return other


def reward_error(error: RolloutError) -> RewardError:
    """The same error as a ``RewardError``. One of a sidecar keeps its reason."""
    if isinstance(error, RewardError):
        return error
    made = RewardFailed(error.message, fix=error.fix, place=error.place)
    if error.reason.startswith("PLUGIN_"):
        made.__dict__["reason"] = error.reason
        made.__dict__["permanent"] = getattr(error, "permanent", False)
    return made


def samples_of(groups: Iterable[pb.RewardGroup]) -> list[Sample]:
    """The samples of a request, in order."""
    found: list[Sample] = []
    for group in groups:
        row = json.loads(group.row_json)
        found.extend(Sample(s.prompt, s.completion, row, array("i", s.token_ids)) for s in group.samples)
    return found


def scores_to(scores: Sequence[Score]) -> list[pb.RewardScore]:
    """Scores as messages."""
    return [_score_to(score.reward, score.metrics, score.token_rewards, score.steps) for score in scores]


def _score_to(reward: float, metrics: Any, token_rewards: Sequence[float], steps: Sequence[Step]) -> pb.RewardScore:
    made = pb.RewardScore(reward=reward)
    if metrics:
        made.metrics.update(metrics)
    if token_rewards:
        made.token_rewards.extend(token_rewards)
    for step in steps:
        made.steps.add(start=step.start, end=step.end, reward=step.reward)
    return made


def scores_from(messages: Iterable[pb.RewardScore]) -> list[Score]:
    """Scores from messages. Scores with equal numbers and nothing else share one object."""
    known: dict[str, Score] = {}
    found: list[Score] = []
    for m in messages:
        if m.metrics or m.token_rewards or m.steps:
            steps = tuple(Step(s.start, s.end, s.reward) for s in m.steps)
            found.append(Score(m.reward, dict(m.metrics), tuple(m.token_rewards), steps))
        else:
            found.append(known.setdefault(m.reward.hex(), Score(m.reward)))
    return found


def _ids(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def task_to(task: Task) -> pb.EnvironmentTask:
    return pb.EnvironmentTask(key=task.key, row_json=task.row_json, row=task.row, samples=task.samples, seeds=task.seeds)


def task_from(m: pb.EnvironmentTask) -> Task:
    return Task(m.key, m.row_json, tuple(m.samples), tuple(m.seeds), m.row)


def observation_to(observation: Observation) -> pb.EnvironmentObservation:
    return pb.EnvironmentObservation(
        text=observation.text,
        token_ids=observation.token_ids.astype("<i4").tobytes(),
        messages=[json.dumps(dict(message), ensure_ascii=False) for message in observation.messages],
        tools=[json.dumps(dict(tool), ensure_ascii=False) for tool in observation.tools],
        reward=observation.reward,
        metrics=observation.metrics,
        tool_seconds=observation.tool_seconds,
    )


def observation_from(m: pb.EnvironmentObservation) -> Observation:
    messages, tools = (tuple(json.loads(each) for each in texts) for texts in (m.messages, m.tools))
    return Observation(_ids(m.token_ids), m.text, messages, tools, m.reward, dict(m.metrics), tuple(m.tool_seconds))


def start_to(start: Observation | Refusal) -> pb.EnvironmentStart:
    if isinstance(start, Refusal):
        return pb.EnvironmentStart(refusal=pb.EnvironmentRefusal(reason=start.reason, message=start.message))
    return pb.EnvironmentStart(observation=observation_to(start))


def start_from(m: pb.EnvironmentStart) -> Observation | Refusal:
    return Refusal(m.refusal.reason, m.refusal.message) if m.HasField("refusal") else observation_from(m.observation)


def turn_to(turn: Turn) -> pb.EnvironmentTurn:
    return pb.EnvironmentTurn(
        task=task_to(turn.task),
        sample=turn.sample,
        number=turn.number,
        prompt=turn.prompt,
        text=turn.text,
        token_ids=turn.token_ids.astype("<i4").tobytes(),
        truncated=turn.truncated,
        prompt_ids=turn.prompt_ids.astype("<i4").tobytes(),
        content=turn.content,
        reasoning=turn.reasoning,
        tool_calls=_calls_to(turn.tool_calls),
        replies=[
            pb.EnvironmentReply(
                child=reply.child,
                text=reply.text,
                token_ids=reply.token_ids.astype("<i4").tobytes(),
                truncated=reply.truncated,
                content=reply.content,
                reasoning=reply.reasoning,
                tool_calls=_calls_to(reply.tool_calls),
                error=reply.error,
                message=reply.message,
            )
            for reply in turn.replies
        ],
    )


def _calls_to(calls: Iterable[ToolCall]) -> list[pb.TurnToolCall]:
    return [
        pb.TurnToolCall(
            id=call.id,
            name=call.name,
            arguments_json="" if call.error else json.dumps(dict(call.arguments)),
            error=call.error,
            raw=call.raw,
        )
        for call in calls
    ]


def _calls_from(messages: Iterable[pb.TurnToolCall]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(c.id, c.name, json.loads(c.arguments_json or "{}"), c.error, c.raw) for c in messages)


def turn_from(m: pb.EnvironmentTurn) -> Turn:
    return Turn(
        task_from(m.task),
        m.sample,
        m.number,
        m.prompt,
        _ids(m.token_ids),
        m.text,
        m.truncated,
        _ids(m.prompt_ids),
        content=m.content,
        reasoning=m.reasoning,
        tool_calls=_calls_from(m.tool_calls),
        replies=tuple(
            Reply(
                r.child,
                r.text,
                _ids(r.token_ids),
                r.truncated,
                r.content,
                r.reasoning,
                _calls_from(r.tool_calls),
                r.error,
                r.message,
            )
            for r in m.replies
        ),
    )


def answer_to(answer: Answer) -> pb.EnvironmentAnswer:
    if isinstance(answer, Observation):
        return pb.EnvironmentAnswer(observation=observation_to(answer))
    if isinstance(answer, ChildTurns):
        turns = [
            pb.EnvironmentChildTurn(child=t.child, observation=observation_to(t.observation), model=t.model) for t in answer.turns
        ]
        return pb.EnvironmentAnswer(children=pb.EnvironmentChildTurns(turns=turns))
    score = _score_to(answer.reward, answer.metrics, answer.token_rewards, answer.steps)
    result = pb.EnvironmentResult(
        outcome=OUTCOMES[answer.outcome],
        score=score,
        reason=answer.reason,
        turn_rewards=answer.turn_rewards,
        message=answer.message,
        child_rewards=answer.child_rewards,
    )
    return pb.EnvironmentAnswer(result=result)


def answer_from(m: pb.EnvironmentAnswer) -> Answer:
    if m.HasField("observation"):
        return observation_from(m.observation)
    if m.HasField("children"):
        turns = m.children.turns
        return ChildTurns(tuple(ChildTurn(t.child, observation_from(t.observation), t.model or "policy") for t in turns))
    [score] = scores_from([m.result.score])
    return Result(
        score.reward,
        score.metrics,
        cast(Outcome, _NAMES[m.result.outcome]),
        m.result.reason,
        tuple(score.token_rewards),
        steps=tuple(score.steps),
        turn_rewards=tuple(m.result.turn_rewards),
        message=m.result.message,
        child_rewards=dict(m.result.child_rewards),
    )
