"""The training state on disk: everything that a new process needs to continue bit for bit.

    <dir>/weights/...            the weights as a folder that from_pretrained loads; absent if the run
                                 trains adapters
    <dir>/adapter/...            the adapters, if any, as a folder that PEFT loads
    <dir>/average/...            the averaged weights, if any, as a folder that from_pretrained loads
    <dir>/optimizer.safetensors  moments and master copies by parameter, torch's random state, and the
                                 cached reference sums
    <dir>/critic.safetensors     weights and moments of the critic, if any
    <dir>/state.json             step, optimizer steps, KL coefficient, and digests; written last: a
                                 state without it is invalid

Adapters belong to the run's model, which a state names by the digests of its tensors.
"""

from __future__ import annotations

import json
import os
import random
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollout_workers.algorithms import Algorithm
from rollout_workers.trainer.distributed.checkpoint import save_files, saved
from rollout_workers.trainer.distributed.ranks import Ranks
from rollout_workers.trainer.distributed.shards import assign
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.objective import Models
from rollout_workers.trainer.optim.moments import KINDS
from rollout_workers.trainer.optim.optimizer import FlatAdamW
from rollout_workers.trainer.types import StateUnreadable
from rollout_workers.weights import complete_folder, named_weights, read_weights, weights_digest
from rollout_workers.weights.store import ADAPTER_FILE
from rollout_workers.weights.tensor_file import read_tensors

FORMAT = "rollout.train_state.v1"
_BASE_FIX = (
    "set `model.path` to the model that the adapters were trained on; "
    "`rollout export weights RUN --base --to FOLDER` writes a copy of it"
)
_MOMENTS = tuple(f"{prefix}{kind}/" for prefix in ("", "optimizer/") for kind in KINDS)
_MOMENT_DTYPES = (torch.float32, torch.uint8)  # a run may continue with another optimizer
_AS_MODEL = "To start from its weights only, export them with `rollout export weights` and set `model.path` to the result"


class Stateful(Protocol):
    """The parts of a trainer that a state is captured from and restored to."""

    step: int
    model_dir: Path
    config_folder: Path
    ranks: Ranks
    algorithm: Algorithm
    policy: Policy
    models: Models
    optimizer: FlatAdamW
    critic_optimizer: FlatAdamW | None


class Saving:
    """A state that is being written."""

    def __init__(self, directory: Path, writing: Future[Any]) -> None:
        self._directory, self._writing = directory, writing

    def result(self) -> list[Path]:
        """Wait until the state is durable. Returns its files, sorted, relative to the folder.
        Raises ``OSError`` and what else a rank raised."""
        saved(self._writing)
        return sorted(path.relative_to(self._directory) for path in self._directory.rglob("*") if path.is_file())


def save_state(directory: Path, trainer: Stateful) -> Saving:
    """Write a copy of the state of ``trainer`` to a folder, in a thread: the trainer may continue
    when the call returns. Every rank must call it, and writes its own rows.

    The folder is created if missing. An existing state is replaced; if the process dies, the folder
    has no valid state.
    """

    def begin() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "state.json").unlink(missing_ok=True)

    writing = save_files(directory, _files(trainer), trainer.ranks.saving, begin, _finish(directory, trainer))
    return Saving(directory, writing)


def _files(trainer: Stateful) -> dict[str, dict[str, Tensor]]:
    """This rank's part of the tensors of a state, live, by file. Every rank must call it."""
    adapter = trainer.policy.adapter
    tensors = trainer.optimizer.moments() | _scales(trainer, trainer.optimizer) | _torch_random_state()
    if len(trainer.models.cache):
        tensors |= trainer.models.cache.tensors()
    files = {
        "weights/model.safetensors": {} if adapter else dict(named_weights(trainer.policy.model)),
        "average/model.safetensors": _averages(trainer),
        f"adapter/{ADAPTER_FILE}": adapter.tensors() if adapter else {},
        "optimizer.safetensors": tensors,
        "critic.safetensors": _critic_tensors(trainer) | _scales(trainer, trainer.critic_optimizer),
    }
    own = trainer.ranks.rank == 0  # what is not sharded is the same on all ranks, or belongs to rank 0
    return {
        file: {name: tensor.contiguous() for name, tensor in found.items() if own or isinstance(tensor, DTensor)}
        for file, found in files.items()
    }


def _finish(directory: Path, trainer: Stateful) -> Callable[[], None]:
    """Writes the other files of a state, as the trainer is now. Every rank must call it."""
    adapter, step = trainer.policy.adapter, trainer.step
    averaged = bool(trainer.optimizer.averages()) and adapter is None
    numbers = {
        "format": FORMAT,
        "step": step,
        "optimizer_steps": trainer.optimizer.steps,
        "critic_optimizer_steps": trainer.critic_optimizer.steps if trainer.critic_optimizer else 0,
        "kl_coefficient": trainer.models.kl_coefficient if trainer.algorithm.next_kl_coefficient else None,
        "algorithm": trainer.algorithm.name,
        "reference": trainer.models.reference.name if trainer.models.reference else None,
        "random": _random_state(),
        "base": dict(adapter.base_digests(trainer.ranks)) if adapter else {},
        "weights_digest": "",
        "adapter_digest": "",
    }

    def finish() -> None:
        if adapter is None:
            manifest = complete_folder(directory / "weights", config_source_dir=trainer.config_folder, version=step)
            numbers["weights_digest"] = manifest.digest
        else:
            adapter.save_settings(directory / "adapter", trainer.model_dir)
            numbers["adapter_digest"] = weights_digest(read_tensors(directory / "adapter" / ADAPTER_FILE).items()).root
        if averaged:
            complete_folder(directory / "average", config_source_dir=trainer.config_folder, version=step)
        _replace(directory / "state.json", lambda path: path.write_text(json.dumps(numbers) + "\n"))

    return finish


def _averages(trainer: Stateful) -> dict[str, Tensor]:
    """The averaged weights in their dtypes, with untrained tensors unchanged; empty for
    adapters."""
    averages = trainer.optimizer.averages()
    if not averages or trainer.policy.adapter is not None:
        return {}
    return {
        name: averages[f"average/{name}"].to(tensor.dtype) if f"average/{name}" in averages else tensor
        for name, tensor in named_weights(trainer.policy.model)
    }


def load_state(directory: Path, trainer: Stateful) -> None:
    """Load a state, saved by any number of ranks, into ``trainer``.

    Everything is read and checked before anything changes. Raises ``StateUnreadable`` on all ranks
    if one cannot read it.
    """
    read, problem = None, ""
    base = trainer.policy.adapter.base_digests(trainer.ranks) if trainer.policy.adapter else {}
    try:
        read = _read(directory, trainer, base)
    except StateUnreadable as error:
        problem = str(error)
    refusal = next((text for text in trainer.ranks.exchange(problem) if text), "")
    if refusal or read is None:
        raise StateUnreadable(refusal)
    state, live, weights, saved, critic = read
    place = {"rank": trainer.ranks.rank, "ranks": trainer.ranks.size}
    with torch.no_grad():
        for name, tensor in live.items():
            assign(tensor, weights[name])
        for name, tensor in _critic_tensors(trainer).items():
            assign(tensor, critic[name])
    if trainer.critic_optimizer is not None:
        moments = {name.removeprefix("optimizer/"): tensor for name, tensor in critic.items()}
        trainer.critic_optimizer.load_moments(moments, steps=int(state["critic_optimizer_steps"]), **place)
    if trainer.algorithm.next_kl_coefficient and state.get("kl_coefficient"):  # without a controller the config determines it
        trainer.models.kl_coefficient = float(state["kl_coefficient"])
    reference = trainer.models.reference
    same = (
        reference is not None and state.get("reference", reference.name) == reference.name
    )  # the sums of another model are not loaded
    trainer.models.cache.load(*(saved.get(name) if same else None for name in ("reference/keys", "reference/sums")))
    trainer.optimizer.load_moments(saved, steps=int(state["optimizer_steps"]), **place)
    trainer.step = int(state["step"])
    _restore_random(state["random"], saved)


_Tensors = Mapping[str, Tensor]


def _read(
    directory: Path, trainer: Stateful, base: Mapping[str, str]
) -> tuple[dict[str, Any], _Tensors, _Tensors, _Tensors, _Tensors]:
    """The content of ``state.json``, the live tensors to set, their values, and the tensors of
    optimizer and critic. base: the digests of the frozen tensors of ``trainer``, used on rank 0.

    Raises ``StateUnreadable``.
    """
    try:
        state = json.loads((directory / "state.json").read_text())
        if state.get("format") != FORMAT:
            raise StateUnreadable(f"{directory}/state.json: format {state.get('format')!r} is not {FORMAT!r}")
        weights = {} if state.get("adapter_digest") else read_weights(directory / "weights")
        saved = read_tensors(directory / "optimizer.safetensors")
        if trainer.models.critic is not None and not (directory / "critic.safetensors").exists():
            raise StateUnreadable(f"{directory} has no critic, which {trainer.algorithm.name} needs. {_AS_MODEL}")
        critic = read_tensors(directory / "critic.safetensors") if trainer.models.critic is not None else {}
        adapters = read_tensors(directory / "adapter" / ADAPTER_FILE) if state.get("adapter_digest") else {}
    except StateUnreadable:
        raise
    except Exception as error:
        raise StateUnreadable(f"{directory} is not a readable training state: {error}") from error
    verifies = trainer.ranks.rank == 0  # one rank is enough
    if verifies and weights and weights_digest(weights.items()).root != state["weights_digest"]:
        raise StateUnreadable(f"{directory}/weights: the tensors are damaged: their digest is not {state['weights_digest']}")
    if (trainer.policy.adapter is not None) != bool(adapters):
        kind = "with" if adapters else "without"
        raise StateUnreadable(f"{directory} is a state {kind} adapters, unlike the run's config. {_AS_MODEL}")
    if verifies and adapters and weights_digest(adapters.items()).root != state["adapter_digest"]:
        raise StateUnreadable(f"{directory}/adapter: the tensors are damaged: their digest is not {state['adapter_digest']}")
    live = trainer.policy.adapter.tensors() if trainer.policy.adapter else dict(named_weights(trainer.policy.model))
    if trainer.policy.adapter and (difference := trainer.policy.adapter.differs(directory / "adapter", adapters)):
        raise StateUnreadable(f"{directory}/adapter {difference}: its adapters would give another policy")
    weights = adapters or weights
    _same_shapes(directory / ("adapter" if adapters else "weights"), live, weights)
    averages = trainer.optimizer.averages()
    wanted = {name: t for name, t in trainer.optimizer.moments().items() if name not in averages or name in saved}
    _same_shapes(directory / "optimizer.safetensors", wanted, saved)
    _same_shapes(directory / "critic.safetensors", _critic_tensors(trainer), critic)
    if verifies and (other := _first_difference(state.get("base") or base, base)):
        raise StateUnreadable(
            f"{directory} has adapters for another model than {trainer.model_dir}: {other} differs; {_BASE_FIX}"
        )
    return state, live, weights, saved, critic


def _first_difference(saved: Mapping[str, str], own: Mapping[str, str]) -> str:
    """The first tensor whose digest differs or that only one side has; empty if there is none."""
    return next((name for name in sorted(saved.keys() | own.keys()) if saved.get(name) != own.get(name)), "")


def _critic_tensors(trainer: Stateful) -> dict[str, Tensor]:
    """The critic's live weights, and its moments if it has its own optimizer."""
    if trainer.models.critic is None:
        return {}
    tensors = {f"critic/{name}": tensor for name, tensor in trainer.models.critic.state_dict().items()}
    if trainer.critic_optimizer is not None:
        tensors |= {f"optimizer/{name}": tensor for name, tensor in trainer.critic_optimizer.moments().items()}
    return tensors


def _scales(trainer: Stateful, optimizer: FlatAdamW | None) -> dict[str, Tensor]:
    """The scales of all ranks' 8-bit moments as ``scales/<ranks>/<rank>/<kind>/<number>``, and the
    values of the codes. Every rank must call it."""
    if optimizer is None:
        return {}
    own = {name: tensor.cpu() for name, tensor in optimizer.scales().items()}
    if not own:
        return {}
    found = enumerate(trainer.ranks.exchange(own))
    scales = {f"scales/{trainer.ranks.size}/{rank}/{name}": t for rank, scales in found for name, t in scales.items()}
    return scales | optimizer.codes()


def _same_shapes(path: Path, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        if name not in found:
            raise StateUnreadable(
                f"{path} has no tensor {name}: the state is of another model, algorithm, or precision. {_AS_MODEL}"
            )
        same = found[name].dtype == tensor.dtype or (name.startswith(_MOMENTS) and found[name].dtype in _MOMENT_DTYPES)
        if found[name].shape != tensor.shape or not same:
            raise StateUnreadable(
                f"{path}: {name} is {found[name].dtype} {tuple(found[name].shape)}, but the model's is "
                f"{tensor.dtype} {tuple(tensor.shape)}: the state is of another model or precision. {_AS_MODEL}"
            )


def _torch_random_state() -> dict[str, Tensor]:
    states = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"random/cuda/{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _random_state() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": random.getstate(),
        "numpy": {
            "bit_generator": numpy_state["bit_generator"],
            "key": numpy_state["state"]["key"].tolist(),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }


def _restore_random(state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    saved = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": saved["bit_generator"],
            "state": {"key": np.array(saved["key"], np.uint32), "pos": saved["pos"]},
            "has_gauss": saved["has_gauss"],
            "gauss": saved["gauss"],
        }
    )
    torch.set_rng_state(tensors["random/cpu"])
    for index in range(torch.cuda.device_count()):
        if f"random/cuda/{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random/cuda/{index}"], index)


def _replace(path: Path, write: Any) -> None:
    staged = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        write(staged)
        with open(staged, "rb") as file:
            os.fsync(file.fileno())
        staged.rename(path)
    finally:
        staged.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
