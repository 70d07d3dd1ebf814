"""Where weights are stored: in shared memory, or in the run's folder if they must outlive the
process."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from rollout_workers.learner.publication import Publication
from rollout_workers.weights import WeightsManifest, read_manifest, read_weights, write_weights
from rollout_workers.weights.transfer.shared_memory import SharedMemory


class Trainer:
    """The part of a trainer that a publication uses."""

    adapts = False

    def __init__(self, model: Path) -> None:
        self.step, self.config_folder = 0, model
        self.value: float | None = None  # the value of every weight; None: the step

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return [("w", torch.full((4, 4), float(self.step) if self.value is None else self.value))]

    def write_weights(self, folder: Path, *, fsync: bool, staging: Path | None = None) -> WeightsManifest:
        return write_weights(
            folder, self.named_weights(), config_source_dir=self.config_folder, version=self.step, fsync=fsync, staging=staging
        )


def publication(tmp_path: Path, *lasting: int) -> tuple[Publication, Trainer]:
    model, memory = tmp_path / "model", tmp_path / "memory"
    for folder in (model, memory):
        folder.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    shared = SharedMemory("run-1", memory)
    return Publication("run-1", str(tmp_path / "run"), lasting=lambda step: step in lasting, memory=shared), Trainer(model)


def held(directory: str) -> float:
    return float(read_weights(directory)["w"][0, 0])


def versions(tmp_path: Path) -> dict[str, bool]:
    """The folders of the run's weights, and whether each is a link into memory."""
    return {path.name: path.is_symlink() for path in sorted((tmp_path / "run" / "weights").glob("v*"))}


def test_only_lasting_versions_are_written_to_disk(tmp_path: Path) -> None:
    made, trainer = publication(tmp_path, 2)
    for trainer.step in (1, 2, 3):
        manifest = made.publish(trainer)  # type: ignore[arg-type]
        assert held(manifest.directory) == trainer.step
        made.prepare(trainer)  # type: ignore[arg-type]
    assert versions(tmp_path) == {"v000002": False, "v000003": True}
    [folder] = (tmp_path / "memory").glob("rollout-*/run-*")
    assert sorted(path.name for path in folder.glob("v*")) == ["v000003"]  # the memory of removed versions is free again


def test_versions_on_disk_have_a_digest_for_each_file(tmp_path: Path) -> None:
    """`rollout audit` compares them with the files."""
    made, trainer = publication(tmp_path, 1)
    for trainer.step in (1, 2):
        made.publish(trainer)  # type: ignore[arg-type]
    made.close()
    (tmp_path / "model" / "config.json").write_text("edited")
    for version in ("v000001", "v000002"):
        folder = tmp_path / "run" / "weights" / version
        if folder.exists():
            files = {file.path: file.digest for file in read_manifest(folder).files}
            assert files == {
                name: f"blake3-{blake3((folder / name).read_bytes()).hexdigest()}"
                for name in ("config.json", "model.safetensors")
            }
            assert (folder / "config.json").read_text() == "{}"
    assert (tmp_path / "run" / "weights" / "v000002").is_dir()


def test_a_step_that_is_made_again_replaces_its_weights(tmp_path: Path) -> None:
    made, trainer = publication(tmp_path)
    trainer.step = 1
    first = made.publish(trainer)  # type: ignore[arg-type]
    assert held(made.publish(trainer).directory) == 1  # type: ignore[arg-type]
    assert versions(tmp_path) == {"v000001": True}
    assert first.directory == str(tmp_path / "run" / "weights" / "v000001")


def test_the_newest_version_is_copied_to_disk_at_the_end(tmp_path: Path) -> None:
    made, trainer = publication(tmp_path)
    for trainer.step in (1, 2):
        manifest = made.publish(trainer)  # type: ignore[arg-type]
        made.prepare(trainer)  # type: ignore[arg-type]
    made.close()
    assert versions(tmp_path) == {"v000002": False} and held(manifest.directory) == 2
    assert list((tmp_path / "memory").glob("rollout-*/run-*")) == []


def test_a_replaced_learner_keeps_the_versions_of_its_successor(tmp_path: Path) -> None:
    old, trainer = publication(tmp_path)
    for trainer.step in (1, 2):
        old.publish(trainer)  # type: ignore[arg-type]
    new, _ = publication(tmp_path)
    for trainer.step in (2, 3):
        manifest = new.publish(trainer)  # type: ignore[arg-type]
    old.close()
    assert versions(tmp_path) == {"v000001": True, "v000002": True, "v000003": True} and held(manifest.directory) == 3
    new.close()
    assert versions(tmp_path) == {"v000003": False} and held(manifest.directory) == 3


def test_versions_of_a_dead_process_are_used_and_then_removed(tmp_path: Path) -> None:
    dead, trainer = publication(tmp_path)
    trainer.step = 1
    manifest = dead.publish(trainer)  # type: ignore[arg-type]
    dead._memory._release()  # a killed process only releases its lock
    again, trainer = publication(tmp_path)
    assert held(manifest.directory) == 1
    trainer.step = 2
    again.publish(trainer)  # type: ignore[arg-type]
    again.close()
    assert list((tmp_path / "memory").glob("rollout-*/run-*")) == []

    other, trainer = publication(tmp_path)
    trainer.step = 3
    manifest = other.publish(trainer)  # type: ignore[arg-type]
    other._memory._release()
    SharedMemory("run-2", tmp_path / "memory").close()  # the next start of another run removes them
    assert not Path(manifest.directory).exists()


def test_without_shared_memory_the_folder_is_used(tmp_path: Path) -> None:
    made, trainer = publication(tmp_path)
    made._memory.close()
    trainer.step = 1
    assert held(made.publish(trainer).directory) == 1  # type: ignore[arg-type]
    assert versions(tmp_path) == {"v000001": False}
    made.close()


def test_a_platform_without_shared_memory_logs_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert SharedMemory("run-1", tmp_path / "absent").folder is None
    assert "weights are written to the run's folder" in caplog.text


def test_a_platform_that_cannot_reserve_memory_writes_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delattr("os.posix_fallocate")
    made, trainer = publication(tmp_path)
    for trainer.step in (1, 2):
        assert held(made.publish(trainer).directory) == trainer.step  # type: ignore[arg-type]
        made.prepare(trainer)  # type: ignore[arg-type]
    assert versions(tmp_path)["v000002"]


def test_full_memory_falls_back_to_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, trainer = publication(tmp_path)
    write = trainer.write_weights

    def full(folder: Path, *, fsync: bool, staging: Path | None = None) -> WeightsManifest:
        if "memory" in folder.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, fsync=fsync)

    monkeypatch.setattr(trainer, "write_weights", full)
    trainer.step = 1
    assert held(made.publish(trainer).directory) == 1  # type: ignore[arg-type]
    assert versions(tmp_path) == {"v000001": False}


def test_the_next_version_is_written_into_memory_that_was_reserved_for_it(tmp_path: Path) -> None:
    made, trainer = publication(tmp_path)
    trainer.step = 1
    made.publish(trainer)  # type: ignore[arg-type]
    made.prepare(trainer)  # type: ignore[arg-type]
    [reserved] = (tmp_path / "memory").glob("rollout-*/run-*/.*.tmp/model.safetensors")
    inode = reserved.stat().st_ino
    trainer.step = 2
    manifest = made.publish(trainer)  # type: ignore[arg-type]
    assert held(manifest.directory) == 2
    assert (Path(manifest.directory) / "model.safetensors").stat().st_ino == inode
