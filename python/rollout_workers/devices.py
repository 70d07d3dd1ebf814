"""The GPUs of a worker.

The ranks of a learner take the first GPUs that they see, one each (``trainer/sharding.py``).
``CUDA_VISIBLE_DEVICES`` selects and orders the GPUs that a process sees; if it is empty, everything
runs on the CPU.
"""

from __future__ import annotations

import logging

from rollout.run.v1.run_pb2 import WorkerSpec

log = logging.getLogger(__name__)


def devices_of(spec: WorkerSpec) -> tuple[str, ...]:
    """The worker's GPUs as ``cuda:N``, or ``("cpu",)`` on a host without GPUs."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return ("cpu",)
    gpus = gpus_of(spec, count)
    log.info("computes on GPUs %s of %d: %s", gpus, count, ", ".join(torch.cuda.get_device_name(gpu) for gpu in gpus))
    return tuple(f"cuda:{gpu}" for gpu in gpus)


def gpus_of(spec: WorkerSpec, count: int) -> tuple[int, ...]:
    """The numbers of a worker's GPUs among the ``count`` GPUs that it sees: those of the spec, or
    one that follows from the worker's number.

    Without ``spec.gpus``, inference workers and then reward workers take the GPUs that the
    learner's ranks do not use, in turn. If the learner uses all of them, they share all. A process
    without a run (``rollout infer batch``) takes the first. Raises ``ValueError`` if the spec names
    a GPU that the worker does not see.
    """
    if missing := [gpu for gpu in spec.gpus if gpu >= count]:
        raise ValueError(f"the spec assigns GPU {missing[0]}, but this process sees {count} GPUs: check CUDA_VISIBLE_DEVICES")
    if spec.gpus:
        return tuple(spec.gpus)
    if spec.kind not in ("inference", "reward"):
        return (0,)
    config, number = spec.plan.config, int(spec.worker_id.rpartition("-")[2])
    if spec.kind == "reward":
        number += max(1, config.engine.workers)
    ranks = max(1, config.train.ranks)
    left = count - ranks
    return (ranks + number % left if left > 0 else number % count,)


def repeat_bits() -> None:
    """Select deterministic GPU kernels; torch warns about operations without one. ``__main__`` does
    the same for CPUs."""
    import torch

    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] # a slow debug aid
