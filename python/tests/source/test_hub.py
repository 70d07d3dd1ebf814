"""Data sets and models of a hub, read through the real libraries in a process of the planner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.source.hub_stub import Repository, serve

SOURCE = Path(__file__).parents[2]
OLD, NEW = "a" * 40, "b" * 40
README = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: other
  data_files:
  - {split: train, path: other/train.jsonl}
---
"""


def rows(*questions: str) -> bytes:
    return b"".join(json.dumps({"question": question, "answer": "2"}).encode() + b"\n" for question in questions)


def gsm(train: bytes) -> dict[str, bytes]:
    return {"README.md": README, "main/train.jsonl": train, "main/test.jsonl": rows("t"), "other/train.jsonl": rows("o")}


REPOSITORIES = {
    "datasets/openai/gsm8k": Repository("datasets", {OLD: gsm(rows("1+1=")), NEW: gsm(rows("1+1=", "2+2="))}),
    "datasets/org/gated": Repository("datasets", {NEW: gsm(b"")}, gated=True),
    "models/org/tiny": Repository("models", {OLD: {"config.json": b"{}"}, NEW: {"config.json": b'{"new": 1}', "big.bin": b"no"}}),
    "models/org/gated": Repository("models", {NEW: {}}, gated=True),
}


@pytest.fixture
def ask(tmp_path: Path) -> Any:
    def ask(request: dict[str, Any], url: str) -> dict[str, Any]:
        environment = {"PYTHONPATH": str(SOURCE), "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}
        process = subprocess.run(
            [sys.executable, "-m", "rollout.probe"], input=json.dumps(request), capture_output=True, text=True, timeout=110,
            env=environment | {"PATH": os.environ["PATH"], "HF_HUB_ETAG_TIMEOUT": "2"},
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    return ask


def data(tmp_path: Path, path: str, **options: Any) -> dict[str, Any]:
    source = {"name": "", "path": path, "subset": "main", "split": "train", "weight": None, "revision": ""}
    source |= {"rename": None, "booleans": None, "numbers": None} | options
    return {"base_dir": str(tmp_path), "output": str(tmp_path / "rows.tmp"), "seed": 0, "until": "", "sources": [source]}


def test_a_data_set_is_read_at_a_commit(tmp_path: Path, ask: Any) -> None:
    rename = {"question": "prompt"}
    with serve(REPOSITORIES) as hub:
        answers = ask(
            {
                "data": [
                    data(tmp_path, "openai/gsm8k", rename=rename) | {"output": str(tmp_path / "new")},
                    data(tmp_path, "openai/gsm8k", rename=rename, revision=OLD) | {"output": str(tmp_path / "old")},
                    data(tmp_path, f"openai/gsm8k@{OLD}", split="test") | {"output": str(tmp_path / "test")},
                ]
            },
            hub.url,
        )["data"]
    assert [answer.get("error") for answer in answers] == [None] * 3
    assert [answer["sources"][0]["revision"] for answer in answers] == [NEW, OLD, OLD]
    assert [answer["rows"] for answer in answers] == [2, 1, 1]
    assert answers[2]["sources"][0]["path"] == "openai/gsm8k"
    written = [json.loads(line) for line in (tmp_path / "new").read_text().splitlines()]
    assert written == [{"answer": "2", "prompt": "1+1="}, {"answer": "2", "prompt": "2+2="}]


def test_what_the_hub_refuses_has_a_reason_and_a_fix(tmp_path: Path, ask: Any) -> None:
    cases = {
        "openai/gsm9k": ({}, "HUB_NOT_FOUND", "neither a path here nor a data set"),
        "openai/gsm8k@gone": ({}, "HUB_NOT_FOUND", "has no revision `gone`"),
        "org/gated": ({}, "HUB_DENIED", "is gated"),
        f"openai/gsm8k@{OLD}": ({"subset": "none"}, "HUB_NOT_FOUND", "no subset `none`"),
        f"openai/gsm8k@{NEW}": ({"split": "dev"}, "HUB_NOT_FOUND", "no split `dev`"),
    }
    with serve(REPOSITORIES) as hub:
        request = {"data": [data(tmp_path, name, **options) for name, (options, _, _) in cases.items()]}
        answers = ask(request | {"models": [{"name": "org/gated", "patterns": ["*"]}]}, hub.url)
    for (name, (_, reason, words)), answer in zip(cases.items(), answers["data"], strict=True):
        assert answer["error"]["reason"] == reason, (name, answer)
        assert words in answer["error"]["message"] and answer["error"]["fix"], (name, answer)
    assert answers["models"][0]["error"]["reason"] == "HUB_DENIED"


def test_a_model_is_downloaded_once_and_found_again_without_the_hub(tmp_path: Path, ask: Any) -> None:
    request = {"models": [{"name": "org/tiny", "patterns": ["*.json"]}, {"name": f"org/tiny@{OLD}", "patterns": ["*.json"]}]}
    with serve(REPOSITORIES) as hub:
        answers = ask(request, hub.url)["models"]
    assert [answer["revision"] for answer in answers] == [NEW, OLD]
    assert [(Path(answer["folder"]) / "config.json").read_bytes() for answer in answers] == [b'{"new": 1}', b"{}"]
    assert not (Path(answers[0]["folder"]) / "big.bin").exists()
    again = ask({**request, "data": [data(tmp_path, "openai/gsm8k")]}, "http://127.0.0.1:9")
    assert again["models"] == answers
    assert again["data"][0]["error"]["reason"] == "HUB_UNREACHABLE"
