"""Rows of files, folders, and mixtures."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.source import files, mixture
from rollout.source.errors import BadSource, MissingFile, SourceError
from rollout.source.formats import read_file
from rollout.source.prepare import Source, open_source

ROWS: list[dict[str, Any]] = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "a\nb", "answer": "ü"}]


def read(path: Path | str, **options: Any) -> list[dict[str, Any]]:
    return [json.loads(row) for row in open_source(Source(str(path), **options), "/").rows()]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet")
    for name, new in (("a.arrow", pa.ipc.new_stream), ("a.feather", pa.ipc.new_file)):
        with new(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines + "\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.csv").write_text('\ufeffprompt,answer\n1+1=,2\n"a\nb",ü\n', encoding="utf-8")
    (tmp_path / "a.tsv").write_text('prompt\tanswer\n1+1=\t2\n"a\nb"\tü\n', encoding="utf-8")
    for file in tmp_path.iterdir():
        assert read(file) == ROWS, file.name


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "one") == ROWS
    assert read(tmp_path / "two", split="test") == ROWS[1:]
    with pytest.raises(BadSource, match="no split `dev`") as caught:
        read(tmp_path / "two", split="dev")
    assert '"train", "test"' in caught.value.fix


def test_files_of_a_folder_and_its_splits(tmp_path: Path) -> None:
    for name in (
        "data/train-00001.jsonl",
        "data/train-00000.jsonl",
        "data/test.jsonl",
        "data/.cache/x.jsonl",
        "mixed/a.jsonl",
        "mixed/b.csv",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = files.find(str(tmp_path / "data"), "train")
    assert [Path(file).name for file in found.files] == ["train-00000.jsonl", "train-00001.jsonl"] and found.split == "train"
    with pytest.raises(BadSource, match="several formats"):
        files.find(str(tmp_path / "mixed"), "train")
    with pytest.raises(MissingFile, match="no file matches"):
        files.find(str(tmp_path / "*.csv"), "train")


def test_values_without_a_form_in_json(tmp_path: Path) -> None:
    from datetime import datetime
    from decimal import Decimal

    rows = [{"at": datetime(2026, 1, 2), "price": Decimal("1.5"), "score": float("nan")}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [{"at": "2026-01-02T00:00:00", "price": "1.5", "score": None}]
    pq.write_table(pa.Table.from_pylist([{"image": b"\x00"}]), tmp_path / "b.parquet")
    with pytest.raises(BadSource, match="column `image` of row 1"):
        read(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"a": 1}\n[1]\n', "the row is a list"),
        ("a.jsonl", "{", "the row is not JSON"),
        ("a.csv", "a,b\n1\n", "has 1 values, the header has 2"),
        ("a.csv", "a,a\n1,2\n", "does not name each column once"),
        ("a.parquet", "PAR1", "can't be read as .parquet"),
        ("a.arrow", "x", "can't be read as .arrow"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match=words):
        list(read_file(str(tmp_path / name)))


def test_a_csv_has_texts_except_in_typed_fields(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,label,margin\n007,true,0.5\n")
    assert read(tmp_path / "a.csv", booleans=("label",), numbers=("margin",)) == [{"prompt": "007", "label": True, "margin": 0.5}]


@pytest.mark.parametrize(("text", "label"), [("1", True), ("0", False), ("True", True), ("yes", "yes")])
def test_a_label_of_a_csv_may_be_a_number(tmp_path: Path, text: str, label: bool | str) -> None:
    (tmp_path / "a.csv").write_text(f"prompt,label\n007,{text}\n")
    assert read(tmp_path / "a.csv", booleans=("label",)) == [{"prompt": "007", "label": label}]


@pytest.mark.parametrize(
    ("weights", "until", "taken"),
    [
        (None, "first_exhausted", [100, 10]),
        ([3.0, 1.0], "first_exhausted", [30, 10]),
        ([3.0, 1.0], "all_exhausted", [100, 34]),
        ([1.0, 1000.0], "first_exhausted", [1, 10]),
    ],
)
def test_counts_of_a_mixture(weights: list[float] | None, until: str, taken: list[int]) -> None:
    assert mixture.counts([100, 10], weights, until) == taken


def test_the_order_of_a_mixture_follows_from_the_seed() -> None:
    order = list(mixture.order(["a", "b"], [10, 3], [4, 7], 1))
    assert order == list(mixture.order(["a", "b"], [10, 3], [4, 7], 1)) != list(mixture.order(["a", "b"], [10, 3], [4, 7], 2))
    first, second = ([row for source, row in order if source == wanted] for wanted in (0, 1))
    assert first == sorted(set(first)) and len(first) == 4
    assert second[:6] == [0, 1, 2, 0, 1, 2] and len(second) == 7


def test_a_missing_library_has_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(SourceError, match="needs the library pyarrow") as caught:
        read(tmp_path / "a.parquet")
    assert caught.value.reason == "LIBRARY_MISSING" and "rollout-workers[formats]" in caught.value.fix
