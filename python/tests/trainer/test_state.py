"""Three steps, a save, a new process, and three more steps give the same bits as six steps."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_workers.algorithms import GrpoConfig
from rollout_workers.trainer import AdamWConfig, Schedule, StateUnreadable, Trainer, TrainerConfig
from rollout_workers.weights import named_weights, weights_digest

from .addition import answer, prepare_model, sampled_batch

CONFIG = TrainerConfig(
    settings=GrpoConfig(kl_coefficient=0.02),
    schedule=Schedule(peak=1e-3, shape="cosine", warmup_steps=2, steps=6),
    optimizer=AdamWConfig(weight_decay=0.01),
    threads=1,
)

CONTINUE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from trainer.addition import sampled_batch
from trainer.test_state import CONFIG
from rollout_workers.trainer import Trainer
learner = Trainer({model!r}, CONFIG)
learner.load_state({state!r})
for step in (4, 5, 6):
    learner.train_step(sampled_batch(step), step)
print(learner.weights_digest().root)
"""


def trained(model_dir: Path, steps: int) -> Trainer:
    """A trainer after some steps."""
    learner = Trainer(model_dir, CONFIG)
    for step in range(1, steps + 1):
        learner.train_step(sampled_batch(step), step)
    return learner


@pytest.mark.timeout(300)  # imports torch in a new process, and the machine may be busy
def test_a_new_process_continues_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    learner = trained(model_dir, 3)
    learner.save_state(tmp_path / "state")
    for step in (4, 5, 6):
        learner.train_step(sampled_batch(step), step)
    script = CONTINUE.format(tests=str(Path(__file__).parents[1]), model=str(model_dir), state=str(tmp_path / "state"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == learner.weights_digest().root, done.stderr


def test_a_bfloat16_trainer_continues_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    config = TrainerConfig(schedule=Schedule(peak=1e-5), threads=1, dtype=torch.bfloat16)
    learner, other = Trainer(model_dir, config), Trainer(model_dir, config)
    for step in (1, 2):
        learner.train_step(sampled_batch(step), step)
    learner.save_state(tmp_path)
    other.load_state(tmp_path)
    for step in (3, 4):
        learner.train_step(sampled_batch(step), step)
        other.train_step(sampled_batch(step), step)
    assert other.weights_digest() == learner.weights_digest()
    for (name, a), b in zip(learner.optimizer.moments().items(), other.optimizer.moments().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_average_resumes_bit_for_bit(model_dir: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    kept = TrainerConfig(schedule=Schedule(peak=1e-3), threads=1, dtype=dtype, optimizer=AdamWConfig(ema_decay=0.75))
    learner, other = Trainer(model_dir, kept), Trainer(model_dir, kept)
    masters = learner.optimizer.moments()
    wanted = {name: tensor.float().clone() for name, tensor in learner.policy.model.named_parameters()}
    for step in (1, 2, 3):
        learner.train_step(sampled_batch(step), step)
        for name, parameter in learner.policy.model.named_parameters():
            weight = masters.get(f"master/{name}", parameter).detach()  # the trained weight, not its rounded copy
            wanted[name] = 0.75 * wanted[name] + 0.25 * weight
        if step == 2:
            learner.save_state(tmp_path)
            saved = {name: tensor.clone() for name, tensor in wanted.items()}
    other.load_state(tmp_path)
    other.train_step(sampled_batch(3), 3)
    averages = learner.optimizer.averages()
    assert averages.keys() == {f"average/{name}" for name in wanted}
    for name, tensor in wanted.items():
        torch.testing.assert_close(averages[f"average/{name}"], tensor, rtol=1e-5, atol=1e-7)
        assert torch.equal(averages[f"average/{name}"], other.optimizer.averages()[f"average/{name}"]), name
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "average", dtype=dtype)
    for name, parameter in written.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), saved[name].to(dtype), rtol=0, atol=0.01 if dtype == torch.bfloat16 else 1e-6
        )


def test_an_average_missing_in_the_state_starts_at_the_weights(model_dir: Path, tmp_path: Path) -> None:
    trained(model_dir, 1).save_state(tmp_path)
    learner = Trainer(model_dir, replace(CONFIG, optimizer=replace(CONFIG.optimizer, ema_decay=0.9)))
    learner.load_state(tmp_path)
    assert not (tmp_path / "average").exists()
    for name, parameter in learner.policy.model.named_parameters():
        assert torch.equal(learner.optimizer.averages()[f"average/{name}"], parameter), name


def test_a_state_of_other_settings_leaves_the_coefficient_to_the_config(model_dir: Path, tmp_path: Path) -> None:
    """A run that starts from another run's snapshot uses the coefficient of its config, unless an
    adaptive controller set it."""
    trained(model_dir, 1).save_state(tmp_path)
    stronger = Trainer(model_dir, replace(CONFIG, settings=GrpoConfig(kl_coefficient=0.5)))
    stronger.load_state(tmp_path)
    assert stronger.train_step(sampled_batch(2), 2).metrics["kl/coefficient"] == 0.5

    def controlled(coefficient: float) -> Trainer:
        settings = GrpoConfig(kl_coefficient=coefficient, kl_target=0.1, kl_horizon=100.0)
        return Trainer(model_dir, replace(CONFIG, settings=settings))

    begun, learner = controlled(0.3), controlled(0.2)
    begun.load_state(tmp_path)
    assert begun.models.kl_coefficient == 0.3
    learner.train_step(sampled_batch(1), 1)
    begun.load_state(_saved(learner, tmp_path / "controlled"))
    assert begun.models.kl_coefficient == learner.models.kl_coefficient < 0.2


def test_cached_reference_sums_that_a_state_lacks_are_dropped(model_dir: Path, tmp_path: Path) -> None:
    learner = Trainer(model_dir, TrainerConfig(algorithm="dpo", schedule=Schedule(peak=1e-3), threads=1))
    learner.save_state(tmp_path)
    learner.train_step([answer(0, 0, "1+1=", "2", 0.0), answer(0, 1, "1+1=", "3", 0.0)], 1)
    assert len(learner.models.cache) == 2
    learner.load_state(tmp_path)
    assert len(learner.models.cache) == 0


def test_cached_sums_of_another_reference_are_dropped(model_dir: Path, tmp_path: Path) -> None:
    """A run that starts from another run's snapshot but with another model drops the cached sums. A
    copy of the model counts as the same model."""
    config = TrainerConfig(algorithm="dpo", schedule=Schedule(peak=1e-3), threads=1)
    learner = Trainer(model_dir, config)
    learner.train_step([answer(0, 0, "1+1=", "2", 0.0), answer(0, 1, "1+1=", "3", 0.0)], 1)
    learner.save_state(tmp_path / "state")
    for folder, kept in ((shutil.copytree(model_dir, tmp_path / "copy"), 2), (prepare_model(tmp_path / "other", seed=1), 0)):
        other = Trainer(folder, config)
        other.load_state(tmp_path / "state")
        assert len(other.models.cache) == kept, folder


def test_the_random_state_is_restored(model_dir: Path, tmp_path: Path) -> None:
    learner = trained(model_dir, 1)
    _seed(1)
    _draw()
    learner.save_state(tmp_path)
    wanted = _draw()
    _seed(2)
    learner.load_state(tmp_path)
    assert _draw() == wanted


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _draw() -> tuple[float, float, float]:
    """One normal number from each generator. Python and numpy cache a second one."""
    return random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))


def test_the_state_holds_a_loadable_model(model_dir: Path, tmp_path: Path) -> None:
    learner = trained(model_dir, 1)
    files = learner.save_state(tmp_path)
    assert {"state.json", "optimizer.safetensors", "weights/model.safetensors", "weights/config.json"} <= {
        str(path) for path in files
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    assert weights_digest(named_weights(loaded)).root == learner.weights_digest().root


def test_published_weights_are_the_weights(model_dir: Path, tmp_path: Path) -> None:
    learner = trained(model_dir, 2)
    manifest = learner.write_weights(tmp_path / "v000002")
    assert (manifest.version, manifest.digest) == (2, learner.weights_digest().root)


def test_saving_twice_keeps_one_state(model_dir: Path, tmp_path: Path) -> None:
    learner = trained(model_dir, 1)
    learner.save_state(tmp_path)
    learner.train_step(sampled_batch(2), 2)
    learner.save_state(tmp_path)
    other = Trainer(model_dir, CONFIG)
    other.load_state(tmp_path)
    assert other.step == 2 and other.weights_digest() == learner.weights_digest()


def flip(path: Path) -> None:
    """Change the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "state.json").unlink(), "is not a readable training state"),
        (lambda folder: (folder / "state.json").write_text('{"format": "v0"}'), "format 'v0' is not"),
        (lambda folder: (folder / "optimizer.safetensors").write_bytes(b"x"), "is not a readable training state"),
        (lambda folder: flip(folder / "weights/model.safetensors"), "the tensors are damaged"),
    ],
    ids=["cut off", "format", "optimizer", "weights"],
)
def test_damage_is_refused_and_changes_nothing(model_dir: Path, tmp_path: Path, damage: object, message: str) -> None:
    trained(model_dir, 1).save_state(tmp_path)
    damage(tmp_path)  # type: ignore[operator]
    learner = Trainer(model_dir, CONFIG)
    digest = learner.weights_digest()
    with pytest.raises(StateUnreadable, match=message):
        learner.load_state(tmp_path)
    assert learner.step == 0 and learner.weights_digest() == digest


def test_the_state_of_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    Trainer(prepare_model(tmp_path / "other", layers=3), CONFIG).save_state(tmp_path / "deeper")
    Trainer(prepare_model(tmp_path / "wide", hidden=64), CONFIG).save_state(tmp_path / "wider")
    wider, learner = tmp_path / "wider", Trainer(model_dir, CONFIG)
    with pytest.raises(StateUnreadable, match=r"embed_tokens.weight is .* \(54, 64\), but the model's is .* \(54, 32\)"):
        learner.load_state(wider)
    with pytest.raises(StateUnreadable, match=r"has no tensor model\.layers\.2"):
        Trainer(tmp_path / "other", CONFIG).load_state(_saved(learner, tmp_path / "shallow"))


def _saved(learner: Trainer, folder: Path) -> Path:
    learner.save_state(folder)
    return folder


@pytest.mark.parametrize(
    ("algorithm", "message"), [("ppo", "has no critic, which ppo needs"), ("reward_model", "has no tensor score.weight")]
)
def test_a_state_of_another_algorithm_is_refused_with_a_fix(
    model_dir: Path, tmp_path: Path, algorithm: str, message: str
) -> None:
    trained(model_dir, 1).save_state(tmp_path)
    other = Trainer(model_dir, replace(CONFIG, algorithm=algorithm, settings=None))
    with pytest.raises(StateUnreadable, match=rf"{message}.*`rollout export weights`"):
        other.load_state(tmp_path)
