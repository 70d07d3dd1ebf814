"""Which device a worker beside the learner computes on.

The ranks of a learner take the first GPUs that they see, one each (``learner/sharding.py``). ``CUDA_VISIBLE_DEVICES`` says which
GPUs a process sees, and in what order; empty it and everything runs on the CPU.
"""

from __future__ import annotations

import logging

from rollout.run.v1.run_pb2 import WorkerSpec

log = logging.getLogger(__name__)


def device_of(spec: WorkerSpec) -> str:
    """``cuda:N``, see ``place_of``; ``cpu`` where there is no GPU."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not there:
        return "cpu"
    place = place_of(spec, there)
    log.info("computes on GPU %d of %d: %s", place, there, torch.cuda.get_device_name(place))
    return f"cuda:{place}"


def place_of(spec: WorkerSpec, there: int) -> int:
    """The number of a worker's GPU, of those that are there.

    Inference workers, and after them reward workers, take the GPUs that the learner's ranks leave, in turn; where these leave
    none, all of them in turn, and share them with the ranks. Who works alone (``rollout infer batch``) takes the first.
    """
    if spec.kind not in ("inference", "reward"):
        return 0
    config, number = spec.plan.config, int(spec.worker_id.rpartition("-")[2])
    if spec.kind == "reward":
        number += max(1, config.engine.workers)
    ranks = max(1, config.train.ranks)
    left = there - ranks
    return ranks + number % left if left > 0 else number % there


def repeat_bits() -> None:
    """Let kernels of GPUs give the same bits each time; one that has no such form warns. Those of the CPU do so as ``__main__``
    sets them up."""
    import torch

    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] # slow, for finding mistakes
