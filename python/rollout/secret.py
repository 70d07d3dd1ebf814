"""Reads secrets from files and environment variables, so that a worker's spec contains only
references to them."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from rollout.errors import RolloutError


class SecretError(RolloutError):
    """A reference to a secret is invalid, or the secret is missing."""

    reason: ClassVar[str] = "SECRET_REFERENCE"


def read_secret(reference: str, name: str, environment: Mapping[str, str] = os.environ) -> str:
    """The secret that ``file:PATH`` or ``env:NAME`` refers to; an empty reference is an empty
    secret. name: the field's name for errors, which never contain the value. Raises
    :class:`SecretError`."""
    kind, _, rest = reference.partition(":")
    if not reference:
        return ""
    if kind == "env" and rest:
        text = environment.get(rest, "").strip()
        if not text:
            raise SecretError(f"{name}: the environment variable {rest} is empty or not set", fix="set it where rolloutd runs")
        return text
    if kind == "file" and rest:
        try:
            with Path(rest).open() as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                text = file.read().strip()
        except OSError as error:
            raise SecretError(f"{name}: can't read {rest}: {error.strerror}") from error
        if mode & 0o077:
            raise SecretError(f"{name}: others may read {rest} (mode {mode:04o}, not 0600)", fix=f"chmod 600 {rest}")
        if not text:
            raise SecretError(f"{name}: the file {rest} is empty")
        return text
    raise SecretError(f"{name}: the value must be a reference to a secret, not the secret", fix="write `file:PATH` or `env:NAME`")
