"""Named points between two durable effects at which a test can make a worker exit.

Like in Go (``libs/crashpoint``), a process exits at a point if the file that ``ROLLOUT_CRASH_FILE``
names contains exactly the point's name. It first renames the file, so that only one process exits.
Only workers without a model have these points.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.run.v1.run_pb2 import WorkerSpec

FILE_VARIABLE = "ROLLOUT_CRASH_FILE"

POINTS = {
    "inference": (
        "inference/registered",  # registered, no work requested
        "inference/pulled",  # work items pulled, nothing sampled
        "inference/sampled",  # samples only in memory
        "inference/published",  # samples in the stream, work items not acknowledged
        "inference/acknowledged",  # work items acknowledged
        "inference/staged",  # new weights read, the old ones in use
        "inference/swapped",  # new weights in use, not yet reported
    ),
    "learner": (
        "learner/registered",
        "learner/initialized",  # initialized, not reported to the controller
        "learner/read",  # batch read, nothing trained
        "learner/trained",  # step made, only in memory
        "learner/staged",  # weights written, not renamed to their final name
        "learner/written",  # weights published, not reported to the controller
        "learner/saving",  # weights of a state written, state not valid
        "learner/saved",  # state complete, not reported to the controller
    ),
}


def reached(point: str) -> None:
    """Exit here if the file names this point."""
    order = Path(os.environ[FILE_VARIABLE])
    try:
        if order.read_text().strip() != point:
            return
        os.rename(order, order.with_name(order.name + ".done"))
    except FileNotFoundError:
        return  # no exit was requested, or another process took the request
    os.kill(os.getpid(), signal.SIGKILL)


def arm(spec: WorkerSpec) -> None:
    """Wrap the methods at the points. Does nothing if no file is named."""
    if FILE_VARIABLE not in os.environ:
        return
    (_arm_inference if spec.kind == "inference" else _arm_learner)()


def _arm_inference() -> None:
    from rollout_testing.sim.engine import SimEngine
    from rollout_workers.inference.puller import Puller
    from rollout_workers.worker.publisher import Publisher
    from rollout_workers.worker.registration import Registration
    from rollout_workers.worker.stream import WorkQueue

    _after(Registration, "start", "inference/registered")
    _before(Puller, "deliver", "inference/pulled")
    _before(Publisher, "publish", "inference/sampled")
    _after(Publisher, "publish", "inference/published")
    _after(WorkQueue, "ack", "inference/acknowledged")
    _after(SimEngine, "stage_weights", "inference/staged")
    _after(SimEngine, "swap_weights", "inference/swapped")


def _arm_learner() -> None:
    from rollout_testing.sim.trainer import SimTrainer
    from rollout_workers.learner.learner import Learner
    from rollout_workers.worker.registration import Registration

    _after(Registration, "start", "learner/registered")
    _after(Learner, "initialize", "learner/initialized")
    _before(SimTrainer, "train_step", "learner/read")
    _after(SimTrainer, "train_step", "learner/trained")
    _after(SimTrainer, "write_weights", "learner/written")
    _after(SimTrainer, "save_state", "learner/saved")
    rename, write_text = Path.rename, Path.write_text

    def renaming(path: Path, target: Any) -> Path:
        if path.name.endswith(".tmp"):
            reached("learner/staged")
        return rename(path, target)

    def writing(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name == "state.json":
            reached("learner/saving")
        return write_text(path, *args, **kwargs)

    Path.rename, Path.write_text = renaming, writing  # type: ignore[method-assign]


def _before(owner: type, name: str, point: str) -> None:
    call: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        reached(point)
        return call(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: type, name: str, point: str) -> None:
    call: Callable[..., Any] = getattr(owner, name)

    async def finished(*args: Any, **kwargs: Any) -> Any:
        out = await call(*args, **kwargs)
        reached(point)
        return out

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        reached(point)
        return out

    setattr(owner, name, functools.wraps(call)(finished if asyncio.iscoroutinefunction(call) else wrapped))
