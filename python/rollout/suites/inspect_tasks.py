"""Tasks of ``inspect-ai``: its chat completions are those of the endpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"INSPECT_DISPLAY": "none", "INSPECT_LOG_LEVEL": "warning"}

from inspect_ai import eval
from inspect_ai.scorer import value_to_float

from rollout.suites.types import ArgumentInvalid, Measured, Metric, Request, Sample, TaskFailed, TaskUnknown

_RETRIES = 6
"""Of a request, with longer and longer pauses: a worker that has ended is started again
meanwhile."""
_NAMES = "name files, `file.py` or `file.py@task`, or tasks of installed packages, `package/task`"


def evaluate(request: Request) -> Measured:
    """Raises ``RolloutError``."""
    os.chdir(request.folder)
    os.environ |= {"LOCAL_BASE_URL": request.url, "LOCAL_API_KEY": request.key}
    for task in request.tasks:
        file = task.split("@")[0]
        if file.endswith(".py") and not Path(file).is_file():
            raise TaskUnknown(f"inspect_ai has no task `{task}`: {Path(file).resolve()} does not exist", fix=_NAMES)
    wanted: dict[str, Any] = {
        "limit": request.limit or None,
        "epochs": request.samples if request.samples > 1 else None,
        "temperature": request.temperature,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
    }
    settings = {name: value for name, value in wanted.items() if value is not None}
    metrics: list[Metric] = []
    samples: list[Sample] = []
    for task in request.tasks:
        prefix = f"{_name(task)}/" if len(request.tasks) > 1 else ""
        for log in _logs(task, request, settings):
            metrics += _metrics(log, prefix)
            samples += _samples(log, prefix)
    return Measured(version("inspect-ai"), metrics, samples)


def _name(task: str) -> str:
    return task.split("@")[-1].split("/")[-1].removesuffix(".py")


def _logs(task: str, request: Request, settings: Mapping[str, Any]) -> list[Any]:
    """The logs of a task, which has ended."""
    if request.args:
        for log in _evaluated(task, request, run_samples=False):
            unused = [f"`{name}`" for name in sorted(set(request.args) - set(log.eval.task_args))]
            if unused:
                known = ", ".join(f"`{name}`" for name in log.eval.task_args) or "none"
                raise ArgumentInvalid(
                    f"the task `{task}` has no argument {', '.join(unused)}", fix=f"correct `args` of the suite; it has {known}"
                )
    logs = _evaluated(task, request, **settings)
    for log in logs:
        if log.status != "success":
            raise TaskFailed(f"the task `{task}` ended with {log.status}: {log.error.message if log.error else ''}", fix=_FAILED)
        for sample in log.samples or ():
            if sample.error is not None:
                raise TaskFailed(f"the sample {sample.id} of `{task}` failed: {sample.error.message}", fix=_FAILED)
        if log.results is None or not log.results.scores:
            raise TaskUnknown(f"the task `{task}` has no scores", fix="give the task a scorer")
    return logs


def _evaluated(task: str, request: Request, **settings: Any) -> list[Any]:
    try:
        logs = eval(
            task, model=f"openai-api/local/{request.model}", task_args=request.args, log_dir=request.scratch, log_format="json",
            display="none", max_connections=request.concurrent, fail_on_error=True, max_retries=_RETRIES, **settings,
        )  # fmt: skip
    except TypeError as error:
        raise ArgumentInvalid(
            f"the task `{task}` does not take these arguments: {error}", fix="correct `args` of the suite"
        ) from error
    except Exception as error:
        raise TaskUnknown(f"inspect_ai can't load the task `{task}`: {_text(error)}", fix=_NAMES) from error
    if not logs:
        raise TaskUnknown(f"inspect_ai found no task in `{task}`", fix=_NAMES)
    return logs


_FAILED = "see the log; the same command evaluates the suite again"


def _text(error: Exception) -> str:
    return " ".join(str(getattr(error, "message", "") or error).split()).removeprefix("Error: ") or type(error).__name__


def _metrics(log: Any, prefix: str) -> Iterator[Metric]:
    scores = log.results.scores
    for score in scores:
        before = prefix + (f"{score.name}/" if len(scores) > 1 else "")
        before += f"{score.reducer}/" if score.reducer and len({one.reducer for one in scores}) > 1 else ""
        error = score.metrics.get("stderr")
        for name, metric in score.metrics.items():
            if name != "stderr" and math.isfinite(metric.value):
                of = error.value if error is not None and name in ("accuracy", "mean") and math.isfinite(error.value) else None
                yield Metric(before + name, float(metric.value), of, score.scored_samples or 0)


def _samples(log: Any, prefix: str) -> Iterator[Sample]:
    as_float = value_to_float()
    found = {sample.id: number for number, sample in reversed(list(enumerate(log.samples or ())))}
    for sample in sorted(log.samples or (), key=lambda sample: (found[sample.id], sample.epoch)):
        scores: dict[str, float] = {}
        for name, score in (sample.scores or {}).items():
            values = score.value if isinstance(score.value, dict) else {"": score.value}
            for key, value in values.items():
                if isinstance(value, str | int | float | bool):
                    scores[f"{name}/{key}" if key else name] = as_float(value)
        usage = sample.output.usage
        yield Sample(
            prefix + str(sample.id), _prompt(sample.input), sample.output.completion,
            {name: value for name, value in scores.items() if math.isfinite(value)},
            target=sample.target if isinstance(sample.target, str) else "\n".join(sample.target),
            prompt_tokens=usage.input_tokens if usage else 0, completion_tokens=usage.output_tokens if usage else 0,
        )  # fmt: skip


def _prompt(given: Any) -> str:
    return given if isinstance(given, str) else "\n".join(message.text for message in given)
