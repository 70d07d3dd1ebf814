"""A run that has ended leaves nothing in memory: after many runs `rolloutd` has the goroutines that
it had after one."""

from __future__ import annotations

import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from mesh import until
from servers import children
from sim import Job, finish, sim_mesh, stop, submit

SLACK = 6
"""Goroutines of a kind that may come and go: idle connections, a database that reads, timers."""


def goroutines(log: str) -> Counter[str]:
    """The goroutines in the stack dump of the Go runtime, by the function that started them."""
    dump = log[log.index("SIGQUIT: quit") :]
    stacks = re.split(r"\n\n(?=goroutine \d+)", dump)
    started = [re.search(r"created by (\S+)", stack) for stack in stacks]
    return Counter(found.group(1) for found in started if found)


def after(folder: Path, job: Job, runs: int) -> Counter[str]:
    """The goroutines of a new `rolloutd` after a number of runs."""
    running = sim_mesh(folder).start()
    try:
        lock = running.plan(job.write())
        process = running.processes["all"]
        at_rest = len(children(process.pid))
        for _ in range(runs):
            finish(running, submit(running, lock, job))
        until(lambda: len(children(process.pid)) <= at_rest, "the workers to exit", 60)
        process.send_signal(signal.SIGQUIT)
        process.wait(60)
        return goroutines((folder / "all.log").read_text(errors="replace"))
    finally:
        stop(running)


@pytest.mark.slow
def test_runs_that_have_ended_leave_no_goroutine(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=2)
    one, many = (after(tmp_path / f"after-{runs}", job, runs) for runs in (1, 8))
    assert sum(one.values()) > 10, one
    more = {name: (one[name], count) for name, count in many.items() if count > one[name] + SLACK}
    assert not more, f"goroutines after 1 and after 8 runs: {more}"
