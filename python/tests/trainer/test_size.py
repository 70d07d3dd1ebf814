"""A rank never has a whole model: neither when it loads, nor when it saves. The bytes are counted
on the meta device, for a model of 7B parameters on 8 ranks."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config

from rollout_workers.trainer import AdamWConfig, Trainer
from rollout_workers.trainer.distributed import loading
from rollout_workers.trainer.distributed.fsdp import Group
from rollout_workers.trainer.distributed.ranks import ALONE, Ranks
from rollout_workers.trainer.distributed.shards import local
from rollout_workers.trainer.model.fused import NormForward
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.optim.optimizer import FlatAdamW
from rollout_workers.trainer.state import _files
from rollout_workers.weights import named_weights
from rollout_workers.weights.tensor_file import read_tensors

from .addition import demonstrations
from .team import together
from .test_ranks import batch, case

pytestmark = pytest.mark.timeout(400)  # starts processes for the ranks, on a machine that may be busy


class Counter(TorchDispatchMode):
    """Counts the bytes of the tensors that operations allocate, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                storage: Any = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._freed, storage._cdata)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


@contextmanager
def one_of_eight() -> Iterator[Group]:
    """Rank 0 of 8 whose tensors are on the meta device; the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        group = Group.__new__(Group)
        group.rank, group.size, group._device = 0, 8, "meta"
        group._mesh = init_device_mesh("cpu", (8,))
        yield group
    finally:
        dist.destroy_process_group()


def test_loading_and_saving_7b_take_at_most_1_3_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            Qwen2Config(**shape, num_key_value_heads=4, vocab_size=152_064), dtype=torch.bfloat16
        )
    files = {name: torch.empty_like(tensor) for name, tensor in named_weights(model)}
    parameters = sum(tensor.numel() for tensor in files.values())
    assert parameters > 7e9
    counter, begin = Counter(), torch.nn.Module.to_empty
    counter.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in files.values()}  # mapped files

    def to_empty(module: torch.nn.Module, **options: Any) -> Any:  # before it, the meta device stands for no memory
        counter.__enter__()
        return begin(module, **options)

    monkeypatch.setattr(torch.nn.Module, "to_empty", to_empty)
    with one_of_eight() as group:
        group.shard(model, lambda: loading.fill(model, files, {}))
        shard = sum(local(parameter.detach()).nbytes for parameter in model.parameters())
        assert 2 * parameters / 8 <= shard < 2 * parameters / 8 * 1.01
        assert shard <= counter.most < 1.3 * shard, "loading"
        optimizer = FlatAdamW(model, AdamWConfig())
        resident = counter.now
        assert resident >= 18 * parameters / 8, "weights, masters, gradients, and two moments"
        assert counter.most < 1.3 * resident, "loading with the optimizer"
        counter.most = counter.now
        trainer: Any = SimpleNamespace(
            policy=SimpleNamespace(model=model, adapter=None),
            optimizer=optimizer,
            critic_optimizer=None,
            models=SimpleNamespace(cache=(), critic=None),
            ranks=group,
        )
        found = _files(trainer)
        copied = sum(local(tensor).nbytes for tensors in found.values() for tensor in tensors.values())
        counter.__exit__(None, None, None)
    assert 14 * parameters / 8 <= copied < 1.0 * resident, "what a save copies"
    assert counter.most - resident + copied < 1.3 * resident, "saving"


def loaded(ranks: Ranks, model_dir: Path) -> tuple[int, bool, bool, int, float]:
    """Build a trainer with a reference, while loading a model whole fails. Returns its parameters
    on this rank, the optimizations of the policy, its fused norms, and the step's loss."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("loaded whole")

    Policy.load_model = refuse  # type: ignore[method-assign, assignment]
    probed: list[str] = []
    agrees = Policy._agrees

    def noting(policy: Policy, *, share_prefixes: bool) -> bool:
        probed.append(policy.model.device.type)
        return agrees(policy, share_prefixes=share_prefixes)

    Policy._agrees = noting  # type: ignore[method-assign]
    config = case("grpo")
    trainer = Trainer(model_dir, config, ranks)
    assert set(probed) == {"cpu"} and len(probed) == 4  # two optimizations of policy and reference
    policy = trainer.policy
    held = sum(local(parameter.detach()).numel() for parameter in policy.model.parameters())
    fused = sum(isinstance(module.forward, NormForward) for module in policy.model.modules())
    loss = trainer.train_step(batch(config, 1), 1).metrics["loss"]
    return held, policy.linear_head, policy.share_prefixes, fused, loss


def test_ranks_load_their_rows_only_and_choose_the_same_optimizations_as_one(model_dir: Path, tmp_path: Path) -> None:
    alone = Trainer(model_dir, case("grpo"))
    policy = alone.policy
    whole = sum(parameter.numel() for parameter in policy.model.parameters())
    fused = sum(isinstance(module.forward, NormForward) for module in policy.model.modules())
    loss = alone.train_step(batch(case("grpo"), 1), 1).metrics["loss"]
    for held, *found, loss_of_ranks in together(2, tmp_path, loaded, model_dir):
        assert held < 0.6 * whole
        assert found == [policy.linear_head, policy.share_prefixes, fused] == [True, True, fused]
        assert loss_of_ranks == pytest.approx(loss, abs=1e-5)


def saved_again(ranks: Ranks, model_dir: Path, state: str, folder: str) -> None:
    """Load a state and save it."""
    trainer = Trainer(model_dir, case("sft"), ranks)
    trainer.load_state(state)
    trainer.save_state(folder)


def test_a_state_does_not_depend_on_the_number_of_ranks_and_transformers_loads_it(model_dir: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    trainer = Trainer(model_dir, case("sft"))
    trainer.train_step(demonstrations(1), 1)
    trainer.save_state(first)
    together(4, tmp_path, saved_again, model_dir, str(first), str(again))
    for name in ("weights/model.safetensors", "weights/rollout_weights.json", "average/model.safetensors"):
        assert (again / name).read_bytes() == (first / name).read_bytes(), name
    wanted, found = (read_tensors(folder / "optimizer.safetensors") for folder in (first, again))
    assert found.keys() == wanted.keys() and len(wanted) > 20
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items() if not name.startswith("random/"))
    exported = AutoModelForCausalLM.from_pretrained(again / "weights")
    for name, tensor in trainer.named_weights():
        assert torch.equal(exported.state_dict()[name], tensor)


def saved_during_a_step(ranks: Ranks, model_dir: Path, folder: str) -> tuple[int, bool]:
    """A step is made while the state of the step before is written: the disk waits for the step."""
    trainer = Trainer(model_dir, case("sft"), ranks)
    trainer.train_step(batch(case("sft"), 1), 1)
    stepped, sync = threading.Event(), os.fsync

    def fsync(descriptor: int) -> None:
        assert stepped.wait(300)
        sync(descriptor)

    os.fsync = fsync
    saving = trainer.begin_save(folder)
    trainer.train_step(batch(case("sft"), 2), 2)
    missing = not (Path(folder) / "state.json").exists()
    stepped.set()
    saving.result()
    return trainer.step, missing


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_does_not_wait_for_the_disk_and_does_not_change_what_is_written(
    model_dir: Path, tmp_path: Path, size: int
) -> None:
    folder = tmp_path / "state"
    if size == 1:
        sync = os.fsync
        try:
            results = [saved_during_a_step(ALONE, model_dir, str(folder))]
        finally:
            os.fsync = sync
    else:
        results = together(size, tmp_path, saved_during_a_step, model_dir, str(folder))
    assert results == [(2, True)] * size
    learner, restored = Trainer(model_dir, case("sft")), Trainer(model_dir, case("sft"))
    learner.train_step(batch(case("sft"), 1), 1)
    restored.load_state(folder)
    assert restored.step == 1
    for (name, found), (_, wanted) in zip(restored.named_weights(), learner.named_weights(), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0, msg=name)
    if size == 1:
        assert restored.weights_digest() == learner.weights_digest()


def test_a_full_disk_fails_the_save_and_not_the_trainer(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(model_dir, dataclasses.replace(case("sft")))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        saving = trainer.begin_save(tmp_path / "state")
        with pytest.raises(OSError, match="No space left"):
            saving.result()
        with pytest.raises(OSError, match="No space left"):
            trainer.save_state(tmp_path / "state")
    assert not (tmp_path / "state" / "state.json").exists()
    trainer.train_step(demonstrations(1), 1)
    assert Path("state.json") in trainer.save_state(tmp_path / "state")
