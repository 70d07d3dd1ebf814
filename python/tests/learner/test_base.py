"""The model of a run that trains adapters is stored once, whatever happens to the user's copy."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
from blake3 import blake3

from rollout_workers.learner import base as base_module
from rollout_workers.learner.base import Base, BaseFile, BaseModelChanged


class Storage:
    """The digests that the storage service has."""

    def __init__(self) -> None:
        self.digests: set[str] = set()

    async def stored(self, digests: Collection[str]) -> Collection[str]:
        return self.digests & set(digests)

    def take(self, state: Path) -> None:
        """Store the files of a state."""
        self.digests |= {digest(path) for path in state.rglob("*") if path.is_file()}


def digest(path: Path) -> str:
    return f"blake3-{blake3(path.read_bytes()).hexdigest()}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"tensors" * 1000)
    return folder


def base_of(model: Path, tmp_path: Path, storage: Storage) -> Base:
    files = [BaseFile(path.name, path, digest(path), path.stat().st_size) for path in sorted(model.iterdir())]
    return Base(files, tmp_path / "run" / "base-1", storage.stored)


async def test_only_the_first_snapshot_contains_the_files(model: Path, tmp_path: Path) -> None:
    storage = Storage()
    base = base_of(model, tmp_path, storage)
    base.keep()
    first = await base.stage(tmp_path / "step-1")
    assert {file.path: file.digest for file in first} == {f"base/{path.name}": digest(path) for path in model.iterdir()}
    staged = {path.name: path for path in (tmp_path / "step-1" / "base").iterdir()}
    assert {name: digest(path) for name, path in staged.items()} == {path.name: digest(path) for path in model.iterdir()}
    owned = {path.stat().st_ino for path in model.iterdir()}
    assert not owned & {path.stat().st_ino for path in staged.values()}, "a snapshot shares a file with the user's model"
    storage.take(tmp_path / "step-1")
    assert await base.stage(tmp_path / "step-2") == first
    assert not (tmp_path / "step-2").exists() and not (tmp_path / "run" / "base-1").exists()


async def test_the_user_may_change_the_model_during_the_run(model: Path, tmp_path: Path) -> None:
    storage = Storage()
    base = base_of(model, tmp_path, storage)
    (tmp_path / "run" / "base-0").mkdir(parents=True)  # of a learner that died
    base.keep()
    assert base._keeping is not None
    await base._keeping
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["base-1"]
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(b"other")
    (model / "config.json").unlink()
    await base.stage(tmp_path / "step-1")
    assert (tmp_path / "step-1" / "base" / "model.safetensors").read_bytes() == content
    await base.close()
    assert list((tmp_path / "run").iterdir()) == []


async def test_files_that_are_no_longer_stored_are_copied_again(model: Path, tmp_path: Path) -> None:
    storage = Storage()
    storage.take(model)
    base = base_of(model, tmp_path, storage)
    base.keep()
    await base.stage(tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()
    storage.digests.clear()  # the snapshots of all other runs were deleted
    await base.stage(tmp_path / "step-2")
    assert len(list((tmp_path / "step-2" / "base").iterdir())) == 2


async def test_a_full_disk_delays_the_copy(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, copy = base_of(model, tmp_path, Storage()), base_module.copy_verified

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(base_module, "copy_verified", full)
    base.keep()
    with pytest.raises(OSError, match="No space left"):
        await base.stage(tmp_path / "step-1")
    monkeypatch.setattr(base_module, "copy_verified", copy)
    await base.stage(tmp_path / "step-1")
    assert len(list((tmp_path / "step-1" / "base").iterdir())) == 2


@pytest.mark.parametrize("gone", [False, True], ids=["changed", "gone"])
async def test_a_changed_model_is_named(model: Path, tmp_path: Path, gone: bool) -> None:
    base = base_of(model, tmp_path, Storage())
    if gone:
        shutil.rmtree(model)
    else:
        (model / "config.json").write_text("other")
    base.keep()
    message = r"config\.json does not exist any more" if gone else r"config\.json has the digest blake3-.* the plan"
    with pytest.raises(BaseModelChanged, match=message + ".*restore the file"):
        await base.stage(tmp_path / "step-1")
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name.startswith(".")]
    await asyncio.sleep(0)
