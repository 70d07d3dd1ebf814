"""Tasks of ``lm-eval``: its completions, and loglikelihoods, are those of the endpoint."""

from __future__ import annotations

import difflib
import math
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from lm_eval import simple_evaluate
from lm_eval.models import api_models
from lm_eval.tasks import TaskManager

from rollout.suites.types import ArgumentInvalid, Measured, Metric, Request, Sample, TaskFailed, TaskUnknown

_AGAIN = "see the log; the same command evaluates the suite again"
_NONE = getattr(api_models, "LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER", None)
"""What lm-eval scores in place of an answer that it did not get."""


def evaluate(request: Request) -> Measured:
    """Raises ``RolloutError``."""
    os.chdir(request.folder)
    os.environ["OPENAI_API_KEY"] = request.key
    if request.args:
        raise ArgumentInvalid("tasks of lm_eval take no arguments", fix="remove `args` from the suite")
    names, folders = _tasks(request)
    manager = TaskManager(include_path=folders or None, include_defaults=len(folders) < len(request.tasks))
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 1, 0.8)
            raise TaskUnknown(
                f"lm_eval has no task `{name}`",
                fix=f"did you mean `{near[0]}`?" if near else "name a YAML file, or a task of `lm-eval ls tasks`",
            )
    wanted: dict[str, Any] = {"temperature": request.temperature, "max_gen_toks": request.max_tokens, "seed": request.seed}
    sampling = {name: value for name, value in wanted.items() if value is not None}
    arguments: dict[str, Any] = {
        "model": request.model, "base_url": f"{request.url}/completions", "tokenizer": request.tokenizer,
        "tokenizer_backend": "huggingface", "max_length": request.context, "max_retries": 3,
        "num_concurrent": max(2, request.concurrent),  # with one, it goes on without the answer of a request that failed
    }  # fmt: skip
    try:
        done: Any = simple_evaluate(
            model="local-completions", model_args=arguments, tasks=names, task_manager=manager, num_fewshot=request.num_fewshot,
            limit=request.limit or None, log_samples=True, gen_kwargs=sampling or None,
        )  # fmt: skip
    except (FileNotFoundError, ConnectionError) as error:
        raise TaskUnknown(
            f"lm_eval can't load the data of the tasks: {_text(error)}", fix="correct the task, or its data"
        ) from error
    except (ValueError, TypeError, KeyError, AssertionError, AttributeError) as error:
        raise ArgumentInvalid(
            f"lm_eval refuses the tasks: {_text(error)}", fix="correct the task, or `num_fewshot` of the suite"
        ) from error
    except Exception as error:
        raise TaskFailed(f"lm_eval ended with {_text(error)}", fix=_AGAIN) from error
    several = len(done["results"]) > 1
    metrics: list[Metric] = []
    samples: list[Sample] = []
    for task, values in done["results"].items():
        count = done.get("n-samples", {}).get(task, {}).get("effective", 0)
        metrics += _metrics(values, f"{task}/" if several else "", count)
    for task, rows in done["samples"].items():
        samples += _samples(rows, f"{task}/" if several else "")
    return Measured(version("lm-eval"), metrics, samples)


def _tasks(request: Request) -> tuple[list[str], list[str]]:
    """The names of the tasks, and the folders of those that are files."""
    names: list[str] = []
    folders: list[str] = []
    for task in request.tasks:
        if not task.endswith((".yaml", ".yml")):
            names.append(task)
            continue
        path = Path(task).resolve()
        try:
            found = re.search(r"^(?:task|group):\s*[\"']?([\w.-]+)", path.read_text(), re.MULTILINE)
        except OSError as error:
            raise TaskUnknown(f"can't read the task {path}: {error.strerror}", fix="correct `tasks` of the suite") from error
        if found is None:
            raise TaskUnknown(f"{path} has no line `task: NAME`", fix="add it")
        names.append(found[1])
        folders.append(str(path.parent))
    return names, folders


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _named(metric: str, filtered: str) -> str:
    return metric if filtered in ("none", "") else f"{metric}/{filtered}"


def _metrics(values: dict[str, Any], prefix: str, count: int) -> list[Metric]:
    found: list[Metric] = []
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        stderr = float(error) if isinstance(error, int | float) and math.isfinite(error) else None
        if math.isfinite(value):
            found.append(Metric(prefix + _named(metric, filtered), float(value), stderr, count))
    return found


def _samples(rows: list[dict[str, Any]], prefix: str) -> list[Sample]:
    found: dict[int, Sample] = {}
    for row in rows:
        asked, answers = row["arguments"], row["resps"]
        if any(_NONE is not None and answer == _NONE for response in answers for answer in response):
            raise TaskFailed(f"question {row['doc_id']} has no answer", fix=_AGAIN)
        first = asked[0] if isinstance(asked, list | tuple) else next(iter(asked.values()))
        prompt = first[0] if isinstance(first, list | tuple) else first.get("arg_0", "")
        text = answers[0][0] if answers and answers[0] and isinstance(answers[0][0], str) else str(row["filtered_resps"])
        one = found.setdefault(
            row["doc_id"], Sample(f"{prefix}{row['doc_id']}", str(prompt), text, {}, target=str(row["target"]))
        )
        for metric in row["metrics"]:
            value = row.get(metric)
            if isinstance(value, int | float) and math.isfinite(value):
                one.scores[_named(metric, row.get("filter", "none"))] = float(value)
    return [found[number] for number in sorted(found)]
