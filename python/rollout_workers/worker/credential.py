"""The credential of a worker, which the scheduler renews while the worker runs."""

from __future__ import annotations

import os
from pathlib import Path

from rollout.run.v1.run_pb2 import WorkerSpec


class Token:
    """A credential. Calling it returns the text that is in force."""

    def __init__(self, text: str, path: str = "") -> None:
        """text: the first credential. path: the file to which renewed ones are written; empty:
        there are none."""
        self._text, self._path = text, path
        self._stamp: tuple[int, int, int] | None = None

    def __call__(self) -> str:
        """The newest text. While the file can't be read, or is empty, the last one."""
        if not self._path:
            return self._text
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            if stamp != self._stamp:
                text = Path(self._path).read_text().strip()
                self._text, self._stamp = text or self._text, stamp
        except (OSError, UnicodeDecodeError):
            pass  # the scheduler writes the file again
        return self._text


NO_TOKEN = Token("")


def own(spec: WorkerSpec) -> Token:
    """The worker's own credential, for calls of services."""
    return Token(spec.token, spec.token_file)


def of_server(spec: WorkerSpec, text: str) -> Token:
    """The token for NATS or Consul: the worker's own credential if the spec has that, else
    ``text``, which does not change."""
    return own(spec) if text and text == spec.token else Token(text)
