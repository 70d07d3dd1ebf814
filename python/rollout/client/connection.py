"""Where the control plane is, and the token that it asks for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from rollout.errors import RolloutError

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.max_send_message_length", 256 << 20),
)


class NoDaemon(RolloutError):
    """No local ``rolloutd`` has said where it serves."""

    reason: ClassVar[str] = "NO_DAEMON"


@dataclass(frozen=True, slots=True)
class Server:
    """A gRPC address (``host:port``) and its bearer token, which ``repr`` leaves out."""

    address: str
    token: str = field(default="", repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def state_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """``$ROLLOUT_STATE_DIR``, else ``$XDG_STATE_HOME/rollout``, else ``~/.local/state/rollout``."""
    if environment.get("ROLLOUT_STATE_DIR"):
        return Path(environment["ROLLOUT_STATE_DIR"])
    if environment.get("XDG_STATE_HOME"):
        return Path(environment["XDG_STATE_HOME"]) / "rollout"
    return Path.home() / ".local" / "state" / "rollout"


def local_server(state: str | os.PathLike[str] | None = None) -> Server:
    """The ``rolloutd`` of a state folder (absent: the usual one). Raises :class:`NoDaemon`."""
    folder = Path(state) if state is not None else state_directory()
    path = folder / "rolloutd.json"
    try:
        told = cast(dict[str, Any], json.loads(path.read_text()))
        return Server(str(told["grpc"]), Path(str(told["token_file"])).read_text().strip())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoDaemon(
            f"{path} names no running rolloutd ({type(error).__name__}: {error})",
            mend="start one with `rollout daemon start`, or name a server",
        ) from error


def locate(server: str | None, token: str | None, state: str | os.PathLike[str] | None) -> Server:
    """The named server, else the local one. Without a token a named server gets the local token, where there is one."""
    if server is None:
        return local_server(state)
    if token is None:
        try:
            token = local_server(state).token
        except NoDaemon:
            token = ""
    return Server(server, token)
