"""The dry episode of a policy that acts for many steps: its environment is made, reset with the
first row, and compared with the policy."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from rollout.environments.acting import is_file, maker
from rollout.errors import RolloutError
from rollout.hosting.answers import EnvironmentBadResult
from rollout.hosting.episodes import EnvironmentFailed
from rollout.hosting.wire import EnvironmentTimeout
from rollout.plugin import split_plugin
from rollout.plugin.place import last_frame, one_line
from rollout.probe.reward import local_files, watchdog
from rollout.probe.tokenizer import Json

OURS = ("rollout_actor_critic", "rollout_token_actor")
"""``model_type`` of the policies whose shapes are known."""


class PolicyUnfit(RolloutError):
    """The policy has other shapes than the environment."""

    reason: ClassVar[str] = "POLICY_UNFIT"


def dry_steps(request: Json, hung: Callable[[EnvironmentTimeout], None], began: Callable[[], None]) -> Json:
    """Reset an environment with the first row and, if its actions are known, step it once. Calls
    ``began`` before, and ``hung`` from another thread after a timeout."""
    name, users, limit = str(request["plugin"]), str(request["base_dir"]), float(request["timeout_seconds"])
    folders: set[Path] = set()
    if is_file(name):
        folders = {Path(users), Path(os.path.abspath(os.path.join(users, split_plugin(name)[0]))).parent}
    watch = watchdog(hung, folders, limit, EnvironmentTimeout, "make it faster or raise `environment.turn_timeout_seconds`")
    began()
    start = time.monotonic()
    with watch(f"making {name}"):
        environment: Any = maker(name, users, str(request.get("args") or ""))()
    config = _read(Path(str(request["model"])) / "config.json")
    row = cast("Mapping[str, Any]", request["rows"][0])

    def call(method: str, *arguments: Any, **options: Any) -> Any:
        with watch(f"`{method}` of {name}"):
            try:
                return getattr(environment, method)(*arguments, **options)
            except (Exception, SystemExit) as error:
                place = next((found for folder in folders if (found := last_frame(error, folder))), None)
                what = "called sys.exit" if isinstance(error, SystemExit) else f"raised {one_line(error)}"
                raise EnvironmentFailed(f"`{method}` of {name} {what}", fix="correct it", place=place) from error

    answer: Any = call("reset", seed=row.get("seed", 0), options=row.get("options"))
    if _size(answer) != 2:
        raise EnvironmentBadResult(f"`reset` of {name} returned {_kind(answer)}", fix="return the observation and a dict")
    observation, space = answer[0], getattr(environment, "action_space", None)
    _check_numbers(observation, name)
    _fits(config, observation, space, int(request["chunk"]), str(request["reward_type"]))
    action = _action(config, space)
    if action is not None:
        answer = call("step", action)
        if _size(answer) != 5:
            raise EnvironmentBadResult(
                f"`step` of {name} returned {_kind(answer)}",
                fix="return observation, reward, terminated, truncated, and a dict",
            )
        _check_numbers(answer[0], name)
        try:
            finite = math.isfinite(float(answer[1]))
        except (TypeError, ValueError):
            finite = False
        if not finite:
            raise EnvironmentBadResult(f"`step` of {name} returned the reward {answer[1]!r}", fix="return a finite number")
    if callable(getattr(environment, "close", None)):
        call("close")
    return {"files": local_files(folders) if folders else [], "name": name, "seconds": time.monotonic() - start}


def _size(answer: Any) -> int:
    return len(cast("tuple[Any, ...]", answer)) if isinstance(answer, tuple) else 0


def _kind(answer: Any) -> str:
    return f"a tuple of {_size(answer)}" if isinstance(answer, tuple) else type(answer).__name__


def _check_numbers(observation: Any, name: str) -> None:
    arrays: list[Any] = list(cast("dict[str, Any]", observation).values()) if isinstance(observation, dict) else [observation]
    for array in arrays:
        if np.asarray(array).dtype.kind not in "fiub":
            raise EnvironmentBadResult(
                f"an observation of {name} has {type(array).__name__}, not numbers", fix="return arrays, or a dict of arrays"
            )


def _fits(config: Mapping[str, Any], observation: Any, space: Any, chunk: int, reward_type: str) -> None:
    """Compare the policy with the environment, if it is of the class whose shapes are known."""
    if config.get("model_type") not in OURS:
        return
    columns = int(config.get("value_columns", 1))
    if int(config.get("chunk", 1)) != chunk:
        raise PolicyUnfit(
            f"the policy chooses {config.get('chunk', 1)} actions at once, and `multistep.chunk` is {chunk}",
            fix=f"write `chunk = {config.get('chunk', 1)}` in [multistep], or make the policy with `--chunk {chunk}`",
        )
    if reward_type == "action_level" and columns != chunk:
        raise PolicyUnfit(
            f"the policy has {columns} values of a chunk, and `multistep.reward_type` needs one of each of the {chunk} actions",
            fix="make the policy with `--action-values`, or remove `reward_type`",
        )
    found = (
        list(np.asarray(observation).shape) if not isinstance(observation, dict) else sorted(cast("dict[str, Any]", observation))
    )
    if found != [int(config["observation_size"])]:
        raise PolicyUnfit(
            f"the policy takes observations of shape [{config['observation_size']}], and the environment returns {found}",
            fix="make the policy for this environment (docs/multistep.md)",
        )
    if space is None:
        return
    discrete = hasattr(space, "n")
    size = int(space.n) if discrete else math.prod(space.shape)
    if discrete == bool(config.get("continuous", False)) or size != int(config["action_size"]):
        kind = "numbers" if config.get("continuous", False) else "discrete actions"
        raise PolicyUnfit(
            f"the policy has {config['action_size']} {kind}, and the environment's actions are {space}",
            fix="make the policy for this environment (docs/multistep.md)",
        )


def _action(config: Mapping[str, Any], space: Any) -> Any:
    """An action; None if the environment's actions are not known."""
    if space is not None:
        return space.sample()
    if config.get("model_type") not in OURS:
        return None
    return np.zeros(int(config["action_size"]), np.float32) if config.get("continuous", False) else 0


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):  # reported with the model
        return {}
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}
