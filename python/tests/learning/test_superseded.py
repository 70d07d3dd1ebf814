"""A learner that stood still in the middle of publishing, and wakes up when its successor has published."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from google.rpc import code_pb2

from rollout_workers.delivery.place import Place, Superseded, replace
from rollout_workers.learning.publication import Publication
from rollout_workers.learning.server import LearnerServer
from rollout_workers.mesh.status import status_of

from .test_publication import held, publication

STEP = 5
SUPERSEDED, PUBLISHED, OTHER = 3, 4, 5


def stand_still() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def after(call: Callable[..., object]) -> Callable[..., object]:
    """The call, and then nothing more before somebody says go on."""

    def stopping(*arguments: object, **more: object) -> object:
        made = call(*arguments, **more)
        stand_still()
        return made

    return stopping


def frozen(tmp_path: Path, where: str, *lasting: int) -> int:
    """A process that stands still in the middle of publishing other weights of a step than its successor will make: when they are
    laid out (``staged``), or one moment before the rename (``checked``). It leaves with what came of it."""
    pid = os.fork()
    if pid:
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        return pid
    code = OTHER
    try:
        made, trainer = publication(tmp_path, *lasting)
        trainer.step, trainer.value = STEP, -1.0
        if where == "staged":
            trainer.write_weights = after(trainer.write_weights)  # type: ignore[method-assign, assignment]
        else:
            check = made._place.check
            calls = iter((check, after(check)))  # before anything is made, and before the rename
            made._place.check = lambda: next(calls, check)()  # type: ignore[method-assign, return-value]
        made.publish(trainer)  # type: ignore[arg-type]
        code = PUBLISHED
    except Superseded:
        made.prepare(trainer) if made.mine else made.close()  # type: ignore[arg-type]
        code = SUPERSEDED
    finally:
        os._exit(code)


@pytest.mark.parametrize("lasting", [(), (STEP,)], ids=["memory", "folder"])
@pytest.mark.parametrize("again", [(), (STEP,)], ids=["into memory", "into the folder"])
@pytest.mark.parametrize("where", ["staged", "checked"])
def test_it_changes_nothing(where: str, again: tuple[int, ...], lasting: tuple[int, ...], tmp_path: Path) -> None:
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


def test_an_older_incarnation_claims_nothing(tmp_path: Path) -> None:
    newer = Place(tmp_path / "weights", 3)
    with pytest.raises(Superseded, match="incarnation 3"):
        Publication("run-1", str(tmp_path), lasting=lambda _: False, shelf=None, incarnation=2)  # type: ignore[arg-type]
    newer.check()
    Place(tmp_path / "weights", 4)
    with pytest.raises(Superseded, match=r"claim 4\.1, this one's is 3\.1"):
        newer.check()


def test_a_learner_that_was_superseded_leaves() -> None:
    """And says so in a way after which the controller looks for the other one."""
    reasons: list[str] = []
    server = LearnerServer(None, None, None, SimpleNamespace(fence=reasons.append))  # type: ignore[arg-type]
    with pytest.raises(Superseded) as told, server._leaving_superseded():
        raise Superseded("another learner publishes")
    assert reasons == ["another learner publishes"]
    assert status_of(told.value).code == code_pb2.UNAVAILABLE


@pytest.mark.parametrize("supported", [True, False], ids=["exchanged", "stepped aside"])
def test_a_rename_without_its_source_leaves_the_target(supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported:
        monkeypatch.setattr("rollout_workers.delivery.place._EXCHANGE", 1 << 30)  # EINVAL, as of a file system that can't
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
