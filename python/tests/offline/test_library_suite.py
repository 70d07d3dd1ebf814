"""Suites of a library: what the worker does with its process. A program stands in for the
interpreter with the library, so that it can be killed."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout_workers.offline.errors import BatchError
from rollout_workers.offline.library_suite import ATTEMPTS, evaluate, inputs_of_library
from rollout_workers.offline.spec import BatchSpec

ANSWER = {
    "version": "1.2",
    "metrics": [{"name": "accuracy", "value": 0.5, "stderr": 0.3, "samples": 2}],
    "samples": [
        {
            "question": "a", "prompt": "1+1=", "completion": "2", "scores": {"match": 1.0, "length": 3.0}, "target": "2",
            "prompt_tokens": 4, "completion_tokens": 1,
        },
        {
            "question": "b", "prompt": "1+2=", "completion": "4", "scores": {"match": 0.0}, "target": "3",
            "prompt_tokens": 4, "completion_tokens": 1,
        },
    ],
}  # fmt: skip


def spec(folder: Path, script: str, **given: Any) -> BatchSpec:
    """script: lines of the program; $RESULT is its result, $TRIES counts its starts, from 1."""
    program, tries = folder / "python", folder / "tries"
    program.write_text(
        "#!/bin/bash\n"
        f'RESULT=$(grep -o \'"result": "[^"]*"\' "$4" | cut -d\'"\' -f4); echo x >> {tries}; TRIES=$(wc -l < {tries})\n{script}\n'
    )
    program.chmod(0o755)
    library = {
        "kind": "inspect_ai",
        "tasks": ["sums.py"],
        "args": {},
        "num_fewshot": None,
        "python": str(program),
        "url": "http://x/v1",
    }
    return BatchSpec(
        RunConfig(), str(folder), "model", "blake3-aa", "", "", "test", str(folder / "sums.parquet"), 0, 1, False, False,
        scores=str(folder / "sums.scores.jsonl"), library=library | given,
    )  # fmt: skip


def run(given: BatchSpec) -> dict[str, Any] | None:
    async def evaluated() -> dict[str, Any] | None:
        return await evaluate(given, "blake3-aa", inputs_of_library(given, "blake3-aa"), asyncio.Event())

    return asyncio.run(evaluated())


def writes(folder: Path, answer: dict[str, Any]) -> str:
    (folder / "answer.json").write_text(json.dumps(answer))
    return f"cp {folder}/answer.json $RESULT"


def tries(folder: Path) -> int:
    return len((folder / "tries").read_text().split())


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith((".suite", "sums.")))


def test_the_samples_of_a_library_become_rows(tmp_path: Path) -> None:
    end = run(spec(tmp_path, writes(tmp_path, ANSWER)))
    assert end is not None and end["metrics"] == ANSWER["metrics"] and (end["rows"], end["samples"], end["tokens"]) == (2, 2, 2)
    rows = pq.read_table(tmp_path / "sums.parquet").to_pylist()
    assert [(row["row"], row["completion"], row["score"]) for row in rows] == [(0, "2", 1.0), (1, "4", 0.0)]
    assert rows[0]["score_parts"] == [("length", 3.0)] and json.loads(rows[1]["data"]) == {"question": "b", "target": "3"}
    lines = [json.loads(line) for line in (tmp_path / "sums.scores.jsonl").read_text().splitlines()]
    assert lines[0]["end"] == end and [line["scores"] for line in lines[1:]] == [[1.0], [0.0]]


def test_a_killed_process_is_repeated_and_nothing_is_scored(tmp_path: Path) -> None:
    end = run(spec(tmp_path, f"[ $TRIES -ge 3 ] || kill -9 $$\n{writes(tmp_path, ANSWER)}"))
    assert end is not None and end["mean_score"] == 0.5 and tries(tmp_path) == 3


def test_a_process_that_is_always_killed_fails_the_suite_without_an_output(tmp_path: Path) -> None:
    with pytest.raises(BatchError) as raised:
        run(spec(tmp_path, "echo out of memory >&2; kill -9 $$"))
    error, log = raised.value, tmp_path / "sums.log"
    assert error.reason == "SUITE_EXITED" and tries(tmp_path) == ATTEMPTS and left(tmp_path) == ["sums.log"]
    assert error.message == (
        f"the process of inspect_ai was killed by SIGKILL without a result (out of memory), {ATTEMPTS} times; its log is {log}"
    )
    assert error.fix == "see its log; nothing was scored, and the same command evaluates the suite again"


@pytest.mark.parametrize(("reason", "attempts"), [("SUITE_TASK_UNKNOWN", 1), ("SUITE_ARGUMENT", 1), ("SUITE_FAILED", ATTEMPTS)])
def test_errors_of_the_process_keep_their_reason(reason: str, attempts: int, tmp_path: Path) -> None:
    answer = {"error": {"reason": reason, "message": "no task", "fix": "name one"}}
    with pytest.raises(BatchError, match="no task") as raised:
        run(spec(tmp_path, writes(tmp_path, answer)))
    assert (raised.value.reason, raised.value.fix, tries(tmp_path)) == (reason, "name one", attempts)
    assert left(tmp_path) == ["sums.log"]


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    given = spec(tmp_path, "")
    os.unlink(tmp_path / "python")
    with pytest.raises(BatchError, match="No such file") as raised:
        run(given)
    assert raised.value.reason == "PACKAGE_MISSING" and "rollout plugin install inspect_ai" in raised.value.fix


def test_a_changed_task_is_another_dataset(tmp_path: Path) -> None:
    given = spec(tmp_path, "")
    (tmp_path / "sums.py").write_text("a = 1\n")
    first = inputs_of_library(given, "blake3-aa")
    assert inputs_of_library(given, "blake3-bb")["data"] == first["data"]
    (tmp_path / "sums.py").write_text("a = 2\n")
    assert inputs_of_library(given, "blake3-aa")["data"] != first["data"]


def test_a_stopped_evaluation_ends_its_process(tmp_path: Path) -> None:
    given = spec(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 600")

    async def stopped() -> dict[str, Any] | None:
        stop = asyncio.Event()
        task = asyncio.create_task(evaluate(given, "blake3-aa", {}, stop))
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        stop.set()
        return await task

    assert asyncio.run(stopped()) is None
    assert not Path("/proc", (tmp_path / "pid").read_text().strip(), "exe").exists()
