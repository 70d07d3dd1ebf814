"""Tasks of reasoning-gym: generated questions, and the package's own scores of the answers."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Mapping
from typing import Any

from rollout.environment import Refusal, Result, SingleEpisode, Task, Turn
from rollout.environments import ArgumentInvalid, PackageMissing

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(SingleEpisode):
    """One question and one answer.

    dataset: name of reasoning-gym's dataset. size: number of its questions. seed: of the dataset.
    config: its further parameters. prompt: text around ``{question}``. ``index`` in the row selects
    the question.
    """

    def __init__(
        self,
        dataset: str,
        size: int = 1000,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        prompt: str = "{question}",
    ) -> None:
        if "{question}" not in prompt:
            raise ArgumentInvalid(f"`prompt = {prompt!r}` has no place for the question", fix="write {question} in it")
        self._size, self._prompt = size, prompt
        self._data = _dataset(dataset, size, seed, json.dumps(dict(config or {}), sort_keys=True))
        self._entry: Any = None

    def reset(self, task: Task) -> str | Refusal:
        """The question of the task's row."""
        row: Any = json.loads(task.row_json or b"{}")
        index: Any = row.get("index")
        if not isinstance(index, int) or not 0 <= index < self._size:
            return Refusal("ROW_INVALID", f"`index` is {index!r}, not the number of a question from 0 to {self._size - 1}")
        self._entry = self._data[index]
        return self._prompt.replace("{question}", self._entry["question"])

    def step(self, turn: Turn) -> Result:
        """The score of the answer: of the text between the last ``<answer>`` and ``</answer>``,
        or of all of it."""
        tagged = _TAGGED.findall(turn.content)
        answer = (tagged[-1] if tagged else turn.content).strip()
        score = float(self._data.score_answer(answer, self._entry))
        return Result(reward=score, metrics={"exact": float(score >= 1.0)})


@functools.lru_cache(maxsize=8)
def _dataset(name: str, size: int, seed: int, config: str) -> Any:
    try:
        reasoning_gym: Any = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise PackageMissing("reasoning_gym", error) from error
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(config))
    except (ValueError, TypeError, AssertionError) as error:
        raise ArgumentInvalid(
            f"reasoning-gym has no dataset {name!r} with these parameters: {error}", fix="correct `[environment.args]`"
        ) from error
