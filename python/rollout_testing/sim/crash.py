"""Named points between two durable effects of a worker at which it dies, where a test asks for it.

As in Go (``libs/crashpoint``): a process dies where the file that ``ROLLOUT_CRASH_FILE`` names
holds just the point's name; the file is renamed first, so that each order is carried out once.
Known to workers without a model alone.
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
        "inference/registered",  # in the registry, nothing asked for
        "inference/pulled",  # work in hand, nothing sampled
        "inference/sampled",  # samples in memory alone
        "inference/published",  # on the stream, the work not acknowledged
        "inference/acknowledged",  # work acknowledged
        "inference/staged",  # new weights read, the old ones in use
        "inference/swapped",  # new weights in use, not yet reported
    ),
    "learner": (
        "learner/registered",
        "learner/initialized",  # at a state, not yet reported to the controller
        "learner/read",  # the batch read, nothing trained
        "learner/trained",  # the step made, in memory alone
        "learner/staged",  # weights written, not renamed into place
        "learner/written",  # weights in place, not yet reported to the controller
        "learner/saving",  # weights of a state written, the state not valid
        "learner/saved",  # a complete state, not yet reported to the controller
    ),
}


def reached(point: str) -> None:
    """Die here where that was asked for."""
    order = Path(os.environ[FILE_VARIABLE])
    try:
        if order.read_text().strip() != point:
            return
        os.rename(order, order.with_name(order.name + ".done"))
    except FileNotFoundError:
        return  # nothing is asked for, or another process was first
    os.kill(os.getpid(), signal.SIGKILL)


def arm(spec: WorkerSpec) -> None:
    """Put the points around what the shells call; nothing where no file is named."""
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
