"""Errors of a batch: each has an exit code, a reason, and a message."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_workers.offline.journal import Journal
from tests.offline.conftest import Bench, Outcome

Case = tuple[int, str, str, Callable[[Bench], Path]]


def _written(bench: Bench, text: str, **keys: Any) -> Path:
    path = bench.folder / "bad.jsonl"
    path.write_text(text)
    return bench.spec(path, **keys)


def _garbage(bench: Bench) -> Path:
    folder = bench.folder / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return bench.spec(bench.data(2), model=str(folder))


def _folder(bench: Bench) -> Path:
    (bench.folder / "d.parquet").write_text("no table")
    return bench.spec(bench.folder / "d.parquet")


def _journal(bench: Bench, text: str) -> Path:
    (bench.folder / "out.jsonl.journal").write_text(text)
    return bench.spec(bench.data(2))


def _questions(bench: Bench) -> Path:
    return _written(bench, '{"q":1}\n{"prompt":"1"}\n{"q":2}')


def _nowhere(bench: Bench) -> Path:
    path = bench.spec(bench.data(2))
    path.write_text(json.dumps({**json.loads(path.read_text()), "output": str(bench.folder / "gone" / "out.jsonl")}))
    return path


def _reward(bench: Bench, **reward: Any) -> Path:
    return bench.spec(bench.data(2), tables={"reward": reward})


CASES: dict[str, Case] = {
    "no dataset": (66, "MISSING_FILE", "none.jsonl", lambda b: b.spec(b.folder / "none.jsonl")),
    "an empty dataset": (65, "BAD_ROW", "has no rows", lambda b: _written(b, "\n\n")),
    "no JSON": (65, "BAD_ROW", "bad.jsonl:2: the row is not JSON", lambda b: _written(b, '{"prompt": "1"}\n{"prompt"\n')),
    "half a character": (
        65,
        "BAD_ROW",
        "bad.jsonl:2: the row contains a lone surrogate",
        lambda b: _written(b, '{"prompt": "1"}\n{"prompt": "\\ud800"}\n'),
    ),
    "no object": (65, "BAD_ROW", "the row is a list", lambda b: _written(b, "[1]\n")),
    "no Parquet": (65, "BAD_ROW", "can't be read as .parquet", _folder),
    "no prompt": (65, "PROMPT_INVALID", "2 of 3 rows can't be answered: row 0", _questions),
    "a long prompt": (65, "PROMPT_INVALID", "leaves no room", lambda b: _written(b, json.dumps({"prompt": "1" * 70}))),
    "no model": (66, "MISSING_FILE", "config.json", lambda b: b.spec(b.data(2), model="/no/such/model")),
    "no such model": (65, "BAD_MODEL", "can't load", _garbage),
    "other weights": (65, "WEIGHTS_MISMATCH", "blake3-00", lambda b: b.spec(b.data(2), weights_digest="blake3-00")),
    "no reward": (66, "MISSING_FILE", "none.py", lambda b: _reward(b, plugin="none.py:f")),
    "no such function": (65, "REWARD_IMPORT", "no function `f`", lambda b: _reward(b, plugin="reward.py:f")),
    "no journal": (65, "JOURNAL_DAMAGED", "is not a journal", lambda b: _journal(b, "hello\n")),
    "nowhere to write": (73, "CANNOT_WRITE", "/gone/out.jsonl.journal", _nowhere),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused(name: str, bench: Bench, run: Callable[[Path], Outcome]) -> None:
    code, reason, words, make = CASES[name]
    outcome = run(make(bench))
    assert (outcome.code, outcome.last["event"], outcome.last["reason"]) == (code, "error", reason), outcome.last
    assert words in outcome.last["message"], outcome.last
    assert outcome.last["fix"] or reason in ("WEIGHTS_MISMATCH", "BAD_ROW", "REWARD_IMPORT"), outcome.last
    left = {path.name for path in bench.folder.glob("out.jsonl*")} - {"out.jsonl.spec"}
    assert left == ({"out.jsonl.journal"} if name == "no journal" else set())  # no files are left behind


def test_a_missing_spec_is_refused(bench: Bench, run: Callable[[Path], Outcome]) -> None:
    assert run(bench.folder / "none").last["reason"] == "BATCH_SPEC_INVALID"


def test_changed_inputs_are_named(bench: Bench, run: Callable[[Path], Outcome]) -> None:
    data = bench.data(6, fails=3)
    assert run(bench.spec(data)).last["reason"] == "SAMPLES_FAILED"  # which leaves a journal
    bench.data(6)
    spec = bench.spec(data, tables={"sampling": {"temperature": 0.5}, "data": {"prompt_field": "answer"}}, threads=2)
    outcome = run(spec)
    assert (outcome.code, outcome.last["reason"]) == (65, "INPUTS_CHANGED")
    for words in (
        "`data` was",
        "`engine.threads` was 1, is 2",
        '"prompt", is "answer"',
        "`sampling.temperature` was 1.0, is 0.5",
    ):
        assert words in outcome.last["message"], outcome.last["message"]
    given = json.loads(spec.read_text())
    spec.write_text(json.dumps({**given, "restart": True}))
    assert run(spec).code == 0


def test_two_processes_cannot_write_one_journal(bench: Bench, run: Callable[[Path], Outcome]) -> None:
    with (bench.folder / "out.jsonl.journal").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        outcome = run(bench.spec(bench.data(2)))
    assert (outcome.code, outcome.last["reason"]) == (73, "JOURNAL_BUSY")


def test_parquet_without_its_library(bench: Bench, run: Callable[[Path], Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    outcome = run(bench.spec(bench.data(2), "out.parquet"))
    assert (outcome.code, outcome.last["reason"]) == (66, "LIBRARY_MISSING") and "-m pip install pyarrow`" in outcome.last["fix"]


def test_a_damaged_journal_is_refused_but_a_partial_last_line_is_truncated(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    journal = Journal.open(path, {"a": 1}, restart=False)
    for row in range(3):
        journal.append(row, [{"status": "COMPLETED" if row else "INFRA_FAILED"}])
    assert journal.done == {1, 2}
    journal.append(0, [{"status": "COMPLETED", "again": True}])
    assert journal.done == {0, 1, 2} and journal.samples(0)[0]["again"]
    journal.close()
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:-5])
    journal = Journal.open(path, {"a": 1}, restart=False)
    assert journal.done == {1, 2}
    journal.append(0, [{"status": "COMPLETED"}])
    journal.close()
    lines = Path(path).read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    Path(path).write_bytes(b"".join([lines[0], b"\0" * 9 + b"\n", *lines[2:]]))
    with pytest.raises(Exception, match="is damaged at byte"):
        Journal.open(path, {"a": 1}, restart=False)
