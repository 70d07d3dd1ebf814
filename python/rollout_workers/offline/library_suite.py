"""A suite whose tasks are those of a library (``rollout.suites``): a process in the interpreter of
the library sends their prompts to an endpoint that serves the model.

A worker without an endpoint says which weights these are, ``ready``, unless the suite has ended.
With one, it runs the process. A process that ends without a result has measured nothing, and is
repeated; so is one that could not finish a task.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

from blake3 import blake3

from rollout_workers.offline import output, scores
from rollout_workers.offline.dataset import digest as digest_of
from rollout_workers.offline.errors import EXIT_SOFTWARE, BatchError
from rollout_workers.offline.spec import BatchSpec

ATTEMPTS = 3
_TAIL = 2000


class SuiteExited(BatchError):
    """The process of a library ended again and again without a result."""

    reason: ClassVar[str] = "SUITE_EXITED"
    code: ClassVar[int] = EXIT_SOFTWARE


class SuiteRefused(BatchError):
    """The process of a library reported an error; ``reason`` is its reason."""

    def __init__(self, found: Mapping[str, str]) -> None:
        super().__init__(found["message"], fix=found["fix"])
        self.reason = found["reason"]  # pyright: ignore[reportAttributeAccessIssue]


_REPEATED = "SUITE_FAILED"


def inputs_of_library(spec: BatchSpec, weights: str) -> dict[str, Any]:
    """Everything that the results depend on. ``data``: of the questions, equal for two models."""
    given = dict(spec.library)
    for key in ("url", "key", "model", "python", "context", "concurrent"):
        given.pop(key, None)
    files = {task: digest_of(str(path)) for task in given["tasks"] if (path := _file(spec, task)) is not None}
    python = spec.library["python"]
    lock = Path(python).parent.parent / "rollout.plugin"
    tasks = {key: given.pop(key) for key in ("kind", "tasks", "args", "num_fewshot")} | {"limit": spec.limit, "files": files}
    found = "blake3-" + blake3(json.dumps(tasks, sort_keys=True).encode()).hexdigest()
    packages = lock.read_text().split(" ")[0] if lock.is_file() else ""
    return {"data": found, "library": {**tasks, "packages": packages}, "sampling": given, "model": {"weights": weights}}


def _file(spec: BatchSpec, task: str) -> Path | None:
    path = Path(spec.base_dir, re.sub(r"@[A-Za-z_]\w*$", "", task))
    return path if path.is_file() else None


async def evaluate(spec: BatchSpec, weights: str, inputs: dict[str, Any], stop: asyncio.Event) -> dict[str, Any] | None:
    """Run the tasks and write the output. Returns the facts of the end; None if it was stopped.
    Raises :class:`BatchError`."""
    log = spec.output.removesuffix(".parquet") + ".log"
    scratch = mkdtemp(prefix=".suite-", dir=os.path.dirname(spec.output))
    try:
        found: dict[str, Any] = {}
        for attempt in range(1, ATTEMPTS + 1):
            result = Path(scratch, f"result-{attempt}.json")
            code = await _run(spec, scratch, result, log, attempt, stop)
            if stop.is_set():
                return None
            found = json.loads(result.read_bytes()) if result.is_file() else {"error": _ended(spec, code, log)}
            if "error" not in found:
                break
            if found["error"]["reason"] not in (_REPEATED, SuiteExited.reason):
                raise SuiteRefused(found["error"])
        if "error" in found:
            error = found["error"]
            text = f"{error['message']}, {ATTEMPTS} times; its log is {log}"
            if error["reason"] == SuiteExited.reason:
                raise SuiteExited(text, fix=error["fix"])
            raise SuiteRefused({**error, "message": text})
        return await asyncio.to_thread(_finish, spec, weights, inputs, found)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _ended(spec: BatchSpec, code: int, log: str) -> dict[str, str]:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    with open(log, encoding="utf-8", errors="replace") as file:
        last = file.read()[-_TAIL:].strip().rpartition("\n")[2]
    return {
        "reason": SuiteExited.reason,
        "message": f"the process of {spec.library['kind']} {how} without a result" + (f" ({last})" if last else ""),
        "fix": "see its log; nothing was scored, and the same command evaluates the suite again",
    }


async def _run(spec: BatchSpec, scratch: str, result: Path, log: str, attempt: int, stop: asyncio.Event) -> int:
    """Run the process once. Returns its exit code, -N for a signal."""
    given = {name: value for name, value in spec.library.items() if name != "python"}
    request = Path(scratch, "request.json")
    given |= {"folder": spec.base_dir, "result": str(result), "scratch": scratch, "tokenizer": spec.model, "limit": spec.limit}
    request.write_text(json.dumps(given))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    command = (spec.library["python"], "-P", "-m", "rollout.suites.child", str(request))
    with open(log, "w" if attempt == 1 else "a", encoding="utf-8") as file:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        except OSError as error:
            raise SuiteRefused(
                {
                    "reason": "PACKAGE_MISSING",
                    "message": f"can't start {command[0]}: {error.strerror}",
                    "fix": f"run `rollout plugin install {spec.library['kind']}`, or correct `python` of the suite",
                }
            ) from error
    stopping = asyncio.create_task(stop.wait())
    ending = asyncio.create_task(process.wait())
    try:
        await asyncio.wait((stopping, ending), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started, such as a local sandbox
    return await ending


def _finish(spec: BatchSpec, weights: str, inputs: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    questions = [list(group) for _, group in groupby(found["samples"], key=lambda sample: sample["question"])]
    rows = [[_sample(number, one) for number, one in enumerate(group)] for group in questions]
    records = (
        {"row": row, **sample, "model_digest": weights, "data": {"question": one["question"], "target": one["target"]}}
        for row, (group, samples) in enumerate(zip(questions, rows, strict=True))
        for one, sample in zip(group, samples, strict=True)
    )
    output.write(spec.output, records, inputs)
    scored = [sample["score"] for samples in rows for sample in samples if sample["score"] is not None]
    end: dict[str, Any] = {
        "output": spec.output, "rows": len(rows), "dropped": 0, "samples": sum(map(len, rows)),
        "tokens": sum(sample["completion_tokens"] for samples in rows for sample in samples), "failures": {},
        "mean_score": sum(scored) / len(scored) if scored else None, "model_digest": weights,
        "metrics": found["metrics"], "version": found["version"],
    }  # fmt: skip
    scores.write(spec.scores, inputs, end, _lines(rows))
    return end


def _lines(rows: Sequence[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    return (scores.of_row(row, b"", samples, "") for row, samples in enumerate(rows))


def _sample(number: int, one: Mapping[str, Any]) -> dict[str, Any]:
    names = list(one["scores"])
    return {
        "sample": number, "prompt": one["prompt"], "completion": one["completion"], "prompt_tokens": one["prompt_tokens"],
        "completion_tokens": one["completion_tokens"], "finish_reason": None, "status": "COMPLETED", "reason": None,
        "score": one["scores"][names[0]] if names else None, "score_parts": {name: one["scores"][name] for name in names[1:]},
        "seed": 0,
    }  # fmt: skip
