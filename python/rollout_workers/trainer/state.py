"""The training state on disk: all that a new process needs to go on bit for bit.

<dir>/weights/...             the weights as a folder that from_pretrained loads, adapters merged in
<dir>/adapter/...             the adapters where there are any, as a folder that PEFT loads
<dir>/average/...             the average of the weights where one is kept, as a folder that from_pretrained loads
<dir>/optimizer.safetensors   moments by parameter (and master copies), state of torch's random numbers
<dir>/critic.safetensors      weights and moments of a critic, where there is one
<dir>/state.json              step, optimizer steps, controlled KL coefficient, digests; written last: it makes the state valid

``optimizer.safetensors`` holds the reference's sums of data as well, which are computed once.
"""

from __future__ import annotations

import json
import os
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout_workers.algorithms import Algorithm
from rollout_workers.trainer.distributed.ranks import Ranks
from rollout_workers.trainer.distributed.shards import assign, whole
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.objective import Machine
from rollout_workers.trainer.optim.optimizer import FlatAdamW
from rollout_workers.trainer.types import StateUnreadable
from rollout_workers.weights import named_weights, read_weights, weights_digest, write_weights
from rollout_workers.weights.store import WeightsUnreadable

FORMAT = "rollout.train_state.v1"
_AS_MODEL = "To begin with its weights alone, name what `rollout export weights` writes of it as `model.path`"


class Stateful(Protocol):
    """The parts of a trainer that a state is captured from and restored to."""

    step: int
    model_dir: Path
    companions: Path
    ranks: Ranks
    algorithm: Algorithm
    policy: Policy
    machine: Machine
    optimizer: FlatAdamW
    critic_optimizer: FlatAdamW | None


@dataclass(frozen=True, slots=True)
class State:
    """What is written. Tensors are whole, whatever number of ranks holds them: a state knows nothing of ranks."""

    policy: Policy
    companions: Path
    weights: Mapping[str, Tensor]
    averages: Mapping[str, Tensor]
    adapters: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    critic: Mapping[str, Tensor]
    numbers: Mapping[str, Any]


def capture(trainer: Stateful) -> State:
    """The state of ``trainer``: views of what is live where there is one rank."""
    adapter = trainer.policy.adapter
    tensors = trainer.optimizer.moments() | _scales(trainer, trainer.optimizer) | _torch_random_state()
    if len(trainer.machine.cache):
        tensors |= trainer.machine.cache.tensors()
    return State(
        policy=trainer.policy,
        companions=trainer.companions,
        weights=dict(trainer.policy.named_weights()),
        averages=_averages(trainer),
        adapters=_whole(adapter.tensors()) if adapter else {},
        tensors=_whole(tensors),
        critic=_whole(_critic_tensors(trainer) | _scales(trainer, trainer.critic_optimizer)),
        numbers={
            "format": FORMAT,
            "step": trainer.step,
            "optimizer_steps": trainer.optimizer.steps,
            "critic_optimizer_steps": trainer.critic_optimizer.steps if trainer.critic_optimizer else 0,
            "kl_coefficient": trainer.machine.kl_coefficient if trainer.algorithm.next_kl_coefficient else None,
            "algorithm": trainer.algorithm.name,
            "reference": trainer.machine.reference.name if trainer.machine.reference else None,
            "random": _random_state(),
        },
    )


def write_state(directory: Path, state: State) -> list[Path]:
    """Write a state into ``directory`` (made where absent); durable when it returns.

    A state that was there is replaced; cut off in between, the folder holds no valid state. Returns the files, sorted,
    relative to the folder.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "state.json").unlink(missing_ok=True)
    manifest = write_weights(
        directory / "weights",
        state.weights.items(),
        config_source_dir=state.companions,
        version=state.numbers["step"],
    )
    if state.averages:
        write_weights(
            directory / "average",
            state.averages.items(),
            config_source_dir=state.companions,
            version=state.numbers["step"],
        )
    adapter = state.policy.adapter
    if adapter is not None:
        adapter.write(directory / "adapter", state.adapters)
    _replace(directory / "optimizer.safetensors", lambda path: save_file(dict(state.tensors), path))
    if state.critic:
        _replace(directory / "critic.safetensors", lambda path: save_file(dict(state.critic), path))
    digests = {
        "weights_digest": manifest.digest,
        "adapter_digest": weights_digest(state.adapters.items()).root if adapter else "",
    }
    _replace(directory / "state.json", lambda path: path.write_text(json.dumps({**state.numbers, **digests}) + "\n"))
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


def _averages(trainer: Stateful) -> dict[str, Tensor]:
    """The averages under the weights' names and in their types, with what is not trained as it is; none of adapters."""
    averages = trainer.optimizer.averages()
    if not averages or trainer.policy.adapter is not None:
        return {}
    return {
        name: whole(averages[f"average/{name}"]).to(tensor.dtype) if f"average/{name}" in averages else tensor
        for name, tensor in trainer.policy.named_weights()
    }


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gathered, on the CPU, as files hold them."""
    return {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in tensors.items()}


def load_state(directory: Path, trainer: Stateful) -> None:
    """Set ``trainer`` to a saved state, of any number of ranks. Everything is read and checked before anything is changed; where
    one rank can't read it, all refuse."""
    read, told = None, ""
    try:
        read = _read(directory, trainer)
    except StateUnreadable as error:
        told = str(error)
    refusal = next((text for text in trainer.ranks.exchange(told) if text), "")
    if refusal or read is None:
        raise StateUnreadable(refusal)
    state, live, weights, saved, critic = read
    with torch.no_grad():
        for name, tensor in live.items():
            assign(tensor, weights[name])
        for name, tensor in _critic_tensors(trainer).items():
            assign(tensor, critic[name])
    if trainer.critic_optimizer is not None:
        moments = {name.removeprefix("optimizer/"): tensor for name, tensor in critic.items()}
        scales = _own_scales(trainer, critic)
        trainer.critic_optimizer.load_moments(moments, steps=int(state["critic_optimizer_steps"]), scales=scales)
    if trainer.algorithm.next_kl_coefficient and state.get("kl_coefficient"):  # without a controller the config alone says it
        trainer.machine.kl_coefficient = float(state["kl_coefficient"])
    reference = trainer.machine.reference
    ours = reference is not None and state.get("reference", reference.name) == reference.name  # else of another model's run
    trainer.machine.cache.load(*(saved.get(name) if ours else None for name in ("reference/keys", "reference/sums")))
    trainer.optimizer.load_moments(saved, steps=int(state["optimizer_steps"]), scales=_own_scales(trainer, saved))
    trainer.step = int(state["step"])
    _restore_random(state["random"], saved)


_Tensors = Mapping[str, Tensor]


def _read(directory: Path, trainer: Stateful) -> tuple[dict[str, Any], _Tensors, _Tensors, _Tensors, _Tensors]:
    """What ``state.json`` says, the live tensors to be set, their new values, and the files of optimizer and critic. Raises
    ``StateUnreadable``."""
    try:
        state = json.loads((directory / "state.json").read_text())
        if state.get("format") != FORMAT:
            raise StateUnreadable(f"{directory}/state.json: format {state.get('format')!r}, wanted {FORMAT!r}")
        weights = read_weights(directory / "weights")
        saved = load_file(directory / "optimizer.safetensors")
        if trainer.machine.critic is not None and not (directory / "critic.safetensors").exists():
            raise StateUnreadable(f"{directory} is a state without a critic, which {trainer.algorithm.name} trains. {_AS_MODEL}")
        critic = load_file(directory / "critic.safetensors") if trainer.machine.critic is not None else {}
        adapters = load_file(directory / "adapter" / "adapter_model.safetensors") if state.get("adapter_digest") else {}
    except StateUnreadable:
        raise
    except Exception as error:
        raise StateUnreadable(f"{directory} holds no readable training state: {error}") from error
    verifies = trainer.ranks.rank == 0  # once is enough
    if verifies and weights_digest(weights.items()).root != state["weights_digest"]:
        raise StateUnreadable(f"{directory}/weights: the tensors don't hash to {state['weights_digest']}; they were damaged")
    if (trainer.policy.adapter is not None) != bool(adapters):
        kind = "with" if adapters else "without"
        raise StateUnreadable(f"{directory} is a state {kind} adapters, the run's config says otherwise. {_AS_MODEL}")
    if verifies and adapters and weights_digest(adapters.items()).root != state["adapter_digest"]:
        raise StateUnreadable(f"{directory}/adapter: the tensors don't hash to {state['adapter_digest']}; they were damaged")
    live = trainer.policy.adapter.tensors() if trainer.policy.adapter else dict(named_weights(trainer.policy.model))
    if trainer.policy.adapter and (told := trainer.policy.adapter.differs(directory / "adapter", adapters)):
        raise StateUnreadable(f"{directory}/adapter {told}: its adapters would be another policy")
    if verifies and adapters and (other := _of_another_base(trainer.model_dir, weights, adapters)):
        raise StateUnreadable(f"{directory} has adapters of another model than {trainer.model_dir}: {other} differs")
    weights = adapters or weights
    _same_shapes(directory / ("adapter" if adapters else "weights"), live, weights)
    averages = trainer.optimizer.averages()
    wanted = {name: t for name, t in trainer.optimizer.moments().items() if name not in averages or name in saved}
    _same_shapes(directory / "optimizer.safetensors", wanted, saved)
    _same_shapes(directory / "critic.safetensors", _critic_tensors(trainer), critic)
    return state, live, weights, saved, critic


def _of_another_base(model: Path, weights: _Tensors, adapters: _Tensors) -> str:
    """A tensor without an adapter that is another in a model's folder than in the state; empty: none is known to be."""
    adapted = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in adapters}
    try:
        base = read_weights(model)
    except WeightsUnreadable:  # such as of an older format, which transformers has loaded: nothing to hold it against
        return ""
    for name in sorted(base.keys() & weights.keys()):
        kept = name.rpartition(".")[0] not in adapted and f"base_model.model.{name}" not in adapters
        if kept and not torch.equal(base[name].to(weights[name].dtype), weights[name]):
            return name
    return ""


def _critic_tensors(trainer: Stateful) -> dict[str, Tensor]:
    """The critic's live weights, and its moments where it has an optimizer of its own."""
    if trainer.machine.critic is None:
        return {}
    tensors = {f"critic/{name}": tensor for name, tensor in trainer.machine.critic.state_dict().items()}
    if trainer.critic_optimizer is not None:
        tensors |= {f"optimizer/{name}": tensor for name, tensor in trainer.critic_optimizer.moments().items()}
    return tensors


def _scales(trainer: Stateful, optimizer: FlatAdamW | None) -> dict[str, Tensor]:
    """The scales of moments in 8 bits of every rank: ``scales/<ranks>/<rank>/<kind>/<number>``. Every rank must ask."""
    if optimizer is None:
        return {}
    own = {name: tensor.cpu() for name, tensor in optimizer.scales().items()}
    if not own:
        return {}
    found = enumerate(trainer.ranks.exchange(own))
    return {f"scales/{trainer.ranks.size}/{rank}/{name}": t for rank, scales in found for name, t in scales.items()}


def _own_scales(trainer: Stateful, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's of a state that as many ranks saved."""
    prefix = f"scales/{trainer.ranks.size}/{trainer.ranks.rank}/"
    return {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}


def _same_shapes(path: Path, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        if name not in found:
            raise StateUnreadable(f"{path} lacks {name}: it is the state of another model, algorithm or precision. {_AS_MODEL}")
        if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            raise StateUnreadable(
                f"{path}: {name} is {found[name].dtype} {tuple(found[name].shape)}, the model's is "
                f"{tensor.dtype} {tuple(tensor.shape)}: it is the state of another model or precision"
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
    held = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": held["bit_generator"],
            "state": {"key": np.array(held["key"], np.uint32), "pos": held["pos"]},
            "has_gauss": held["has_gauss"],
            "gauss": held["gauss"],
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
