"""Whole models from folders in the Hugging Face layout: transformers fills with random numbers what
a folder lacks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from rollout.errors import RolloutError


class WeightsIncomplete(RolloutError):
    """A folder whose weights are not those of the model that its config.json describes."""

    reason: ClassVar[str] = "WEIGHTS_INCOMPLETE"
    permanent: ClassVar[bool] = True
    """To start again would meet the same."""


class ModelUnknown(RolloutError, ValueError):
    """A folder of a model that transformers, as it is installed here, does not know as one of the
    kind that is wanted."""

    reason: ClassVar[str] = "MODEL_UNKNOWN"
    permanent: ClassVar[bool] = True


def load_whole(auto: Any, directory: str | os.PathLike[str], *, new: Sequence[str] = (), **options: Any) -> Any:
    """The model that ``auto.from_pretrained(directory, **options)`` gives, without network. new:
    tensors that the folder may lack. Raises :class:`WeightsIncomplete`, :class:`ModelUnknown`."""
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
