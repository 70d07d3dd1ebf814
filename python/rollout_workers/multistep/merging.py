"""Merges the batches of environment ranks into one.

A batch is a dict with ``obs`` and, each or ``None``, ``final_obs``, ``dones``, ``terminations``,
``truncations``, ``rewards``, ``intervene_actions``, and ``intervene_flags``. ``obs`` and
``final_obs`` are dicts of tensors whose first dimension is the row, lists with one item a row,
nested dicts of these, or ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollout_workers.multistep.errors import BatchInvalid

OBSERVATIONS = ("main_images", "wrist_images", "extra_view_images", "states", "task_descriptions")
"""Keys of observations that a merged batch always has."""
STEP_FIELDS = ("dones", "terminations", "truncations", "rewards")
INTERVENTIONS = ("intervene_actions", "intervene_flags")
"""A rank without an intervention may send ``None`` where another sends tensors."""
_SIZED_BY = ("states", "main_images", "task_descriptions")

Batch = Mapping[str, Any]


def rows_of(batch: Batch, rank: int) -> int:
    """The rows of the batch of an environment rank. Raises :class:`BatchInvalid` if no field shows
    them."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("obs"), Mapping):
        raise BatchInvalid(f"env rank {rank} sent {_described(batch)}, not a dict with `obs`")
    obs = batch["obs"]
    for value in (batch.get("dones"), *(obs.get(key) for key in _SIZED_BY), *obs.values()):
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
        if isinstance(value, list):
            return len(value)
    raise BatchInvalid(f"the batch of env rank {rank} has no tensor or list that shows its rows")


def merge(batches: Sequence[Batch], ranks: Sequence[int]) -> dict[str, Any]:
    """One batch with the rows of all, in order. Tensors are contiguous and on the CPU.

    Tensors are concatenated and lists joined. What is ``None`` in all batches stays ``None``; what
    is ``None`` in some is an error, with two exceptions: a missing ``final_obs`` is replaced by the
    ``obs`` of that rank, and missing interventions by zeros. The given batches don't change.
    ranks: of the batches, for errors. Raises :class:`BatchInvalid`.
    """
    observations = [batch["obs"] for batch in batches]
    merged: dict[str, Any] = {"obs": _observations("obs", observations, ranks), "final_obs": None}
    finals = [batch.get("final_obs") for batch in batches]
    if any(final is not None for final in finals):
        given = [obs if final is None else final for obs, final in zip(observations, finals, strict=True)]
        merged["final_obs"] = _observations("final_obs", given, ranks)
    for field in STEP_FIELDS:
        merged[field] = _tensors(field, [batch.get(field) for batch in batches], ranks)
    for field in INTERVENTIONS:
        merged[field] = _tensors(field, _with_zeros(field, batches, ranks), ranks)
    return merged


def _with_zeros(field: str, batches: Sequence[Batch], ranks: Sequence[int]) -> list[Any]:
    values = [batch.get(field) for batch in batches]
    like = next((value for value in values if isinstance(value, Tensor)), None)
    if like is None:
        return values
    return [
        like.new_zeros((rows_of(batch, rank), *like.shape[1:]), device="cpu") if value is None else value
        for batch, rank, value in zip(batches, ranks, values, strict=True)
    ]


def _observations(where: str, given: Sequence[Any], ranks: Sequence[int]) -> dict[str, Any]:
    return {**dict.fromkeys(OBSERVATIONS), **_mappings(where, given, ranks)}


def _mappings(where: str, given: Sequence[Any], ranks: Sequence[int]) -> dict[str, Any]:
    for rank, value in zip(ranks, given, strict=True):
        if not isinstance(value, Mapping):
            raise BatchInvalid(f"`{where}` of env rank {rank} is {_described(value)}, not a dict")
    keys = dict.fromkeys(key for mapping in given for key in mapping)
    return {key: _values(f"{where}.{key}", [mapping.get(key) for mapping in given], ranks) for key in keys}


def _values(where: str, values: Sequence[Any], ranks: Sequence[int]) -> Any:
    first = next((value for value in values if value is not None), None)
    if isinstance(first, list):
        _of_one_kind(where, values, ranks, list, "a list")
        return [item for value in values for item in value]
    if isinstance(first, Mapping):
        _of_one_kind(where, values, ranks, Mapping, "a dict")
        return _mappings(where, values, ranks)
    return _tensors(where, values, ranks)


def _tensors(where: str, values: Sequence[Any], ranks: Sequence[int]) -> Tensor | None:
    if all(value is None for value in values):
        return None
    _of_one_kind(where, values, ranks, Tensor, "a tensor")
    on_cpu = [value.cpu() for value in values]
    if len(on_cpu) == 1:
        return on_cpu[0].contiguous()
    try:
        return torch.cat(on_cpu, dim=0).contiguous()
    except RuntimeError as error:
        shapes = ", ".join(f"{list(value.shape)} of env rank {rank}" for value, rank in zip(values, ranks, strict=True))
        raise BatchInvalid(f"`{where}` can't be concatenated: {shapes}", fix="send the same shape but for the rows") from error


def _of_one_kind(where: str, values: Sequence[Any], ranks: Sequence[int], kind: type, name: str) -> None:
    if all(isinstance(value, kind) for value in values):
        return
    given = ", ".join(f"{_described(value)} of env rank {rank}" for value, rank in zip(values, ranks, strict=True))
    missing = [str(rank) for value, rank in zip(values, ranks, strict=True) if value is None]
    fix = f"env ranks {', '.join(missing)} must send it too" if missing else "send tensors, lists, or None"
    raise BatchInvalid(f"`{where}` is not {name} in every batch: {given}", fix=fix)


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
