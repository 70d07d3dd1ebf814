"""Workers receive only adapters, and the engine has the same merged weights as the learner, bit for
bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.weights.v1 import weights_pb2 as pb
from rollout_testing.run import Example
from rollout_workers.engines.transformers.current_weights import CurrentWeights
from rollout_workers.inference.merging import Merging
from rollout_workers.learner.publication import Publication
from rollout_workers.trainer import LoraConfig, Trainer, TrainerConfig
from rollout_workers.weights import named_weights, weights_digest
from rollout_workers.weights.store import WeightsUnreadable
from rollout_workers.weights.transfer.shared_memory import SharedMemory

KINDS = {
    "lora": TrainerConfig(lora=LoraConfig(rank=4, alpha=8.0)),
    "dora": TrainerConfig(lora=LoraConfig(rank=4, alpha=8.0, dora=True)),
    "some layers in bf16": TrainerConfig(
        lora=LoraConfig(rank=2, alpha=8.0, targets=("q_proj", "down_proj")), dtype=torch.bfloat16
    ),
}


class Run:
    """A learner that publishes, and the engine of a worker that loads the weights."""

    def __init__(self, example: Example, tmp_path: Path, config: TrainerConfig) -> None:
        assert config.lora is not None
        self.trainer = Trainer(example.model, config)
        memory = tmp_path / "memory"
        memory.mkdir()
        shared = SharedMemory("run-1", memory)
        self.publication = Publication("run-1", str(tmp_path / "run"), lasting=lambda step: step == 9, memory=shared)
        self.module = AutoModelForCausalLM.from_pretrained(example.model, dtype=config.dtype).requires_grad_(False)
        self.engine = CurrentWeights(self.module)
        self.merge = Merging(str(example.model), config.dtype, config.lora)

    def step(self) -> pb.WeightsManifest:
        """Change the adapters, like a training step."""
        assert self.trainer.policy.adapter is not None
        with torch.no_grad():
            for number, tensor in enumerate(self.trainer.policy.adapter.tensors().values()):
                torch.manual_seed(self.trainer.step * 1000 + number)
                tensor += 0.05 * torch.randn_like(tensor)
        self.trainer.step += 1
        return self.publication.publish(self.trainer)

    def policy(self, ids: torch.Tensor) -> torch.Tensor:
        """The learner's logits for token ids."""
        model = self.trainer.policy.model
        return model(ids.to(model.device), use_cache=False).logits.cpu()

    def take_over(self, manifest: pb.WeightsManifest) -> str:
        self.engine.stage(self.merge(Path(manifest.directory)), manifest.digest)
        self.engine.load()
        return self.engine.digest().root


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_has_the_weights_that_the_learner_merged(kind: str, example: Example, tmp_path: Path) -> None:
    run = Run(example, tmp_path, KINDS[kind])
    ids = torch.arange(3, 15)[None] % 11
    for _ in range(3):
        manifest = run.step()
        files = {file.name for file in manifest.files}
        assert manifest.form == pb.WEIGHTS_FORM_ADAPTER and "model.safetensors" not in files
        adapters = sum(t.nbytes for t in run.trainer.policy.adapter.tensors().values())  # type: ignore[union-attr]
        assert manifest.bytes < adapters + 10_000
        assert run.take_over(manifest) == manifest.digest == run.trainer.weights_digest().root
        with torch.no_grad():
            held = run.module(ids).logits.log_softmax(-1)
            policy = run.policy(ids).log_softmax(-1)
        assert (held - policy).abs().max() < (0.1 if run.module.dtype is torch.bfloat16 else 1e-5)


def test_the_digest_covers_base_and_adapters(example: Example, tmp_path: Path) -> None:
    run = Run(example, tmp_path, KINDS["lora"])
    manifest = run.step()
    with torch.no_grad():
        next(iter(run.merge._adapter.model.parameters())).view(torch.int32)[0, 0] ^= 1
    assert weights_digest(run.merge(Path(manifest.directory)).items()).root != manifest.digest
    with torch.no_grad():
        next(iter(run.merge._adapter.model.parameters())).view(torch.int32)[0, 0] ^= 1
    assert weights_digest(run.merge(Path(manifest.directory)).items()).root == manifest.digest
    file = Path(manifest.directory).resolve() / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x40
    file.write_bytes(bytes(data))
    assert weights_digest(run.merge(Path(manifest.directory)).items()).root != manifest.digest
    file.write_bytes(bytes(data[:-4]))
    with pytest.raises(WeightsUnreadable):
        run.merge(Path(manifest.directory))


def test_adapters_of_another_shape_are_rejected(example: Example, tmp_path: Path) -> None:
    run = Run(example, tmp_path, KINDS["lora"])
    manifest = run.step()
    other = Merging(str(example.model), torch.float32, LoraConfig(rank=8, alpha=8.0))
    with pytest.raises(WeightsUnreadable, match="lora"):
        other(Path(manifest.directory))


def test_lasting_versions_are_adapters(example: Example, tmp_path: Path) -> None:
    run = Run(example, tmp_path, KINDS["lora"])
    run.trainer.step = 8
    manifest = run.step()
    folder = Path(manifest.directory)
    assert manifest.form == pb.WEIGHTS_FORM_ADAPTER and not folder.is_symlink()
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) == manifest.bytes
    loaded = AutoModelForCausalLM.from_pretrained(manifest.directory)  # PEFT reads the model's path from the adapters' settings
    ids = torch.arange(3, 15)[None] % 11
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, run.policy(ids), atol=1e-5)


async def test_a_worker_with_another_digest_gets_whole_weights(example: Example, tmp_path: Path) -> None:
    run = Run(example, tmp_path, KINDS["lora"])
    manifest = run.step()
    catalog = run.publication.catalog
    [offer] = await catalog.offers(manifest.digest, "blake3-" + "0" * 64, whole=False, store=False)
    assert (offer.form, offer.bytes) == (pb.WEIGHTS_FORM_ADAPTER, manifest.bytes)
    run.publication.make_whole(run.trainer)
    [offer] = await catalog.offers(manifest.digest, "", whole=True, store=False)
    assert offer.form == pb.WEIGHTS_FORM_WHOLE
    run.engine.stage(manifest.directory, manifest.digest)
    run.engine.load()
    assert weights_digest(named_weights(run.module)).root == manifest.digest
    assert run.step().form == pb.WEIGHTS_FORM_WHOLE
    await catalog.close()
