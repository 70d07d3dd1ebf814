"""The ranks of a learner as processes. Rank 0 is the worker. It starts the others unless torchrun
started all of them.

Rank 0 sends the others everything except their rank. The ranks that it starts rendezvous at a file,
communicate over the loopback interface, and exit when the pipe on their standard input closes, like
rank 0 itself. The command is ``python -m rollout_workers.learner.ranks RANK SIZE RENDEZVOUS
TIMEOUT_SECONDS``.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.errors import RolloutError
from rollout_workers.worker.lifecycle import leave_now, prepare_process, watch_stdin

if TYPE_CHECKING:
    from rollout_workers.trainer import Trainer, TrainerConfig

log = logging.getLogger(__name__)

EXIT_LOST = 4
_TORCHRUN = "env://"


class RanksMismatch(RolloutError):
    """torchrun started another number of ranks than the plan requires."""

    reason: ClassVar[str] = "RANKS_MISMATCH"


@dataclass(frozen=True, slots=True)
class Place:
    """The rank of a process, and its rendezvous with the others."""

    rank: int
    size: int
    rendezvous: str
    """The ``init_method`` of ``torch.distributed``; empty if the other ranks have not been
    started."""
    timeout_seconds: float
    """How long the ranks wait for each other."""


def place(config: RunConfig, environment: Mapping[str, str] = os.environ) -> Place:
    """This process's rank: from torchrun's environment, else rank 0 of the plan's ranks. Raises
    :class:`RanksMismatch`."""
    size, timeout = max(1, config.train.ranks), config.limits.rank_timeout_seconds or 600.0
    if "RANK" not in environment:
        return Place(0, size, "", timeout)
    started = int(environment.get("WORLD_SIZE", "1"))
    if started != size:
        raise RanksMismatch(
            f"torchrun started {started} ranks, but the plan has `train.ranks` = {size}",
            fix=f"start {size} ranks, or change the plan",
        )
    return Place(int(environment["RANK"]), size, _TORCHRUN, timeout)


class Team:
    """The processes of a learner's ranks, managed by rank 0. Created before torch is imported, so
    that all import it in parallel."""

    def __init__(self, config: RunConfig, lost: Callable[[str], None]) -> None:
        """Start the other ranks. lost: called from any thread when the ranks cannot continue.
        Raises :class:`RanksMismatch`."""
        self._place, self._lost = place(config), lost
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder, self._closed = "", False
        if self._place.size > 1 and not self._place.rendezvous:
            self._start()

    def trainer(self, model_dir: str, settings: TrainerConfig) -> Trainer:
        """The trainer of all ranks; blocks until each has loaded the model."""
        from rollout_workers.trainer import Trainer

        here = self._place
        if settings.acting is not None:
            from rollout_workers.multistep.trainer import PolicyTrainer

            return PolicyTrainer(model_dir, settings)
        if here.size == 1:
            return Trainer(model_dir, settings)
        from rollout_workers.trainer.distributed.fsdp import Group
        from rollout_workers.trainer.leader import LeadingTrainer

        group = Group(0, here.size, rendezvous=here.rendezvous, timeout_seconds=here.timeout_seconds)
        return LeadingTrainer(model_dir, settings, group, lost=self._lost)

    def close(self) -> None:
        """Kill the ranks that this rank started, and wait for them."""
        self._closed = True
        for process in self._processes:
            process.kill()
            process.wait()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")  # other hosts must not connect
        here = self._place
        self._folder = tempfile.mkdtemp(prefix="rollout-ranks-")
        self._place = Place(0, here.size, f"file://{self._folder}/rendezvous", here.timeout_seconds)
        for rank in range(1, here.size):
            arguments = [str(rank), str(here.size), self._place.rendezvous, str(here.timeout_seconds)]
            process = subprocess.Popen([sys.executable, "-m", __name__, *arguments], stdin=subprocess.PIPE)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()
            log.info("rank %d of the learner is process %d", rank, process.pid)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closed:
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        reason = f"rank {rank} of the learner {how}; the learner restarts from its last state"
        log.error("%s", reason)
        self._lost(reason)


def follow_leader(here: Place) -> int:
    """Run a rank other than 0 until rank 0 exits. Returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 needs this rank to finish its step
    watch_stdin()
    from rollout_workers.trainer.distributed.fsdp import Group
    from rollout_workers.trainer.leader import follow

    try:
        follow(Group(here.rank, here.size, rendezvous=here.rendezvous, timeout_seconds=here.timeout_seconds))
    except Exception:
        log.exception("rank %d of the learner failed", here.rank)
        return EXIT_LOST
    return 0


def main() -> None:
    """Run a rank that rank 0 started."""
    rank, size, rendezvous, timeout = sys.argv[1:]
    prepare_process()
    form = f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=form)
    leave_now(follow_leader(Place(int(rank), int(size), rendezvous, float(timeout))))


if __name__ == "__main__":
    main()
