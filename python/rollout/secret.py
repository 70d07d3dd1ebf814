"""References to secrets: ``env:NAME`` and ``file:PATH``."""

from __future__ import annotations

import os
from pathlib import Path

from rollout.errors import RolloutError


class SecretMissing(RolloutError):
    """A reference to a secret has no value."""

    reason = "SECRET_REFERENCE"


def secret(reference: str) -> str:
    """The value of ``env:NAME`` or ``file:PATH``; an empty reference is an empty secret. Raises
    :class:`SecretMissing`."""
    kind, _, rest = reference.partition(":")
    if reference and (kind not in ("env", "file") or not rest):
        raise SecretMissing("`api_key` must be a reference to a secret, not the secret", fix="write `file:PATH` or `env:NAME`")
    try:
        text = (os.environ.get(rest, "") if kind == "env" else Path(rest).read_text() if rest else "").strip()
    except OSError as error:
        raise SecretMissing(f"can't read {rest}: {error.strerror}", fix="correct `api_key`") from error
    if reference and not text:
        raise SecretMissing(f"`{reference}` is empty or not set", fix="set it where rolloutd runs")
    return text
