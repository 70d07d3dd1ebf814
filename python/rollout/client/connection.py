"""Address and token of the control plane."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import grpc

from rollout.channel import OPTIONS
from rollout.errors import RolloutError

_FILE_VARIABLES = ("ROLLOUT_CA_FILE", "ROLLOUT_CERT_FILE", "ROLLOUT_KEY_FILE")


class NoDaemon(RolloutError):
    """No local ``rolloutd`` runs."""

    reason: ClassVar[str] = "NO_DAEMON"


@dataclass(frozen=True, slots=True)
class Server:
    """A gRPC address (``host:port``), its bearer token, which ``repr`` omits, and the PEM files of
    TLS; without files: plain text."""

    address: str
    token: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def channel(self, transport: Any = grpc) -> Any:
        """A channel to the server, with TLS if files are named. transport: ``grpc`` or
        ``grpc.aio``. Raises ``OSError`` if a file cannot be read."""
        if not (self.ca_file or self.cert_file):
            return transport.insecure_channel(self.address, options=OPTIONS)
        ca, cert, key = (Path(file).read_bytes() if file else None for file in (self.ca_file, self.cert_file, self.key_file))
        return transport.secure_channel(self.address, grpc.ssl_channel_credentials(ca, key, cert), options=OPTIONS)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def state_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """``$ROLLOUT_STATE_DIR``, else ``$XDG_STATE_HOME/rollout``, else ``~/.local/state/rollout``."""
    if environment.get("ROLLOUT_STATE_DIR"):
        return Path(environment["ROLLOUT_STATE_DIR"])
    if environment.get("XDG_STATE_HOME"):
        return Path(environment["XDG_STATE_HOME"]) / "rollout"
    return Path.home() / ".local" / "state" / "rollout"


def local_server(state: str | os.PathLike[str] | None = None) -> Server:
    """The ``rolloutd`` of a state folder; default: the usual folder. Raises :class:`NoDaemon`."""
    folder = Path(state) if state is not None else state_directory()
    path = folder / "rolloutd.json"
    try:
        announced = cast(dict[str, Any], json.loads(path.read_text()))
        files = (str(announced.get(name, "")) for name in ("ca_file", "cert_file", "key_file"))
        return Server(str(announced["grpc"]), Path(str(announced["token_file"])).read_text().strip(), *files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoDaemon(
            f"{path} names no running rolloutd ({type(error).__name__}: {error})",
            fix="start one with `rollout daemon start`, or name a server",
        ) from error


def locate(server: str | None, token: str | None, state: str | os.PathLike[str] | None) -> Server:
    """The named server, or the local one. A named server is called with the certificates of
    ``$ROLLOUT_CA_FILE``, ``$ROLLOUT_CERT_FILE``, and ``$ROLLOUT_KEY_FILE``. The default token is
    ``$ROLLOUT_API_KEY``, or else the token of the local ``rolloutd``."""
    if server is None:
        return local_server(state)
    token = token or os.environ.get("ROLLOUT_API_KEY") or None
    if token is None:
        try:
            token = local_server(state).token
        except NoDaemon:
            token = ""
    return Server(server, token, *(os.environ.get(name, "") for name in _FILE_VARIABLES))
