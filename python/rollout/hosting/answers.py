"""Checks what an environment returns, so that a mistake fails an episode with a reason and a
message, and not the worker."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast, get_args

import numpy as np

from rollout.environment import Answer, ChildTurn, ChildTurns, Observation, Outcome, Refusal, Result, Task, Turn
from rollout.errors import RolloutError

MOST_BYTES = 16 << 20
"""Largest observation, and largest state of the open episodes of a process."""
_EXPECTED = "expected an Observation, a Result, a text, or a list of messages"


class EnvironmentBadResult(RolloutError):
    """A value of an environment that has the wrong type, number, or size."""

    reason: ClassVar[str] = "ENVIRONMENT_BAD_RESULT"


def starts_of(tasks: Sequence[Task], values: Any, name: str) -> list[Observation | Refusal]:
    """The first observation of each task. name: of the environment's class. Raises
    ``EnvironmentBadResult``."""
    of = f"`{name}.reset`"
    return [value if isinstance(value, Refusal) else observation_of(value, of) for value in _each(values, len(tasks), of, "task")]


def state_of(state: Any, name: str) -> bytes:
    """The state of open episodes as JSON. name: of the environment's class. Raises
    ``EnvironmentBadResult``."""
    of, fix = f"`{name}.state_dict`", "save what the next turn needs, as plain data"
    if not isinstance(state, Mapping):
        raise EnvironmentBadResult(f"{of} returned {type(state).__name__}; expected a dict", fix=fix)
    try:
        data = json.dumps(dict(cast("Mapping[str, Any]", state))).encode()
    except (TypeError, ValueError) as error:
        raise EnvironmentBadResult(f"{of} returned what JSON can't hold: {error}", fix=fix) from error
    if len(data) > MOST_BYTES:
        raise EnvironmentBadResult(
            f"{of} returned a state of {len(data) / 1e6:.0f} MB; the limit is {MOST_BYTES / 1e6:.0f} MB", fix=fix
        )
    return data


def answers_of(turns: Sequence[Turn], values: Any, name: str) -> list[Answer]:
    """The answer to each turn; a wrong one is replaced by a failure. Raises
    ``EnvironmentBadResult`` if the number of answers differs."""
    of = f"`{name}.step`"
    found: list[Answer] = []
    for turn, value in zip(turns, _each(values, len(turns), of, "turn"), strict=True):
        try:
            found.append(_answer(value, turn, of))
        except EnvironmentBadResult as error:
            found.append(Result(outcome="infra_failed", reason=error.reason, message=str(error)))
    return found


def _answer(value: Any, turn: Turn, of: str) -> Answer:
    match value:
        case Result():
            return _result(value, turn, of)
        case ChildTurns():
            return _children(value, of)
        case _:
            return observation_of(value, of)


def _children(asked: ChildTurns, of: str) -> ChildTurns:
    turns: Any = asked.turns
    numbers = [getattr(turn, "child", None) for turn in turns]
    if not numbers or len(set(numbers)) != len(numbers) or not all(type(n) is int and n >= 0 for n in numbers):
        raise EnvironmentBadResult(
            f"{of} returned turns of the child sessions {numbers}",
            fix="give each session that is asked one turn, and a number from 0",
        )
    return ChildTurns(tuple(ChildTurn(turn.child, observation_of(turn.observation, of), str(turn.model)) for turn in turns))


def observation_of(value: Any, of: str) -> Observation:
    """The observation of a text, of a list of messages, or of an Observation. Raises
    ``EnvironmentBadResult``."""
    if isinstance(value, str):
        value = Observation(text=value)
    elif isinstance(value, list) and value and all(_is_message(each) for each in cast("list[Any]", value)):
        value = Observation(messages=tuple(cast("list[Any]", value)))
    if not isinstance(value, Observation):
        raise EnvironmentBadResult(f"{of} returned {_shown(value)}", fix=_EXPECTED)
    ids: Any = value.token_ids
    kind = f"{ids.dtype}{list(ids.shape)}" if hasattr(ids, "dtype") else type(ids).__name__
    if kind != f"int32[{np.size(ids)}]":
        raise EnvironmentBadResult(
            f"{of} returned an observation with token_ids of {kind}", fix="expected a numpy array int32[N]"
        )
    if not (len(value.messages) or ids.size or value.text):
        raise EnvironmentBadResult(f"{of} returned an empty observation", fix="give it messages, token_ids, or a text")
    if not all(_is_message(each) for each in value.messages):
        raise EnvironmentBadResult(f"{of} returned a message without a role", fix='write {"role": ..., "content": ...}')
    _check_size(value, of)
    if not all(_is_tool(each) for each in value.tools):
        raise EnvironmentBadResult(
            f"{of} returned a tool of another form than OpenAI's",
            fix='write {"type": "function", "function": {"name": ..., "parameters": {...}}}',
        )
    if not all(_has_calls(each.get("tool_calls") or []) for each in value.messages):
        raise EnvironmentBadResult(
            f"{of} returned a message whose tool_calls are not a list of calls",
            fix='write [{"id": ..., "function": {"name": ..., "arguments": ...}}]',
        )
    return replace(
        value,
        reward=_number(value.reward, "the reward", of),
        metrics=_metrics(value.metrics, of),
        tool_seconds=tuple(_number(seconds, "a duration in tool_seconds", of) for seconds in value.tool_seconds),
    )


def same(first: Observation | Refusal, second: Observation | Refusal) -> bool:
    """Whether both say the same."""
    if isinstance(first, Refusal) or isinstance(second, Refusal):
        return first == second
    return np.array_equal(first.token_ids, second.token_ids) and _said(first) == _said(second)


def _each(values: Any, count: int, of: str, what: str) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise EnvironmentBadResult(f"{of} returned {_shown(values)}", fix=f"return a list with one item for each {what}")
    found = cast("Sequence[Any]", values)
    if len(found) != count:
        plural = "" if count == 1 else "s"
        raise EnvironmentBadResult(
            f"{of} returned {len(found)} items for {count} {what}{plural}", fix=f"return one item for each {what}, in order"
        )
    return found


def _result(result: Result, turn: Turn, of: str) -> Result:
    def wrong(text: str, fix: str) -> EnvironmentBadResult:
        return EnvironmentBadResult(f"{of} returned a result with {text}", fix=fix)

    if result.outcome not in get_args(Outcome):
        raise wrong(f"outcome {result.outcome!r}", f"write one of {', '.join(get_args(Outcome))}")
    ended = result.outcome in ("completed", "truncated")
    if not ended and not result.reason:
        raise wrong(f"outcome {result.outcome!r} and no reason", "name the reason, such as `reason='SIMULATOR_DOWN'`")
    turns, tokens = turn.number + 1, len(turn.token_ids)
    if len(result.turn_rewards) not in (0, turns):
        raise wrong(f"{len(result.turn_rewards)} turn_rewards", f"the episode has {turns} turns")
    if len(result.token_rewards) not in (0, tokens):
        raise wrong(f"{len(result.token_rewards)} token_rewards", f"the last turn has {tokens} tokens")
    completion = max(0, len(turn.context_ids) - len(turn.prompt_ids)) + tokens
    if len(result.teacher_logprobs) not in (0, completion):
        raise wrong(
            f"{len(result.teacher_logprobs)} teacher_logprobs",
            f"the episode has {completion} tokens after the first observation",
        )
    return replace(
        result,
        reward=_number(result.reward, "the reward", of),
        metrics=_metrics(result.metrics, of),
        turn_rewards=tuple(_number(value, "a turn reward", of) for value in result.turn_rewards),
        child_rewards={int(child): _number(value, "a child reward", of) for child, value in result.child_rewards.items()},
        token_rewards=tuple(_number(value, "a token reward", of) for value in result.token_rewards),
    )


def _metrics(metrics: Any, of: str) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise EnvironmentBadResult(f"{of} returned metrics of type {type(metrics).__name__}", fix="expected a dict of numbers")
    found = cast("Mapping[Any, Any]", metrics)
    return {str(name): _number(value, f"the metric `{name}`", of) for name, value in found.items()}


def _number(value: Any, what: str, of: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise EnvironmentBadResult(f"{of} returned {_shown(value)} as {what}", fix="expected a finite number") from None
    if not math.isfinite(number):
        raise EnvironmentBadResult(f"{of} returned {number} as {what}", fix="expected a finite number")
    return number


def _check_size(observation: Observation, of: str) -> None:
    try:
        said = json.dumps([list(observation.messages), list(observation.tools)])
    except (TypeError, ValueError) as error:
        raise EnvironmentBadResult(f"{of} returned messages that are not JSON: {error}", fix="use plain values") from None
    size = len(said) + len(observation.text) + observation.token_ids.nbytes
    if size > MOST_BYTES:
        raise EnvironmentBadResult(
            f"{of} returned an observation of {size / 1e6:.0f} MB; the limit is {MOST_BYTES / 1e6:.0f} MB",
            fix="shorten it, or name large content by its URL",
        )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value


def _is_tool(value: Any) -> bool:
    function = _mapping(_mapping(value).get("function"))
    return isinstance(function.get("name"), str) and isinstance(function.get("parameters") or {}, Mapping)


def _has_calls(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    calls = cast("Sequence[Any]", value)
    return all(isinstance(each, Mapping) and isinstance(_mapping(each).get("function", {}), Mapping) for each in calls)


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _said(observation: Observation) -> tuple[Any, ...]:
    return observation.text, list(observation.messages), list(observation.tools)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 40 and value is not None else type(value).__name__
