"""The dry call of a teacher's endpoint."""

from __future__ import annotations

import os
from pathlib import Path

from rollout.errors import RolloutError
from rollout.probe.tokenizer import Json, tokenizer_of
from rollout.teacher import TeacherEndpoint


def ask_teacher(request: Json) -> Json:
    """Call a teacher's endpoint once, with the tokens of a prompt. Raises ``TeacherError``,
    :class:`SecretMissing`."""
    tokenizer = tokenizer_of(Path(request["model"]))
    ids: list[int] = tokenizer.encode(request["prompt"]).ids
    ids = ids if len(ids) > 1 else [*ids, 0, 0][:2]
    endpoint = TeacherEndpoint(
        request["base_url"],
        request["name"],
        api_key=secret(request["api_key"]),
        protocol=request["protocol"],
        timeout_seconds=request["timeout_seconds"],
        pieces=lambda token: [str(tokenizer.id_to_token(token)), tokenizer.decode([token], skip_special_tokens=False)],
    )
    return {"tokens": len(endpoint.logprobs(ids, 1))}


class SecretMissing(RolloutError):
    """A reference to a secret has no value."""

    reason = "SECRET_REFERENCE"


def secret(reference: str) -> str:
    """The value of ``env:NAME`` or ``file:PATH``. Raises :class:`SecretMissing`."""
    kind, _, rest = reference.partition(":")
    try:
        text = (os.environ.get(rest, "") if kind == "env" else Path(rest).read_text() if rest else "").strip()
    except OSError as error:
        raise SecretMissing(f"can't read {rest}: {error.strerror}", fix="correct `api_key`") from error
    if reference and not text:
        raise SecretMissing(f"`{reference}` is empty or not set", fix="set it where rolloutd runs")
    return text
