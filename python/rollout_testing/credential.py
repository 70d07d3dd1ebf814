"""The credentials of workers, as services compute them (``libs/credential``)."""

from __future__ import annotations

import hashlib
import hmac


def peer_token(mesh_token: str, run: str) -> str:
    """The token that the workers of a run accept."""
    message = f"rollout.worker-credential.v1\n{run}\npeer"
    return f"rw-{run}.peer.{hmac.new(mesh_token.encode(), message.encode(), hashlib.sha256).hexdigest()}"
