"""Verifies the registrations of services: only a process with the mesh token can sign one
(``libs/discovery/seal.go``, docs/wire.md)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

log = logging.getLogger(__name__)

_SIGNATURE = "signature"
_EPOCH = "epoch"


class Seal:
    """Recognizes the services of one control plane."""

    def __init__(self, key: str) -> None:
        """key: the public key, 64 hexadecimal digits; empty: no registration is authentic. Raises
        ``ValueError`` for another text."""
        self._key = VerifyKey(bytes.fromhex(key)) if key else None
        self._reported: set[tuple[str, str]] = set()

    def services(self, name: str, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The entries of Consul's ``/v1/health/service`` that a service of this name of the control
        plane registered; of a service with leaders, only the newest one. Others are logged once."""
        authentic = [entry for entry in entries if self._authentic(name, entry)]
        newest = max((_epoch(entry) for entry in authentic), default=0)
        return [entry for entry in authentic if _epoch(entry) == newest]

    def _authentic(self, name: str, entry: dict[str, Any]) -> bool:
        message = sealed(entry)
        try:
            signature = bytes.fromhex(_meta(entry).get(_SIGNATURE, ""))
            if self._key is not None and message and entry["Service"].get("Service") == name:
                self._key.verify(message.encode(), signature)
                return True
        except (BadSignatureError, ValueError):
            pass
        seen = str(entry["Service"].get("ID", "")), address_of(entry)
        if seen not in self._reported:
            self._reported.add(seen)
            log.warning("a registration of %s without a valid signature of this control plane is ignored: %s at %s", name, *seen)
        return False


def sealed(entry: dict[str, Any]) -> str:
    """What a signature covers; empty if a value has a line break, which would make the lines
    ambiguous."""
    service, meta = entry["Service"], _meta(entry)
    lines = ["rollout.service.v1", service.get("Service", ""), service.get("ID", ""), address_of(entry)]
    lines += [f"{key}={meta[key]}" for key in sorted(meta) if key != _SIGNATURE]
    message = "\n".join(lines)
    return message if message.count("\n") == len(lines) - 1 else ""


def address_of(entry: dict[str, Any]) -> str:
    """host:port of an entry."""
    host = entry["Service"].get("Address") or (entry.get("Node") or {}).get("Address", "")
    return f"[{host}]:{entry['Service']['Port']}" if ":" in host else f"{host}:{entry['Service']['Port']}"


def _meta(entry: dict[str, Any]) -> dict[str, str]:
    return entry["Service"].get("Meta") or {}


def _epoch(entry: dict[str, Any]) -> int:
    text = _meta(entry).get(_EPOCH, "")
    return int(text) if text.isascii() and text.isdigit() else 0
