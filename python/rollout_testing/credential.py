"""The credentials of workers, as services compute them (``libs/credential``)."""

from __future__ import annotations

import hashlib
import hmac


def worker_token(mesh_token: str, run: str, role: str) -> str:
    """The credential of a worker of a run."""
    message = f"rollout.worker-credential.v1\n{run}\n{role}"
    return f"rw-{run}.{role}.{hmac.new(mesh_token.encode(), message.encode(), hashlib.sha256).hexdigest()}"


def peer_token(mesh_token: str, run: str) -> str:
    """The token that the workers of a run accept."""
    return worker_token(mesh_token, run, "peer")
