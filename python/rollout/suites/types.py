"""What the process of a library gets, what it returns, and its errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rollout.errors import RolloutError


class LibraryMissing(RolloutError):
    """The interpreter lacks the library."""

    reason: ClassVar[str] = "PACKAGE_MISSING"


class TaskUnknown(RolloutError):
    """The library has no such task, or its file can't be read."""

    reason: ClassVar[str] = "SUITE_TASK_UNKNOWN"


class ArgumentInvalid(RolloutError):
    """A task does not take these arguments."""

    reason: ClassVar[str] = "SUITE_ARGUMENT"


class TaskFailed(RolloutError):
    """The library could not finish a task. It may succeed in another attempt."""

    reason: ClassVar[str] = "SUITE_FAILED"


@dataclass(frozen=True, slots=True)
class Request:
    """kind: of the suite. folder: relative names of tasks start there. url: of the endpoint, with
    ``/v1``. model: in its requests. tokenizer: a folder. samples: of each question. 0 and None:
    what the library or its task chooses."""

    kind: str
    tasks: list[str]
    folder: str
    result: str
    scratch: str
    url: str
    key: str
    model: str
    tokenizer: str
    context: int
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    num_fewshot: int | None = None
    limit: int = 0
    samples: int = 1
    concurrent: int = 1
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of the library. stderr: None if it has none."""

    name: str
    value: float
    stderr: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer. question: a name of the question, equal in each evaluation. scores: the main one
    first."""

    question: str
    prompt: str
    completion: str
    scores: dict[str, float]
    target: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a library measured. samples: those of a question one after the other."""

    version: str
    metrics: list[Metric]
    samples: list[Sample]
