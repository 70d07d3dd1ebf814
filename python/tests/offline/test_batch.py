"""Whole batches with a small model. The output has the same bytes each time and after a kill. A
failed sample is never given a score of 0."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from tests.offline.conftest import Bench, Outcome

Run = Callable[[Path], Outcome]


def test_repeated_batches_have_equal_bytes_as_parquet_and_as_json_lines(bench: Bench, run: Run) -> None:
    data = bench.data(40)
    for output in ("a.jsonl", "b.jsonl", "a.parquet", "b.parquet"):
        outcome = run(bench.spec(data, output))
        assert (outcome.code, outcome.last["event"], outcome.last["samples"]) == (0, "end", 80), outcome
        assert not (bench.folder / f"{output}.journal").exists()
    assert (bench.folder / "a.jsonl").read_bytes() == (bench.folder / "b.jsonl").read_bytes()
    assert (bench.folder / "a.parquet").read_bytes() == (bench.folder / "b.parquet").read_bytes()
    records = bench.records("a.jsonl")
    assert [(r["row"], r["sample"]) for r in records] == [(row, sample) for row in range(40) for sample in range(2)]
    for record in records:
        assert record["prompt"] == record["data"]["prompt"] == f"{record['row']}+{record['row']}="
        assert record["score"] == len(record["completion"]) and record["score_parts"] == {"first": record["row"]}
        assert record["status"] == ("TRUNCATED" if record["finish_reason"] == "length" else "COMPLETED")
        assert record["prompt_tokens"] == len(record["prompt"]) and 1 <= record["completion_tokens"] <= 8
        assert record["model_digest"].startswith("blake3-")
    table = parquet.read_table(bench.folder / "a.parquet").to_pylist()
    assert [{**r, "score_parts": dict(r["score_parts"]), "data": json.loads(r["data"])} for r in table] == records


def test_a_completion_depends_only_on_its_row(bench: Bench, run: Run) -> None:
    """A batch over fewer rows gives the same records for the rows that both batches have."""
    assert run(bench.spec(bench.data(40), "all.jsonl")).code == 0
    assert run(bench.spec(bench.data(40), "some.jsonl", limit=7)).code == 0
    assert bench.records("some.jsonl") == bench.records("all.jsonl")[:14]


@pytest.mark.timeout(300)
def test_a_killed_and_resumed_batch_equals_an_uninterrupted_one(bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward of row 100 kills the worker. By then some rows are stored, some are in flight, and
    some have not started."""
    data = bench.data(160, signal=(100, signal.SIGKILL))
    spec = bench.spec(data, "killed.jsonl")
    command = [sys.executable, "-m", "rollout_workers", "infer", "--spec", str(spec)]
    killed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed
    assert not (bench.folder / "killed.jsonl").exists()
    journal = bench.folder / "killed.jsonl.journal"
    assert 24 <= len(journal.read_text().splitlines()) - 1 < 160
    with journal.open("ab") as file:
        file.write(b'{"row":3,"samples":[{"sam')  # a partial line, like after a kill during a write
    monkeypatch.setenv("NO_SIGNALS", "1")
    assert run(spec).last["samples"] == 320
    assert run(bench.spec(data, "whole.jsonl")).code == 0
    assert (bench.folder / "killed.jsonl").read_bytes() == (bench.folder / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_finished_rows(number: signal.Signals, bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = bench.spec(bench.data(80, signal=(50, number)))
    outcome = run(spec)
    assert (outcome.code, outcome.last["event"], outcome.last["of"]) == (130, "interrupted", 80)
    kept = outcome.last["rows"]
    assert 24 <= kept < 80 and not (bench.folder / "out.jsonl").exists()
    monkeypatch.setenv("NO_SIGNALS", "1")
    assert run(spec).code == 0
    assert len(bench.records()) == 160


def test_a_failed_reward_gives_no_score(bench: Bench, run: Run) -> None:
    data = bench.data(20, fails=3)
    outcome = run(bench.spec(data))
    assert (outcome.code, outcome.last["reason"]) == (65, "SAMPLES_FAILED") and "REWARD_BAD_RESULT 2" in outcome.last["message"]
    kinds = [event["event"] for event in outcome.events]
    assert kinds[:2] == ["loading", "begin"] and set(kinds[2:-1]) == {"progress"}
    assert (outcome.events[0]["rows"], outcome.events[0]["model"]) == (20, str(bench.example.model))
    assert outcome.events[2]["retries"] <= outcome.events[-2]["retries"] and outcome.events[-2]["retries"] > 0
    assert not (bench.folder / "out.jsonl").exists()
    outcome = run(bench.spec(data))  # retries only the failed rows
    assert outcome.last["reason"] == "SAMPLES_FAILED"
    outcome = run(bench.spec(data, allow_failures=True))
    assert outcome.code == 0 and outcome.last["failures"] == {"REWARD_BAD_RESULT": 2}
    records = bench.records()
    assert len(records) == 40
    failed = [r for r in records if r["status"] == "INFRA_FAILED"]
    assert [(r["row"], r["score"], r["reason"]) for r in failed] == [(3, None, "REWARD_BAD_RESULT")] * 2
    scores = [r["score"] for r in records if r["row"] != 3]
    assert outcome.last["mean_score"] == pytest.approx(sum(scores) / len(scores))


def test_without_a_reward_there_is_no_score(bench: Bench, run: Run) -> None:
    spec = bench.spec(bench.data(4))
    given = json.loads(spec.read_text())
    del given["config"]["reward"]
    spec.write_text(json.dumps(given))
    outcome = run(spec)
    assert outcome.code == 0 and outcome.last["mean_score"] is None
    assert {r["score"] for r in bench.records()} == {None}
    assert {r["status"] for r in bench.records()} <= {"COMPLETED", "TRUNCATED"}


def test_a_parquet_dataset_gives_the_same_output_as_json_lines(bench: Bench, run: Run) -> None:
    import pyarrow as pa

    data = bench.data(6)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows), bench.folder / "d.parquet")
    assert run(bench.spec(data, "lines.jsonl")).code == 0
    assert run(bench.spec(bench.folder / "d.parquet", "table.jsonl")).code == 0
    assert bench.records("lines.jsonl") == bench.records("table.jsonl")


def test_a_reward_model_is_loaded_by_the_worker(bench: Bench, run: Run) -> None:
    """Each completion is scored in a separate pass."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config.from_pretrained(bench.example.model, num_labels=1, pad_token_id=0)
    Qwen3ForSequenceClassification(config).save_pretrained(bench.folder / "reward")
    spec = bench.spec(bench.data(4))
    given = json.loads(spec.read_text())
    given["config"]["reward"] = {"model": {"path": "reward"}, "timeout_seconds": 60, "retries": 0}
    spec.write_text(json.dumps(given))
    outcome = run(spec)
    assert outcome.code == 0, outcome
    scores = [record["score"] for record in bench.records()]
    assert len(set(scores)) > 1 and all(isinstance(score, float) for score in scores)
