"""8-bit moments: they use less memory, training works, and a restored run has the same bits."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from rollout_workers.trainer import AdamWConfig, BadSettings, Schedule, Trainer, TrainerConfig
from rollout_workers.trainer.optim import moments as moments_module
from rollout_workers.trainer.optim.flat import Flat
from rollout_workers.trainer.optim.moments import LARGEST, EightBitMoments, decoded

from .addition import demonstrations, sampled_batch

pytestmark = pytest.mark.timeout(400)  # starts processes for the ranks, on a machine that may be busy
CONFIG = TrainerConfig(
    algorithm="sft", schedule=Schedule(peak=3e-3), optimizer=AdamWConfig(weight_decay=0.01, kind="adamw_8bit"), threads=1
)
FLOAT = dataclasses.replace(CONFIG, optimizer=AdamWConfig(weight_decay=0.01))
installed = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def test_without_the_library_it_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest))
    with pytest.raises(BadSettings, match=r"needs the package bitsandbytes, .*`rollout-workers\[adamw-8bit\]`"):
        Trainer(model_dir, CONFIG)


def test_no_call_of_the_library_has_more_elements_than_an_int32_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 G elements on the meta device, and a library that only notes the sizes."""
    calls: list[tuple[int, ...]] = []

    class Library:
        @staticmethod
        def create_dynamic_map(signed: bool) -> torch.Tensor:
            return torch.linspace(-1.0 if signed else 0.0, 1.0, 256)

        @staticmethod
        def optimizer_update_8bit_blockwise(_kind: str, *given: object, weight_decay: float) -> None:
            calls.append(tuple(each.numel() for each in given if isinstance(each, torch.Tensor)))

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: Library)
    elements = 3 * 2**30 + 300
    flat = Flat([("weight", torch.nn.Parameter(torch.zeros(elements, dtype=torch.bfloat16, device="meta")))], 0.0)
    moments = EightBitMoments([flat], AdamWConfig(kind="adamw_8bit"))
    moments.update(1e-3)
    assert LARGEST < 2**31 and LARGEST % 256 == 0
    assert [sizes[:4] for sizes in calls] == [(LARGEST,) * 4] * 3 + [(300,) * 4]
    assert [sizes[-2:] for sizes in calls] == [(LARGEST // 256,) * 2] * 3 + [(2,) * 2]


@installed
def test_the_largest_call_changes_no_bit(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for largest in (LARGEST, 1024):
        monkeypatch.setattr(moments_module, "LARGEST", largest)
        learner = Trainer(model_dir, CONFIG)
        for step in (1, 2):
            learner.train_step(demonstrations(step), step)
        digests.add(learner.weights_digest().root)
    assert len(digests) == 1


@installed
def test_a_state_has_no_moment_in_float32(model_dir: Path, tmp_path: Path) -> None:
    """Also, it continues with AdamW in float32, and a state of that in 8 bits."""
    eight, four = Trainer(model_dir, CONFIG), Trainer(model_dir, FLOAT)
    for learner in (eight, four):
        learner.train_step(demonstrations(1), 1)
        learner.save_state(tmp_path / learner.config.optimizer.kind)
    live = {tensor.data_ptr() for tensor in eight.optimizer._moments.tensors()}
    saved = eight.optimizer.moments()
    assert all(tensor.dtype == torch.uint8 for name, tensor in saved.items())
    assert len(live & {tensor.data_ptr() for tensor in saved.values()}) > 0  # not copied
    four.load_state(tmp_path / "adamw_8bit")
    eight.load_state(tmp_path / "adamw")
    for learner in (eight, four):
        assert learner.train_step(demonstrations(2), 2).metrics["loss"] > 0
    for name, tensor in four.optimizer.moments().items():
        codes = eight.optimizer.moments()[name]
        assert codes.shape == tensor.shape and tensor.abs().sum() > 0


@installed
def test_it_learns_as_in_float32_from_a_quarter_of_the_memory(model_dir: Path) -> None:
    eight, four = Trainer(model_dir, CONFIG), Trainer(model_dir, FLOAT)
    losses: dict[Trainer, list[float]] = {eight: [], four: []}
    for step in range(1, 21):
        for learner, found in losses.items():
            found.append(learner.train_step(demonstrations(step), step).metrics["loss"])
    assert losses[eight][-1] < 0.75 * losses[eight][0]
    assert losses[eight][-1] == pytest.approx(losses[four][-1], rel=0.03)
    moments = eight.optimizer._moments
    assert isinstance(moments, EightBitMoments)
    codes = [tensor for tensor in moments.tensors() if tensor.dtype == torch.uint8]
    elements = sum(parameter.numel() for parameter in eight.optimizer.parameters)
    assert sum(tensor.numel() for tensor in codes) == 2 * elements
    assert sum(tensor.nbytes for tensor in moments.tensors()) < 2.1 * elements


@installed
def test_a_state_holds_the_codes(model_dir: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, algorithm="grpo")
    learner, other = Trainer(model_dir, config), Trainer(model_dir, config)
    for step in (1, 2, 3):
        learner.train_step(sampled_batch(step), step)
    learner.save_state(tmp_path)
    other.load_state(tmp_path)
    for mine, theirs in zip(learner.optimizer._moments.tensors(), other.optimizer._moments.tensors(), strict=True):
        assert torch.equal(mine, theirs)
    for trainer in (learner, other):
        trainer.train_step(sampled_batch(4), 4)
    assert learner.weights_digest() == other.weights_digest()
    kept = other.optimizer.snapshot()
    other.train_step(sampled_batch(5), 5)
    other.optimizer.restore(kept)
    assert learner.weights_digest() == other.weights_digest()


@installed
def test_two_ranks_resume_bit_for_bit_and_one_rank_resumes_their_state(model_dir: Path, tmp_path: Path) -> None:
    from .team import together
    from .test_ranks import trained

    state = tmp_path / "state"
    (digest, _, _), _ = together(2, tmp_path, trained, model_dir, CONFIG, 1, 5, "", str(state))
    (resumed, _, _), _ = together(2, tmp_path, trained, model_dir, CONFIG, 4, 5, str(state))
    assert resumed == digest
    learner, alone = Trainer(model_dir, CONFIG), Trainer(model_dir, FLOAT)
    learner.load_state(state)
    for step in (1, 2, 3):
        alone.train_step(demonstrations(step), step)
    codes, values = learner.optimizer.moments() | learner.optimizer.codes(), alone.optimizer.moments()
    scales = {f"scales/1/0/{name}": tensor for name, tensor in learner.optimizer.scales().items()}
    for number, flat in enumerate(learner.optimizer._groups):
        for name, _ in flat.named:
            found, wanted = decoded("exp_avg", number, flat, name, codes | scales), values[f"exp_avg/{name}"]
            assert torch.cosine_similarity(found.flatten(), wanted.flatten(), 0) > 0.98, name
    assert learner.train_step(demonstrations(4), 4).metrics["grad_norm"] > 0
