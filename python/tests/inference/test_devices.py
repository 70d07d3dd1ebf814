"""Which GPU a worker takes. No machine of the tests has one: what is asked is the arithmetic, and
what the CPU is for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_workers.devices import devices_of, gpus_of, repeat_bits


def spec(worker_id: str, *, ranks: int = 0, workers: int = 0) -> WorkerSpec:
    out = WorkerSpec(worker_id=worker_id, kind=worker_id.partition("-")[0])
    out.plan.config.train.ranks = ranks
    out.plan.config.engine.workers = workers
    return out


@pytest.mark.parametrize(
    ("there", "ranks", "workers", "inference", "reward"),
    [
        (1, 0, 1, [0], 0),  # all share the only one
        (2, 1, 1, [1], 1),
        (4, 1, 2, [1, 2], 3),
        (4, 2, 3, [2, 3, 2], 3),  # more workers than the learner leaves
        (2, 2, 2, [0, 1], 0),  # it leaves none
        (8, 4, 4, [4, 5, 6, 7], 4),
    ],
)
def test_workers_take_what_the_learner_leaves(there: int, ranks: int, workers: int, inference: list[int], reward: int) -> None:
    found = [gpus_of(spec(f"inference-{n}", ranks=ranks, workers=workers), there)[0] for n in range(workers)]
    assert (found, gpus_of(spec("reward-0", ranks=ranks, workers=workers), there)) == (inference, (reward,))


def test_who_works_alone_takes_the_first() -> None:
    assert gpus_of(WorkerSpec(), 4) == (0,)


def test_a_spec_assigns_gpus() -> None:
    assert gpus_of(WorkerSpec(kind="inference", worker_id="inference-3", gpus=[2, 3]), 4) == (2, 3)
    with pytest.raises(ValueError, match="assigns GPU 4, and this process sees 4"):
        gpus_of(WorkerSpec(gpus=[0, 4]), 4)


def test_the_engine_uses_the_configured_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The worker gives the engine its GPU: an engine that got none would sample on the CPU while
    GPUs are idle."""
    from rollout_workers.engines import transformers
    from rollout_workers.inference import model

    given: list[str | None] = []

    class Engine:
        @staticmethod
        def load(folder: object, config: transformers.EngineConfig, **_: object) -> None:
            given.append(config.device)
            raise StopIteration

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(transformers.engine, "TransformersEngine", Engine)
    for there, wanted in ((0, "cpu"), (2, "cuda:1")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: f"GPU {place}")
        asked = spec("inference-0")
        asked.initial_weights = str(tmp_path)
        asked.plan.config.engine.slots = asked.plan.config.engine.max_model_len = 8
        asked.plan.config.model.dtype = "float32"
        with pytest.raises(StopIteration):
            model.load(asked)
        assert given.pop() == wanted == devices_of(asked)[0]


def test_only_gpus_get_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would slow the CPU's kernels down, which do so anyhow."""
    calls: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, warn_only: calls.append(on and warn_only))
    repeat_bits()
    assert not calls
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    repeat_bits()
    assert calls == [True] and not torch.utils.deterministic.fill_uninitialized_memory
