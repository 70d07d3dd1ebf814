"""Saves and restores processes of this host: the client of ``rollout process``
(docs/reliability.md). It needs CRIU and root; ``rollout doctor`` shows whether this host can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rollout.errors import RolloutError


class CheckpointError(RolloutError):
    """A process could not be saved or restored, for ``reason`` (docs/reliability.md)."""

    reason: ClassVar[str] = "PROCESS_NOT_RESTORED"

    def __init__(self, reason: str, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.reason = reason  # type: ignore[misc]  # of this error, not of the class


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored process. Killing ``keeper`` ends it and its descendants; its exit code is that of
    the process. pid: of the process itself."""

    keeper: subprocess.Popen[bytes]
    pid: int


def find_program() -> str:
    """The program: next to this Python environment, or on ``PATH``. Raises ``CheckpointError``."""
    for folder in (Path(sys.prefix) / "bin", Path(sys.prefix).parent / "bin"):
        if os.access(folder / "rollout", os.X_OK):
            return str(folder / "rollout")
    if found := shutil.which("rollout"):
        return found
    raise CheckpointError(
        "CHECKPOINT_UNAVAILABLE",
        "the program rollout is not installed",
        fix="run `make build` and add bin/ to PATH",
    )


async def save(pid: int, folder: str, *, keep: bool) -> None:
    """Save a process and its descendants to a new folder. keep: they continue, otherwise they end.
    Raises ``CheckpointError``; then they continue."""
    arguments = ["--format", "json", "process", "dump", str(pid), "--to", folder, *(["--keep"] if keep else [])]
    program = await asyncio.create_subprocess_exec(
        find_program(), *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, said = await program.communicate()
    if program.returncode:
        raise _error(said, "PROCESS_NOT_SAVED")


async def restore(folder: str, connect: Mapping[int, int], *, network: str = "") -> Restored:
    """Continue the processes of a folder until the keeper is killed.

    connect: a descriptor of the first process -> one of this process that takes its place; 1 and 2
    are this process's own without it. network: path of the network namespace to continue in; empty:
    this one. Raises ``CheckpointError``.
    """
    reading, writing = os.pipe()
    command = [find_program(), "process", "restore", folder, "--ready-fd", str(writing)]
    for theirs, ours in connect.items():
        command += ["--connect", f"{theirs}={ours}"]
    if network:
        command += ["--network", network]
    try:
        keeper = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[writing, *connect.values()], start_new_session=True
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    try:
        line = await asyncio.to_thread(_first_line, reading)
    except BaseException:
        keeper.kill()
        keeper.wait()
        raise
    answer: dict[str, Any] = json.loads(line) if line else {}
    if "pid" not in answer:
        keeper.kill()
        keeper.wait()
        raise _error(line, "PROCESS_NOT_RESTORED")
    return Restored(keeper, int(answer["pid"]))


def stream(folder: str) -> int:
    """The descriptor of the only socket that a restore must connect. Raises ``CheckpointError``."""
    try:
        image = json.loads((Path(folder) / "process.json").read_bytes())
        sockets = [each["descriptors"][0] for each in image.get("streams", []) if each["kind"] == "socket"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError("PROCESS_IMAGE_DAMAGED", f"the image in {folder} can't be read: {error}") from error
    if len(sockets) != 1:
        raise CheckpointError(
            "PROCESS_IMAGE_DAMAGED", f"the image in {folder} has {len(sockets)} sockets to other processes, not 1"
        )
    return int(sockets[0])


def _first_line(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as lines:
        return lines.readline()


def _error(said: bytes, reason: str) -> CheckpointError:
    """The error that the program wrote, as one JSON object."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(said)["error"]
        return CheckpointError(error["reason"] or reason, error["message"], fix=error.get("fix") or "")
    return CheckpointError(reason, f"`rollout process` failed: {said.decode(errors='replace').strip()[-500:] or 'see the log'}")
