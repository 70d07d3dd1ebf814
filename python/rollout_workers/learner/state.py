"""The training state on disk: all that a new process needs to go on bit for bit.

<dir>/weights/...             the weights as a folder that from_pretrained loads, adapters merged in
<dir>/adapter/...             the adapters where there are any, as a folder that PEFT loads
<dir>/optimizer.safetensors   moments by parameter (and master copies), state of torch's random numbers
<dir>/critic.safetensors      weights and moments of a critic, where there is one
<dir>/state.json              step, optimizer steps, KL coefficient, digests; written last: it makes the state valid

``optimizer.safetensors`` holds the reference's sums of data as well, which are computed once.
"""

from __future__ import annotations

import json
import os
import random
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout_workers.learner.types import StateUnreadable
from rollout_workers.weights import read_weights, weights_digest, write_weights

if TYPE_CHECKING:
    from rollout_workers.learner.trainer import Trainer

FORMAT = "rollout.train_state.v1"


def save_state(directory: Path, trainer: Trainer) -> list[Path]:
    """Write the state of ``trainer`` into ``directory`` (made where absent); durable when it returns.

    A state that was there is replaced; cut off in between, the folder holds no valid state. Returns the files, sorted,
    relative to the folder.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "state.json").unlink(missing_ok=True)
    manifest = write_weights(
        directory / "weights",
        trainer.named_weights(),
        config_source_dir=trainer.companions,
        version=trainer.step,
    )
    adapter = trainer.policy.adapter
    if adapter is not None:
        adapter.save(directory / "adapter")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in trainer.optimizer.moments().items()}
    tensors |= _torch_random_state()
    if len(trainer.machine.cache):
        tensors |= trainer.machine.cache.tensors()
    _replace(directory / "optimizer.safetensors", lambda path: save_file(tensors, path))
    critic = {name: tensor.detach().cpu().contiguous() for name, tensor in _critic_tensors(trainer).items()}
    if critic:
        _replace(directory / "critic.safetensors", lambda path: save_file(critic, path))
    state = {
        "format": FORMAT,
        "step": trainer.step,
        "optimizer_steps": trainer.optimizer.steps,
        "critic_optimizer_steps": trainer.critic_optimizer.steps if trainer.critic_optimizer else 0,
        "kl_coefficient": trainer.machine.kl_coefficient,
        "algorithm": trainer.algorithm.name,
        "weights_digest": manifest.digest,
        "adapter_digest": weights_digest(adapter.tensors().items()).root if adapter else "",
        "random": _random_state(),
    }
    _replace(directory / "state.json", lambda path: path.write_text(json.dumps(state) + "\n"))
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


def load_state(directory: Path, trainer: Trainer) -> None:
    """Set ``trainer`` to a saved state. Everything is read and checked before anything is changed."""
    try:
        state = json.loads((directory / "state.json").read_text())
        if state.get("format") != FORMAT:
            raise StateUnreadable(f"{directory}/state.json: format {state.get('format')!r}, wanted {FORMAT!r}")
        weights = read_weights(directory / "weights")
        saved = load_file(directory / "optimizer.safetensors")
        critic = load_file(directory / "critic.safetensors") if trainer.machine.critic is not None else {}
        adapters = load_file(directory / "adapter" / "adapter_model.safetensors") if state.get("adapter_digest") else {}
    except StateUnreadable:
        raise
    except Exception as error:
        raise StateUnreadable(f"{directory} holds no readable training state: {error}") from error
    if weights_digest(weights.items()).root != state["weights_digest"]:
        raise StateUnreadable(f"{directory}/weights: the tensors don't hash to {state['weights_digest']}; they were damaged")
    if (trainer.policy.adapter is not None) != bool(adapters):
        kind = "with" if adapters else "without"
        raise StateUnreadable(f"{directory} is a state {kind} adapters, the run's config says otherwise")
    if adapters and weights_digest(adapters.items()).root != state["adapter_digest"]:
        raise StateUnreadable(f"{directory}/adapter: the tensors don't hash to {state['adapter_digest']}; they were damaged")
    live = trainer.policy.adapter.tensors() if trainer.policy.adapter else dict(trainer.named_weights())
    weights = adapters or weights
    _same_shapes(directory / ("adapter" if adapters else "weights"), live, weights)
    _same_shapes(directory / "optimizer.safetensors", trainer.optimizer.moments(), saved)
    _same_shapes(directory / "critic.safetensors", _critic_tensors(trainer), critic)

    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(weights[name])
        for name, tensor in _critic_tensors(trainer).items():
            tensor.copy_(critic[name])
    if trainer.critic_optimizer is not None:
        moments = {name.removeprefix("optimizer/"): tensor for name, tensor in critic.items()}
        trainer.critic_optimizer.load_moments(moments, steps=int(state["critic_optimizer_steps"]))
    trainer.machine.kl_coefficient = float(state.get("kl_coefficient", trainer.machine.kl_coefficient))
    if "reference/keys" in saved:
        trainer.machine.cache.load(saved["reference/keys"], saved["reference/sums"])
    trainer.optimizer.load_moments(saved, steps=int(state["optimizer_steps"]))
    trainer.step = int(state["step"])
    _restore_random(state["random"], saved)


def _critic_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """The critic's live weights, and its moments where it has an optimizer of its own."""
    if trainer.machine.critic is None:
        return {}
    tensors = {f"critic/{name}": tensor for name, tensor in trainer.machine.critic.state_dict().items()}
    if trainer.critic_optimizer is not None:
        tensors |= {f"optimizer/{name}": tensor for name, tensor in trainer.critic_optimizer.moments().items()}
    return tensors


def _same_shapes(path: Path, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        if name not in found:
            raise StateUnreadable(f"{path} lacks {name}: it is the state of another model or precision")
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


def _restore_random(state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
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
