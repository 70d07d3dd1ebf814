"""The dry call of a teacher's endpoint."""

from __future__ import annotations

from pathlib import Path

from rollout.probe.tokenizer import Json, tokenizer_of
from rollout.secret import read_secret
from rollout.teacher import TeacherEndpoint


def ask_teacher(request: Json) -> Json:
    """Call a teacher's endpoint once, with the tokens of a prompt. Raises ``TeacherError``,
    :class:`SecretError`."""
    tokenizer = tokenizer_of(Path(request["model"]))
    ids: list[int] = tokenizer.encode(request["prompt"]).ids
    ids = ids if len(ids) > 1 else [*ids, 0, 0][:2]
    endpoint = TeacherEndpoint(
        request["base_url"],
        request["name"],
        api_key=read_secret(request["api_key"], "`api_key`"),
        protocol=request["protocol"],
        timeout_seconds=request["timeout_seconds"],
        pieces=lambda token: [str(tokenizer.id_to_token(token)), tokenizer.decode([token], skip_special_tokens=False)],
    )
    return {"tokens": len(endpoint.logprobs(ids, 1))}
