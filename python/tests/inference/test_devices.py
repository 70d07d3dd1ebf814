"""Which GPU a worker uses. The machines that run the tests have none, so only the assignment is
tested."""

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
        (1, 0, 1, [0], 0),  # all share the only GPU
        (2, 1, 1, [1], 1),
        (4, 1, 2, [1, 2], 3),
        (4, 2, 3, [2, 3, 2], 3),  # more workers than GPUs without a rank of the learner
        (2, 2, 2, [0, 1], 0),  # the learner uses all GPUs
        (8, 4, 4, [4, 5, 6, 7], 4),
    ],
)
def test_workers_use_gpus_without_a_rank_of_the_learner(
    there: int, ranks: int, workers: int, inference: list[int], reward: int
) -> None:
    found = [gpus_of(spec(f"inference-{n}", ranks=ranks, workers=workers), there)[0] for n in range(workers)]
    assert (found, gpus_of(spec("reward-0", ranks=ranks, workers=workers), there)) == (inference, (reward,))


def test_a_process_without_a_run_uses_the_first_gpu() -> None:
    assert gpus_of(WorkerSpec(), 4) == (0,)


def test_a_spec_assigns_gpus() -> None:
    assert gpus_of(WorkerSpec(kind="inference", worker_id="inference-3", gpus=[2, 3]), 4) == (2, 3)
    with pytest.raises(ValueError, match="assigns GPU 4, but this process sees 4"):
        gpus_of(WorkerSpec(gpus=[0, 4]), 4)


def test_the_engine_uses_the_configured_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The worker passes its GPU to the engine. Otherwise the engine would sample on the CPU."""
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
    """They would slow down the CPU's kernels, which are deterministic without them."""
    calls: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, warn_only: calls.append(on and warn_only))
    repeat_bits()
    assert not calls
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    repeat_bits()
    assert calls == [True] and not torch.utils.deterministic.fill_uninitialized_memory
