"""A learner that was paused while it published, and continues after its successor has published."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from google.rpc import code_pb2

from rollout_workers.learner import publication as published
from rollout_workers.learner.publication import Publication
from rollout_workers.learner.server import LearnerServer
from rollout_workers.weights.transfer import publish_folder
from rollout_workers.weights.transfer.publish_folder import PublishFolder, Superseded, replace
from rollout_workers.worker.status import status_of

from .test_publication import held, publication

STEP = 5
SUPERSEDED, PUBLISHED, OTHER = 3, 4, 5


def pause() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def after(call: Callable[..., object]) -> Callable[..., object]:
    """Make the call, then pause the process until it gets SIGCONT."""

    def stopping(*arguments: object, **more: object) -> object:
        made = call(*arguments, **more)
        pause()
        return made

    return stopping


def started(body: Callable[[], int]) -> int:
    """Start a process that pauses inside ``body`` and exits with the code that ``body`` returns."""
    pid = os.fork()
    if pid:
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        return pid
    code = OTHER
    try:
        code = body()
    finally:
        os._exit(code)


def frozen(tmp_path: Path, where: str, *lasting: int) -> int:
    """A process that pauses while it publishes a step, with other weights than its successor: after
    writing the staging folder (``staged``), or just before the rename (``checked``). Its exit code
    is the outcome."""

    def body() -> int:
        made, trainer = publication(tmp_path, *lasting)
        trainer.step, trainer.value = STEP, -1.0
        if where == "staged":
            trainer.write_weights = after(trainer.write_weights)  # type: ignore[method-assign, assignment]
        else:
            check = made._place.check
            calls = iter((check, after(check)))  # the first check is before writing, the second before the rename
            made._place.check = lambda: next(calls, check)()  # type: ignore[method-assign, return-value]
        try:
            made.publish(trainer)  # type: ignore[arg-type]
        except Superseded:
            made.prepare(trainer) if made.mine else made.close()  # type: ignore[arg-type]
            return SUPERSEDED
        return PUBLISHED

    return started(body)


def removing(tmp_path: Path, where: str, *lasting: int) -> int:
    """A process that pauses while it removes old versions: after checking the owner of the folder
    (``looked``), after listing the versions (``listed``), or after creating the folder that
    replaces a version (``laid``)."""

    def body() -> int:
        made, trainer = publication(tmp_path, *lasting)
        for trainer.step in range(1, STEP):
            made.publish(trainer)  # type: ignore[arg-type]
        check = made._place.check
        if where == "listed":
            published.versions = after(published.versions)  # type: ignore[assignment]
        else:
            calls = iter((after(check),) if where == "looked" else (check, after(check)))
            made._place.check = lambda: next(calls, check)()  # type: ignore[method-assign, return-value]
        try:
            made.prepare(trainer)  # type: ignore[arg-type]
        except Superseded:
            made.close()
            return SUPERSEDED
        return PUBLISHED

    return started(body)


@pytest.mark.parametrize("lasting", [(), (STEP,)], ids=["memory", "folder"])
@pytest.mark.parametrize("again", [(), (STEP,)], ids=["into memory", "into the folder"])
@pytest.mark.parametrize("where", ["staged", "checked"])
def test_a_replaced_learner_publishes_nothing(
    where: str, again: tuple[int, ...], lasting: tuple[int, ...], tmp_path: Path
) -> None:
    pid = frozen(tmp_path, where, *lasting)
    try:
        successor, trainer = publication(tmp_path, *again)
        for trainer.step in (STEP - 1, STEP):
            manifest = successor.publish(trainer)  # type: ignore[arg-type]
    finally:
        os.kill(pid, signal.SIGCONT)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert held(manifest.directory) == STEP
    assert code == SUPERSEDED
    successor.close()
    assert held(manifest.directory) == STEP and not Path(manifest.directory).is_symlink()
    root = Path(manifest.directory).parent
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith(".owner-")) == ["v000005"]


@pytest.mark.parametrize("lasting", [(), (1, 2)], ids=["memory", "folder"])
@pytest.mark.parametrize("again", [(), (1, 2)], ids=["into memory", "into the folder"])
@pytest.mark.parametrize("where", ["looked", "listed", "laid"])
def test_the_cleanup_of_a_replaced_learner_removes_nothing(
    where: str, again: tuple[int, ...], lasting: tuple[int, ...], tmp_path: Path
) -> None:
    """The successor restarted from an earlier step and published the same versions again."""
    pid = removing(tmp_path, where, *lasting)
    try:
        successor, trainer = publication(tmp_path, *again)
        for trainer.step in (1, 2):
            trainer.value = 10.0 * trainer.step
            manifest = successor.publish(trainer)  # type: ignore[arg-type]
    finally:
        os.kill(pid, signal.SIGCONT)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    root = Path(manifest.directory).parent
    assert [held(str(root / f"v00000{step}")) for step in (1, 2)] == [10, 20]
    assert code == SUPERSEDED
    assert not list(root.glob(".*.tmp"))


@pytest.mark.parametrize("supported", [True, False], ids=["exchanged", "stepped aside"])
def test_a_version_that_a_successor_published_during_a_removal_stays(
    supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a removal, an empty folder has the version's name, and a successor may replace that
    folder."""
    if not supported:
        monkeypatch.setattr(
            "rollout_workers.weights.transfer.publish_folder._EXCHANGE", 1 << 30
        )  # EINVAL, as on a file system without support
    place, target = PublishFolder(tmp_path, 1), tmp_path / "v000001"
    fresh = tmp_path / "fresh"
    for folder, text in ((target, "old"), (fresh, "new")):
        folder.mkdir()
        (folder / "file").write_text(text)
    swap = publish_folder._swap

    def swapped(staging: Path, at: Path) -> None:
        swap(staging, at)
        assert list(at.iterdir()) == []
        monkeypatch.undo()
        replace(fresh, at)

    monkeypatch.setattr(publish_folder, "_swap", swapped)
    place.discard(target.name)
    assert (target / "file").read_text() == "new"
    place.discard(target.name)
    place.discard(target.name)  # does not exist any more
    assert [path.name for path in tmp_path.iterdir()] == [".owner-1-1"]


def test_an_older_incarnation_cannot_claim_the_folder(tmp_path: Path) -> None:
    newer = PublishFolder(tmp_path / "weights", 3)
    with pytest.raises(Superseded, match="incarnation 3"):
        Publication("run-1", str(tmp_path), lasting=lambda _: False, memory=None, incarnation=2)  # type: ignore[arg-type]
    newer.check()
    PublishFolder(tmp_path / "weights", 4)
    with pytest.raises(Superseded, match=r"claim 4\.1, this one's is 3\.1"):
        newer.check()


def test_a_replaced_learner_shuts_down() -> None:
    """The call fails with UNAVAILABLE, so that the controller looks up the new learner."""
    reasons: list[str] = []
    server = LearnerServer(None, None, None, SimpleNamespace(fence=reasons.append))  # type: ignore[arg-type]
    with pytest.raises(Superseded) as raised, server._leaving_superseded():
        raise Superseded("another learner publishes")
    assert reasons == ["another learner publishes"]
    assert status_of(raised.value).code == code_pb2.UNAVAILABLE


@pytest.mark.parametrize("supported", [True, False], ids=["exchanged", "stepped aside"])
def test_a_rename_without_its_source_leaves_the_target(supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported:
        monkeypatch.setattr(
            "rollout_workers.weights.transfer.publish_folder._EXCHANGE", 1 << 30
        )  # EINVAL, as on a file system without support
    target, link = tmp_path / "v1", tmp_path / "v2"
    target.mkdir()
    (target / "file").write_text("here")
    link.symlink_to(target)
    for path in (target, link):
        with pytest.raises(FileNotFoundError):
            replace(tmp_path / "gone", path)
        assert (path / "file").read_text() == "here"
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    replace(fresh, link)
    assert link.is_dir() and not link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1", "v2"]
