"""The worker's end of a reward process: start it, call it, end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.expression import ExpressionError
from rollout.plugin import RewardError, RewardFailed, RewardImportError, RewardShapeError, RewardTimeout, Score

_START_SECONDS = 120.0
_LENGTH = struct.Struct("<Q")
_OWN = {"ROLLOUT_WORKER_SPEC", "ROLLOUT_API_KEY"}
_ERRORS: dict[str, type[RewardError]] = {
    error.reason: error for error in (RewardFailed, RewardImportError, RewardShapeError, RewardTimeout, ExpressionError)
}


def environment() -> dict[str, str]:
    """This process's variables, without those that are for itself: its spec (which took the credentials of the mesh with it), the
    key of the person who started it, the headers that its exporter shows to a collector."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OWN and not (name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith("HEADERS"))
    }


class RewardProcess:
    """A process that has imported one reward, at the other end of a socket. One call at a time."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.broken = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, reward: Mapping[str, str]) -> RewardProcess:
        """Start and load ``{"plugin": "file.py:function", "base_dir": "/..."}`` or ``{"expression": "..."}``. Raises
        ``RewardImportError``, ``ExpressionError``, or ``RewardTimeout`` after two minutes."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollout_workers.rewards.child"],
                stdin=theirs.fileno(),
                start_new_session=True,  # so that what the reward starts ends with it
                env={**environment(), "PYTHONUNBUFFERED": "1"},
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        self = cls(process, reader, writer)
        try:
            await self._exchange(dict(reward), _START_SECONDS, "importing the reward")
        except BaseException:
            self.kill()
            raise
        return self

    async def call(self, groups: Sequence[tuple[bytes, Sequence[tuple[str, str, bytes]]]], timeout: float) -> list[Score]:
        """Scores of all samples in order. groups: (row as JSON, (prompt, completion, its tokens as int32) of each sample). Raises
        ``RewardError``; after a timeout or a crash the process is ``broken``."""
        samples = sum(len(pairs) for _, pairs in groups)
        return await self._exchange(groups, timeout, f"the reward of {samples} samples")

    def kill(self) -> None:
        """End the process and all that it started."""
        self.broken = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()  # a killed process ends at once
        self._writer.transport.abort()

    async def _exchange(self, request: Any, timeout: float, what: str) -> Any:
        self.broken = True  # until the answer is read in full
        try:
            async with asyncio.timeout(timeout):
                answer = await self._send(request)
        except TimeoutError:
            raise RewardTimeout(
                f"{what} took longer than {timeout:g} s", fix="make it faster or raise `reward.timeout_seconds`"
            ) from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self._ended()
            raise RewardFailed(f"{what} ended its process ({code})", fix="see the worker's log") from None
        self.broken = False
        if "error" in answer:
            raise _ERRORS.get(answer["error"], RewardFailed)(answer["message"])
        return answer["value"]

    async def _send(self, request: Any) -> dict[str, Any]:
        body = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(body)) + body)
        await self._writer.drain()
        (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        return pickle.loads(await self._reader.readexactly(size))

    async def _ended(self) -> str:
        try:
            code = await asyncio.to_thread(self._process.wait, 1)
        except subprocess.TimeoutExpired:
            return "it closed its end"
        return f"signal {-code}" if code < 0 else f"exit code {code}"
