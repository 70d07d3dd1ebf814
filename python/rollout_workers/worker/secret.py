"""Secrets by reference: what a worker is started with says where they are, and never what they
are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from rollout.errors import RolloutError


class SecretError(RolloutError):
    """A reference names no secret, or is none."""

    reason: ClassVar[str] = "SECRET_REFERENCE"


def read_secret(reference: str, name: str, environment: Mapping[str, str] = os.environ) -> str:
    """What ``file:PATH`` or ``env:NAME`` holds; an empty reference is an empty secret. name: for
    errors, which never repeat a literal. Raises :class:`SecretError`."""
    kind, _, rest = reference.partition(":")
    if not reference:
        return ""
    if kind == "env" and rest:
        text = environment.get(rest, "").strip()
        if not text:
            raise SecretError(f"{name}: the variable {rest} is not set or empty")
        return text
    if kind == "file" and rest:
        try:
            text = Path(rest).read_text().strip()
        except OSError as error:
            raise SecretError(f"{name}: can't read {rest}: {error.strerror}") from error
        if not text:
            raise SecretError(f"{name}: {rest} is empty")
        return text
    raise SecretError(f"{name}: the value is a secret and not a reference to one", fix="write `file:PATH` or `env:NAME`")
