"""``rollout-worker push`` against a hub on this machine, as the process that
``rollout export push`` starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_testing.hub import Hub, Repository

PYTHON = Path(__file__).parents[2]
Push = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(token="secret") as served:
        yield served


@pytest.fixture
def push(tmp_path: Path, hub: Hub) -> Push:
    """Pushes a folder with a model and its card. Returns the exit code and the answer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\ntags: [rollout]\n---\n# card\n")
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)

    def run(
        repository: str = "me/sums", *, environ: dict[str, str] | None = None, **changes: object
    ) -> tuple[int, dict[str, Any]]:
        spec = {"folder": str(folder), "repository": repository, "revision": "", "private": True, "message": "step 40", **changes}
        path = tmp_path / "spec.json"
        path.write_text(json.dumps(spec))
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(PYTHON),
            "HOME": str(tmp_path),
            "HF_HOME": str(tmp_path / "hf"),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "secret",
        } | (environ or {})
        command = [sys.executable, "-m", "rollout_workers", "push", "--spec", str(path)]
        done = subprocess.run(
            command, env={k: v for k, v in environment.items() if v}, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_folder_becomes_a_commit_of_a_private_repository(hub: Hub, push: Push) -> None:
    code, answer = push()
    repository = hub.repositories["me/sums"]
    assert (code, answer["event"], answer["commit"]) == (0, "end", repository.commit)
    assert answer["url"] == f"{hub.url}/me/sums/commit/{repository.commit}"
    assert repository.private
    assert repository.messages == ["step 40"]
    assert repository.branches["main"]["model.safetensors"] == b"weights" * 1000
    assert sorted(repository.branches["main"]) == ["README.md", "config.json", "model.safetensors"]


def test_a_revision_is_a_branch_of_the_repository(hub: Hub, push: Push) -> None:
    for message in ("step 40", "step 80"):  # the second one finds repository and branch
        code, answer = push(revision="step-40", private=False, message=message)
        assert code == 0, answer
    repository = hub.repositories["me/sums"]
    assert not repository.private
    assert sorted(repository.branches["step-40"]) == ["README.md", "config.json", "model.safetensors"]
    assert repository.branches["main"] == {}


def test_a_private_upload_never_reaches_a_public_repository(hub: Hub, push: Push) -> None:
    hub.repositories["me/sums"] = Repository(private=False)
    code, answer = push()
    assert (code, answer["reason"]) == (65, "HUB_REPOSITORY_PUBLIC")
    assert "--public" in answer["fix"]
    assert hub.repositories["me/sums"].branches["main"] == {}


def test_the_token_can_be_in_the_file_of_the_login(hub: Hub, push: Push, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("secret\n")
    assert push(environ={"HF_TOKEN": ""})[0] == 0


@pytest.mark.parametrize(
    ("environ", "repository", "code", "reason", "fix"),
    [
        ({"HF_TOKEN": ""}, "me/sums", 66, "HUB_NO_TOKEN", "hf auth login"),
        ({"HF_TOKEN": "other"}, "me/sums", 65, "HUB_DENIED", "hf auth login"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "me/sums", 69, "HUB_UNREACHABLE", "HF_ENDPOINT"),
        ({}, "me/sums/more", 64, "HUB_BAD_NAME", "owner/name"),
    ],
)
def test_errors_have_a_reason_and_a_fix(
    push: Push, environ: dict[str, str], repository: str, code: int, reason: str, fix: str
) -> None:
    got, answer = push(repository, environ=environ)
    assert (got, answer["event"], answer["reason"]) == (code, "error", reason), answer
    assert fix in answer["fix"]


@pytest.mark.parametrize(("status", "code", "reason"), [(403, 65, "HUB_DENIED"), (400, 65, "HUB_REFUSED")])
def test_answers_of_the_hub_have_a_reason(hub: Hub, push: Push, status: int, code: int, reason: str) -> None:
    hub.status = status
    got, answer = push()
    assert (got, answer["reason"]) == (code, reason), answer


def test_a_missing_library_is_named(push: Push, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "huggingface_hub"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('absent')\n")
    code, answer = push(environ={"PYTHONPATH": f"{tmp_path / 'hidden'}:{PYTHON}"})
    assert (code, answer["reason"]) == (66, "LIBRARY_MISSING")
    assert "huggingface_hub" in answer["message"]
