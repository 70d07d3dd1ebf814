"""A ``rolloutd`` with NATS and the registry alone, or with what a test names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
BINARY_VARIABLE = "ROLLOUTD"
_START_SECONDS = 60.0


class Daemon:
    """A child process with its own state folder. ``stop`` and ``start`` again: the same folder,
    other ports."""

    def __init__(self, state: Path, *, targets: str = "nats,registry", options: Sequence[str] = ()) -> None:
        """targets: what it hosts. options: further flags."""
        self.state = state
        self._flags = ["--target", targets, "--state-dir", str(state), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.nats_url = ""
        self.consul = ""
        self.token = ""

    def start(self) -> Daemon:
        """Return when it serves."""
        (self.state / "rolloutd.json").unlink(missing_ok=True)
        self.state.mkdir(parents=True, exist_ok=True)
        with open(self.state / "rolloutd.log", "ab") as log:
            self._process = subprocess.Popen([binary(), *self._flags], stdout=log, stderr=log)
        published = self._wait_for_file()
        self.nats_url, self.consul = published["nats"], published["consul"]
        self.token = Path(published["token_file"]).read_text().strip()
        return self

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it and wait."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)
            self._process = None

    def _wait_for_file(self) -> dict[str, Any]:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                return json.loads((self.state / "rolloutd.json").read_text())
            except (OSError, ValueError):
                time.sleep(0.005)
        raise RuntimeError(f"rolloutd did not start: {(self.state / 'rolloutd.log').read_text()[-2000:]}")


def binary() -> str:
    """``$ROLLOUTD``, else ``bin/rolloutd`` of this checkout, which is built where it is missing."""
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        return named
    path = REPOSITORY / "bin" / "rolloutd"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        subprocess.run(["go", "build", "-o", str(path), "./rolloutd"], cwd=REPOSITORY / "cmd", check=True)
    return str(path)


def sandbox_binary() -> str:
    """``$ROLLOUT_SANDBOX``, else ``bin/rollout-sandbox`` of this checkout, which is built where it
    is missing."""
    if named := os.environ.get("ROLLOUT_SANDBOX"):
        return named
    path = REPOSITORY / "bin" / "rollout-sandbox"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        static = {**os.environ, "CGO_ENABLED": "0"}
        subprocess.run(["go", "build", "-o", str(path), "./rollout-sandbox"], cwd=REPOSITORY / "cmd", env=static, check=True)
    return str(path)
