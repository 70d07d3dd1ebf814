"""The credentials of workers and the signatures of services, as services compute them
(``libs/credential``, ``libs/discovery``)."""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import Any

from nacl.signing import SigningKey

from rollout_workers.worker.seal import sealed


def worker_token(mesh_token: str, run: str, role: str, incarnation: int = 1) -> str:
    """A new credential of a worker of a run."""
    return _issue(mesh_token, f"{run}.{role}.{incarnation}.{int(time.time()) + 3600}")


def peer_token(mesh_token: str, run: str, incarnation: int = 1) -> str:
    """The token that the workers of an incarnation accept."""
    return _issue(mesh_token, f"{run}.peer.{incarnation}.0")


def services_key(mesh_token: str) -> str:
    """The public key of the registrations of a control plane's services, in hexadecimal."""
    return _key(mesh_token).verify_key.encode().hex()


def sign(mesh_token: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body of a registration request (``Name``, ``ID``, ``Address``, ``Port``, ``Meta``) with
    the signature of a service."""
    meta: dict[str, str] = dict(body.get("Meta") or {})
    message = sealed({"Service": {**body, "Service": body["Name"], "Meta": meta}})
    return {**body, "Meta": {**meta, "signature": _key(mesh_token).sign(message.encode()).signature.hex()}}


def _key(mesh_token: str) -> SigningKey:
    return SigningKey(hmac.new(mesh_token.encode(), b"rollout.registration.v1", hashlib.sha256).digest())


def _issue(mesh_token: str, claims: str) -> str:
    message = f"rollout.worker-credential.v2\n{claims}"
    return f"rw-{claims}.{hmac.new(mesh_token.encode(), message.encode(), hashlib.sha256).hexdigest()}"
