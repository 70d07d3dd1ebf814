"""Several ranks train the same weights as one rank, also after a restart with another number of
ranks."""

from __future__ import annotations

import dataclasses
import os
import signal
import weakref
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from rollout_workers.algorithms import GrpoConfig
from rollout_workers.algorithms.ppo import PpoConfig
from rollout_workers.trainer import (
    AdamWConfig,
    LoraConfig,
    NonFiniteGradient,
    RankLost,
    Schedule,
    StepOutOfTurn,
    Trainer,
    TrainerConfig,
    TrainSample,
)
from rollout_workers.trainer.distributed.fsdp import Group
from rollout_workers.trainer.distributed.ranks import ALONE, Ranks
from rollout_workers.trainer.leader import LeadingTrainer, follow
from rollout_workers.trainer.model.adapter import Adapter
from rollout_workers.trainer.model.policy import Policy
from rollout_workers.trainer.packing import pack
from rollout_workers.weights import digest as hashing
from rollout_workers.weights import weights_digest

from .addition import demonstrations, sampled_batch
from .team import Failure, together
from .test_distillation import taught
from .test_families import labelled, pairs

pytestmark = pytest.mark.timeout(400)  # up to four processes, and the machine may be busy

BASE = TrainerConfig(
    schedule=Schedule(peak=1e-3, shape="cosine", warmup_steps=2, steps=10),
    optimizer=AdamWConfig(weight_decay=0.01, ema_decay=0.9),
    tokens_per_microbatch=512,
    threads=1,
)
LORA = LoraConfig(rank=4, dora=True)
CASES: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": "sft"},
    "grpo": {"algorithm": "grpo", "settings": GrpoConfig(kl_coefficient=0.02)},
    "ppo": {"algorithm": "ppo", "settings": PpoConfig(epochs=2, minibatches=2)},
    "critic": {"algorithm": "ppo", "settings": PpoConfig(critic="network", kl_coefficient=0.02, kl_target=0.01)},
    "warm-up": {"algorithm": "ppo", "settings": PpoConfig(critic="network", critic_warmup_steps=2, epochs=2)},
    "lora": {"algorithm": "grpo", "settings": GrpoConfig(kl_coefficient=0.02, epochs=2), "lora": LORA},
    "frozen": {"algorithm": "sft", "freeze": ("model.layers.0.*",), "gradient_checkpointing": True},
    "distillation": {"algorithm": "distillation"},
    "dpo": {"algorithm": "dpo"},
    "kto": {"algorithm": "kto"},
    "reward": {"algorithm": "reward_model"},
}
DATA = {"sft": demonstrations, "dpo": pairs, "reward_model": pairs, "kto": labelled}


def case(name: str, **changes: Any) -> TrainerConfig:
    """The trainer's settings of a case."""
    return dataclasses.replace(BASE, **{**CASES[name], **changes})


def batch(config: TrainerConfig, step: int) -> list[TrainSample]:
    """The samples of a step."""
    return DATA.get(config.algorithm, sampled_batch)(step)


def trained(
    ranks: Ranks, model_dir: Path, config: TrainerConfig, first: int, last: int, state: str = "", save: str = ""
) -> tuple[str, dict[str, np.ndarray], list[dict[str, float]]]:
    """Digest, weights and each step's metrics after the steps from ``first`` to ``last``; step 3 is
    saved."""
    learner = Trainer(model_dir, config, ranks)
    if state:
        learner.load_state(state)
    metrics = []
    for step in range(first, last + 1):
        metrics.append(dict(learner.train_step(batch(config, step), step).metrics))
        if save and step == 3:
            learner.save_state(save)
    weights = {name: tensor.float().numpy().copy() for name, tensor in learner.named_weights()}
    return learner.weights_digest().root, weights, metrics


def apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Largest difference of an element."""
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in CASES if name != "distillation"), ("sft", 4), ("grpo", 4), ("ppo", 4)]
)
def test_several_ranks_train_the_weights_of_one(model_dir: Path, tmp_path: Path, name: str, size: int) -> None:
    config, steps = case(name), 10 if name in ("sft", "grpo", "ppo") else 4
    _, wanted, alone = trained(ALONE, model_dir, config, 1, steps)
    results = together(size, tmp_path, trained, model_dir, config, 1, steps)
    digests = {digest for digest, _, _ in results}
    assert len(digests) == 1
    _, weights, metrics = results[0]
    assert apart(weights, wanted) < 1e-5
    for found, expected in zip(metrics, alone, strict=True):
        assert found.keys() == expected.keys()
        for key in ("loss", "grad_norm", "entropy", "kl/reference", "kl/coefficient", "value/loss"):
            if key in expected:
                assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key


def test_two_ranks_learn_the_teachers_most_likely_tokens(model_dir: Path, tmp_path: Path) -> None:
    config = taught(model_dir, tmp_path / "teacher")
    config = case("distillation", settings=dataclasses.replace(config.settings, teacher_top_k=5))
    _, wanted, _ = trained(ALONE, model_dir, config, 1, 3)
    results = together(2, tmp_path, trained, model_dir, config, 1, 3)
    assert results[0][0] == results[1][0] and apart(results[0][1], wanted) < 1e-5


@pytest.mark.parametrize("name", ["sft", "critic", "lora"])
def test_a_state_of_two_ranks_resumes_on_one_two_and_four(model_dir: Path, tmp_path: Path, name: str) -> None:
    config = case(name)
    state = tmp_path / "state"
    (digest, wanted, _), _ = together(2, tmp_path, trained, model_dir, config, 1, 5, "", str(state))
    (resumed, _, _), _ = together(2, tmp_path, trained, model_dir, config, 4, 5, str(state))
    assert resumed == digest  # bit for bit
    assert apart(trained(ALONE, model_dir, config, 4, 5, str(state))[1], wanted) < 1e-5
    assert apart(together(4, tmp_path, trained, model_dir, config, 4, 5, str(state))[0][1], wanted) < 1e-5


def test_bfloat16_keeps_its_master_copies_from_one_rank_to_two_and_back(model_dir: Path, tmp_path: Path) -> None:
    config = case("sft", dtype=torch.bfloat16)
    first, second = tmp_path / "first", tmp_path / "second"
    learner = Trainer(model_dir, config)
    for step in (1, 2):
        learner.train_step(batch(config, step), step)
    learner.save_state(first)
    _, wanted, _ = trained(ALONE, model_dir, config, 3, 4, str(first))
    (_, found, _), _ = together(2, tmp_path, trained, model_dir, config, 3, 4, str(first), str(second))
    assert apart(found, wanted) < 5e-3
    learner.train_step(batch(config, 3), 3)
    one = {name: tensor.clone() for name, tensor in learner.optimizer.moments().items()}
    learner.load_state(second)
    for name, tensor in learner.optimizer.moments().items():
        if name.startswith("master/"):
            torch.testing.assert_close(tensor, one[name], atol=1e-4, rtol=0)


def refused(ranks: Ranks, model_dir: Path, config: TrainerConfig) -> tuple[int, str, str, str]:
    """Step 2 has NaN in the part of the second rank. Returns step, error, and the digests before
    and after."""
    learner = Trainer(model_dir, config, ranks)
    learner.train_step(batch(config, 1), 1)
    before, healthy = learner.weights_digest().root, learner.algorithm
    if ranks.rank == 1:
        learner.algorithm = dataclasses.replace(
            healthy, loss=lambda tokens: dataclasses.replace((terms := healthy.loss(tokens)), loss=terms.loss * torch.nan)
        )
    raised = ""
    try:
        learner.train_step(batch(config, 2), 2)
    except NonFiniteGradient as error:
        raised = str(error)
    learner.algorithm = healthy
    after = learner.weights_digest().root
    learner.train_step(batch(config, learner.step + 1), learner.step + 1)
    return learner.step, raised, before, after


def test_a_gradient_that_one_rank_refuses_is_refused_by_all(model_dir: Path, tmp_path: Path) -> None:
    results = together(2, tmp_path, refused, model_dir, case("sft"))
    assert {(step, bool(raised)) for step, raised, _, _ in results} == {(2, True)}
    assert len({digest for _, _, before, after in results for digest in (before, after)}) == 1


def test_each_rank_gets_the_same_number_of_micro_batches() -> None:
    samples = sampled_batch(3, groups=12, size=8)
    whole = pack(samples, range(len(samples)), tokens=1 << 20)
    assert len(whole) == 1
    for ranks in (2, 3, 4):
        parts = pack(samples, range(len(samples)), tokens=1 << 20, ranks=ranks)
        assert 1 < len(parts) <= ranks  # two ranks may get two rows each instead of three
        assert max(part.computed for part in parts) <= 1.5 * sum(part.computed for part in parts) / len(parts)
        trained = sorted((int(s), int(p)) for part in parts for s, p in zip(part.sample, part.place, strict=True))
        assert trained == sorted((int(s), int(p)) for s, p in zip(whole[0].sample, whole[0].place, strict=True))
    chosen = pairs(1)
    units = pack(chosen, range(len(chosen)), tokens=1 << 20, whole=[n // 2 for n in range(len(chosen))], ranks=2)
    assert len(units) == 2
    assert not {int(n) // 2 for n in units[0].sample} & {int(n) // 2 for n in units[1].sample}  # pairs are not split


def hash_nothing() -> None:
    """Let this process fail if it hashes a tensor."""

    def refused(block: memoryview) -> bytes:
        raise AssertionError("only rank 0 hashes the model")

    hashing._leaf = refused


def led(ranks: Group, model_dir: Path, config: TrainerConfig, folder: str, fault: str) -> Any:
    """Rank 0 leads two steps, saves to folders that cannot be written, and a save. fault: rank 1
    exits (``dies``) or blocks (``hangs``) before the second step, or is stopped after the first one
    (``frozen``)."""
    if ranks.rank:
        hash_nothing()
        healthy = Trainer.train_step

        def train_step(self: Trainer, samples: list[TrainSample], step: int) -> Any:
            if step == 2 and fault:
                os._exit(1) if fault == "dies" else Event().wait()
            result = healthy(self, samples, step)
            if fault == "frozen":
                os.kill(os.getpid(), signal.SIGSTOP)
            return result

        Trainer.train_step = train_step  # type: ignore[method-assign, assignment]
        follow(ranks)
        return "followed"
    reported: list[str] = []
    learner = LeadingTrainer(model_dir, config, ranks, lost=reported.append)
    try:
        for step in (1, 2):
            if step == 2 and fault == "frozen":
                learner.load_state("x" * (64 << 20))  # a command larger than a socket buffer
            learner.train_step(batch(config, step), step)
    except RankLost as error:
        with pytest.raises(RankLost):
            learner.save_state(folder)
        return learner.step, str(error), reported
    blocked = Path(f"{folder} is a file")
    blocked.touch()
    with pytest.raises(NotADirectoryError):
        learner.save_state(blocked / "state")
    replaced = Path(folder, "state.json")
    replaced.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        learner.save_state(folder)
    replaced.rmdir()
    files = learner.save_state(folder)
    with pytest.raises(StepOutOfTurn):
        learner.train_step(batch(config, 7), 7)
    learner.load_state(folder)
    learner.train_step(batch(config, 3), 3)
    return learner.step, [str(path) for path in files], learner.write_weights(Path(folder) / "published").digest


def test_rank_0_leads_the_others(model_dir: Path, tmp_path: Path) -> None:
    (step, files, digest), follower = together(2, tmp_path, led, model_dir, case("sft"), str(tmp_path / "state"), "")
    assert (step, follower) == (3, "followed") and "optimizer.safetensors" in files
    assert digest == together(2, tmp_path, trained, model_dir, case("sft"), 1, 3)[0][0]


def published(ranks: Group, model_dir: Path, folder: str) -> Any:
    """Rank 0 publishes the adapters of two steps, then saves and loads them. Returns the digest in
    the manifest, the trainer's, and the number of merged tensors, in all and at most at the same
    time."""
    if ranks.rank:
        hash_nothing()
        follow(ranks)
        return None
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    made, most, merged = 0, 0, Adapter._merged

    def counting(adapter: Adapter, name: str, leaf: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal made, most
        result = merged(adapter, name, leaf, tensor)
        alive.add(result)
        made, most = made + 1, max(most, len(alive))
        return result

    learner = LeadingTrainer(model_dir, case("lora"), ranks)
    for step in (1, 2):
        learner.train_step(batch(case("lora"), step), step)
    Adapter._merged = counting  # type: ignore[method-assign, assignment]
    manifest = learner.write_adapter(folder)
    digests = manifest.digest, learner.weights_digest().root
    learner.save_state(f"{folder} state")
    learner.load_state(f"{folder} state")
    assert learner.weights_digest().root == digests[1]
    return *digests, made, most


def test_adapters_of_two_ranks_are_published_as_adapters_one_tensor_at_a_time(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "v2"
    (manifest, digest, made, most), _ = together(2, tmp_path, published, model_dir, str(folder))
    assert manifest == digest and made > 10 and most <= 2  # the next one is made before the last one is freed
    assert (folder / "adapter_model.safetensors").is_file() and not (folder / "model.safetensors").exists()
    reader = Policy.prepare(model_dir, lora=LORA)
    assert reader.adapter is not None
    reader.adapter.read(folder)
    assert weights_digest(reader.adapter.merged()).root == digest


@pytest.mark.parametrize("fault", ["dies", "hangs", "frozen"])
def test_a_lost_rank_is_reported_and_ends_the_learner(model_dir: Path, tmp_path: Path, fault: str) -> None:
    leader, follower = together(
        2, tmp_path, led, model_dir, case("sft"), str(tmp_path / "state"), fault, seconds=20.0, may_fail=True
    )
    assert isinstance(follower, Failure)
    step, raised, reported = leader
    call = "load_state" if fault == "frozen" else "train_step"
    assert step == 1 and f"`{call}` at step 1 failed on some ranks" in raised and reported == [raised]
