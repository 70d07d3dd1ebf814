"""Suites of inspect-ai and lm-eval, with the real libraries and local data (`make
check-environments`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from mesh import ROOT

from rollout.environments.install import install

pytestmark = pytest.mark.timeout(900)  # the first one installs both libraries
ROLLOUT = str(ROOT / "bin" / "rollout")
SUITES = """
[sampling]
max_tokens = 40

[engine]
max_model_len = 256

[eval.suites.counts]
kind = "inspect_ai"
tasks = ["counts.py@counts"]
python = "{inspect_ai}"
args = {{ highest = 3 }}
samples = 2
temperature = 0.0

[eval.suites.choices]
kind = "lm_eval"
tasks = ["choices.yaml"]
python = "{lm_eval}"
"""
COUNTS = """
import os, signal
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def counts(highest: int = 2) -> Task:
    started = open("started", "a")
    started.write(f"{os.getpid()}\\n")
    started.close()
    if os.path.exists("kill"):
        os.unlink("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    rows = [Sample(input=f"count {number}", target="z") for number in range(highest)]
    return Task(rows, solver=generate(), scorer=includes(ignore_case=False))
"""
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a model that counts, tasks, and suites. Its daemon ends with the test."""
    monkeypatch.syspath_prepend(str(ROOT / "e2e" / "clients"))
    import policy

    policy.write(tmp_path / "model")
    expected = json.loads((tmp_path / "loglikelihoods.json").read_text())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in expected))
    (tmp_path / "counts.py").write_text(COUNTS)
    (tmp_path / "choices.yaml").write_text(CHOICES)
    pythons = {kind: install(kind, ROOT / ".tools" / "plugins" / kind) for kind in ("inspect_ai", "lm_eval")}
    (tmp_path / "suites.toml").write_text(SUITES.format(**pythons))
    for name, value in {
        "ROLLOUT_STATE_DIR": str(tmp_path / "state"),
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{ROOT / 'bin'}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
    }.items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    subprocess.run([ROLLOUT, "daemon", "stop"], cwd=tmp_path, check=False)


def evaluate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [ROLLOUT, "eval", "--model", "model", "--suite", "suites.toml", "--output", "out", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)


def suites(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)["suites"]}


def started(folder: Path) -> int:
    return len((folder / "started").read_text().split())


def until(met: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not met():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_the_tasks_of_both_libraries_are_suites(folder: Path) -> None:
    found = suites(evaluate(folder, "--format", "json"))
    counts, choices = found["counts"], found["choices"]
    rows = pq.read_table(folder / "out" / "counts.parquet").to_pylist()
    assert [(row["row"], row["sample"]) for row in rows] == [(row, sample) for row in range(3) for sample in range(2)]
    assert all(len(row["completion"]) == 40 and row["score"] == ("z" in row["completion"]) for row in rows)
    [accuracy] = counts["metrics"]
    assert accuracy["metric"] == "accuracy" and accuracy["value"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))
    assert (counts["kind"], counts["version"], counts["rows"], counts["samples"]) == ("inspect_ai", "0.3.285", 3, 6)
    expected = [json.loads(line)["loglikelihoods"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    [acc] = choices["metrics"]
    right = [float(row[0] == max(row)) for row in expected]
    assert acc["metric"] == "acc" and acc["value"] == pytest.approx(sum(right) / len(right))
    assert [row["score"] for row in pq.read_table(folder / "out" / "choices.parquet").to_pylist()] == right
    assert "<h2>counts</h2>" in (folder / "out" / "index.html").read_text()
    before = started(folder)
    assert suites(evaluate(folder, "--format", "json")) == found and started(folder) == before, "nothing is evaluated again"


def test_a_killed_process_is_repeated(folder: Path) -> None:
    (folder / "kill").touch()
    counts = suites(evaluate(folder, "--only", "counts", "--format", "json"))["counts"]
    assert counts["samples"] == 6 and started(folder) == 3, "the arguments, killed; the arguments, and the samples"


def test_a_killed_evaluation_leaves_no_process_and_no_result(folder: Path) -> None:
    (folder / "counts.py").write_text(COUNTS.replace("    rows = [", "    import time; time.sleep(600)\n    rows = ["))
    command = [ROLLOUT, "eval", "--model", "model", "--suite", "suites.toml", "--output", "out", "--only", "counts"]
    running = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until((folder / "started").exists, "the task to start")
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    pid = int((folder / "started").read_text())

    def ended() -> bool:
        with suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    until(ended, "the process of the library to end with the evaluation")
    assert not (folder / "out" / "results.json").exists() and not (folder / "out" / "counts.parquet").exists()


@pytest.mark.parametrize(
    ("suite", "change", "reason", "message"),
    [
        ("counts", "tasks=['none.py']", "SUITE_TASK_UNKNOWN", "inspect_ai has no task `none.py`: FOLDER/none.py does not exist"),
        ("counts", "args={level = 1}", "SUITE_ARGUMENT", "the task `counts.py@counts` has no argument `level`"),
        (
            "choices",
            "tasks=['none.yaml']",
            "SUITE_TASK_UNKNOWN",
            "can't read the task FOLDER/none.yaml: No such file or directory",
        ),
    ],
)
def test_what_a_library_refuses_is_named(suite: str, change: str, reason: str, message: str, folder: Path) -> None:
    done = evaluate(folder, "--only", suite, "--set", f"eval.suites.{suite}.{change}")
    assert done.returncode == 65 and f"reason: {reason}" in done.stderr, done.stderr
    assert f"rollout: {message}" in done.stderr.replace(str(folder), "FOLDER"), done.stderr
    assert not (folder / "out" / "results.json").exists()
