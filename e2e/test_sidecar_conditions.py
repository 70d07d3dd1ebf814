"""A sidecar of a run that leaks memory or stops answering is replaced, and `rollout status` and
`rollout explain` name it with the reason and a fix. The run ends with the weights of a run without
that."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mesh import ROOT, Mesh, until
from planted import explained, flag, job_of
from sim import Job, audited, finish, submit

pytestmark = pytest.mark.slow

_REWARD = """import os
import pathlib
import signal

SICK = pathlib.Path(__file__).with_name("sick")
kept = []


def letters(samples):
    if SICK.exists():
        if SICK.read_text() == "leaks":
            kept.append(b"x" * (300 << 20))
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
    return [sum(c.isalpha() for c in sample.completion) / max(1, len(sample.completion)) for sample in samples]
"""

_MANIFEST = """name = "letters"
version = "1.0.0"
kind = "reward"
command = ["python", "-m", "rollout.hosting.sidecar", "reward.py:letters"]
memory_bytes = 300_000_000
"""


def edit(config: Path) -> None:
    config.with_name("reward.py").write_text(_REWARD)
    config.with_name("reward.toml").write_text(_MANIFEST)
    text = config.read_text().replace("reward.py:letters", "reward.toml:letters")
    text = text.replace("group_attempts = 2", "group_attempts = 100")
    config.write_text(text.replace("retries = 0", "retries = 0\ntimeout_seconds = 3"))


def status(running: Mesh, *arguments: str) -> str:
    """The output of `rollout status`."""
    command = [str(ROOT / "bin" / "rollout"), *arguments, "status", "--state-dir", str(running.state)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def waits(document: Any) -> list[dict[str, Any]]:
    """All waits in a JSON document."""
    if isinstance(document, list):
        return [wait for each in document for wait in waits(each)]
    if not isinstance(document, dict):
        return []
    return [document] * ("reason" in document and "owner" in document) + waits(list(document.values()))


@pytest.mark.parametrize(
    ("sick", "reason", "text"),
    [
        ("leaks", "PLUGIN_LEAKS", "MB of memory after"),
        ("stops", "PLUGIN_BLOCKED", "did not answer health checks"),
    ],
)
def test_a_sick_sidecar_is_named(sick: str, reason: str, text: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=40, workers=1)
    with job_of(job, tmp_path / "state", edit=edit, seconds=0.05) as stalled:
        running, run = stalled.running, stalled.run

        def named(document: Any) -> bool:
            found = [wait for wait in waits(document) if wait["reason"] == reason]
            assert all("letters" in wait["owner"] + wait["evidence"] and wait["fix"] for wait in found), found
            return any(text in wait["evidence"] for wait in found)

        with flag(stalled.folder / "sick", sick):
            until(lambda: named(explained(running, run)), f"{reason} in `rollout explain`", 60)
            until(lambda: named(json.loads(status(running, "--format", "json"))), f"{reason} in `rollout status` as JSON", 60)
            until(lambda: f"{reason}  the sidecar letters: " in status(running), f"{reason} in `rollout status`", 60)
        digest = finish(running, run)
        assert audited(running, run)["whole"]
        again = submit(running, running.plan(job.folder / "job.toml"), job)
        assert finish(running, again) == digest
