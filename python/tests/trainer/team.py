"""The ranks of one learner as local processes, forked from a process that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rollout_workers.trainer.distributed.ranks import Ranks

TESTS = str(Path(__file__).parents[1])
if TESTS not in sys.path:
    sys.path.append(TESTS)  # lets the processes import the tests' modules

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["rollout_workers.trainer.leader", "trainer.addition"])


@dataclass(frozen=True)
class Failure:
    """How a rank failed."""

    message: str


def together(
    size: int,
    folder: Path,
    work: Callable[..., Any],
    *arguments: Any,
    seconds: float = 300.0,
    limit: float = 350.0,
    may_fail: bool = False,
) -> list[Any]:
    """Run ``work(ranks, *arguments)`` on each of ``size`` ranks, and return their results in order.

    seconds: the group's time limit. limit: how long ranks may work before they are killed.
    may_fail: the result of rank 0 ends the test, and a rank without a result gives a ``Failure``;
    otherwise such a rank fails the test.
    """
    rendezvous = f"file://{folder}/rendezvous-{size}-{time.monotonic_ns()}"
    ends, processes = [], []
    for rank in range(size):
        end, other = _context.Pipe(duplex=False)
        process = _context.Process(target=_run, args=(other, rank, size, rendezvous, seconds, work, arguments), daemon=True)
        process.start()
        other.close()
        ends.append(end)
        processes.append(process)
    results: list[Any] = [Failure("still at work")] * size
    deadline, open_ends = time.monotonic() + limit, list(ends)
    while open_ends and (ready := wait(open_ends, max(0.0, deadline - time.monotonic()))):
        for end in ready:
            open_ends.remove(end)
            try:
                results[ends.index(end)] = end.recv()  # type: ignore[union-attr, arg-type]
            except EOFError:
                results[ends.index(end)] = Failure("died")  # type: ignore[arg-type]
        if may_fail and ends[0] not in open_ends:
            break
    for process in processes:
        process.kill()
        process.join()
    failures = [f"rank {rank}: {result.message}" for rank, result in enumerate(results) if isinstance(result, Failure)]
    if failures and not may_fail:
        raise AssertionError("\n".join(failures))
    return results


def _run(
    end: Connection, rank: int, size: int, rendezvous: str, seconds: float, work: Callable[..., Any], arguments: Any
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from rollout_workers.trainer.distributed.fsdp import Group

    try:
        ranks: Ranks = Group(rank, size, rendezvous=rendezvous, timeout_seconds=seconds)
        end.send(work(ranks, *arguments))
    except BaseException:
        end.send(Failure(traceback.format_exc()))
    end.close()
