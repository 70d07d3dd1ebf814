"""Loads complete models from folders in the Hugging Face layout. transformers alone would fill
missing tensors with random numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from rollout.errors import RolloutError


class WeightsIncomplete(RolloutError):
    """The weights in a folder do not match the model that its config.json describes."""

    reason: ClassVar[str] = "WEIGHTS_INCOMPLETE"
    permanent: ClassVar[bool] = True
    """A restart would fail in the same way."""


class ModelUnknown(RolloutError, ValueError):
    """The installed transformers cannot load the folder as the requested kind of model."""

    reason: ClassVar[str] = "MODEL_UNKNOWN"
    permanent: ClassVar[bool] = True


def load_whole(auto: Any, directory: str | os.PathLike[str], *, new: Sequence[str] = (), **options: Any) -> Any:
    """Load ``auto.from_pretrained(directory, **options)`` without network access. new: tensors that
    may be missing in the folder. Raises :class:`WeightsIncomplete`, :class:`ModelUnknown`."""
    try:
        model, info = auto.from_pretrained(
            directory, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except ValueError as error:
        first = str(error).partition("\n")[0]
        raise ModelUnknown(f"{os.fspath(directory)} can't be loaded by {auto.__name__}: {first}") from error
    fix = "save the model again with `save_pretrained`, weights and config.json together"
    if wrong := sorted(info["mismatched_keys"], key=str):
        name, has, wants = (tuple(item) if isinstance(item, (list, tuple)) else item for item in wrong[0])
        raise WeightsIncomplete(
            f"{name} of {directory} has the shape {_shape(has)}, and config.json wants {_shape(wants)}{_more(wrong)}", fix=fix
        )
    if missing := sorted(set(info["missing_keys"]) - set(new)):
        raise WeightsIncomplete(f"{directory} has no tensor {missing[0]}{_more(missing)}", fix=fix)
    model.config.return_dict = True  # outputs are read by name
    return model


def _shape(shape: Any) -> str:
    return "x".join(str(int(size)) for size in shape)


def _more(names: list[Any]) -> str:
    return f", and {len(names) - 1} others" if len(names) > 1 else ""
