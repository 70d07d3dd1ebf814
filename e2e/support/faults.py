"""Random faults of services, workers, servers, and the connections between them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

from mesh import until
from production import Production
from proxy import trouble
from sim import UNAVAILABLE

from rollout.run.v1 import run_pb2
from rollout_testing.processes import children

KINDS = ("worker", "host", "environment", "sandbox", "service", "server", "link", "disk", "failover")
FROZEN_SECONDS = 6.0
AWAY_SECONDS = 3.0
FROZEN = 0.3
"""The share of faults that stop a process for a while (SIGSTOP) instead of killing it."""


class Faults:
    """Injects faults into one run after another, and undoes them. `fix` restarts what was killed,
    like a supervisor of services."""

    def __init__(self, production: Production, game: Path | None = None, only: Collection[str] = KINDS) -> None:
        """game: the folder of the job's environment (`game.py`), whose processes and boxes get
        faults too. only: the kinds of faults."""
        self.game, self.only, self.standby = game, only, production.standby
        self.running, self.servers, self.proxy = production.running, production.servers, production.proxy
        self.dice = random.Random(0)
        self.done: Counter[str] = Counter()
        self.run = ""
        self.workers: list[tuple[str, int]] = []
        self.directory = ""
        self._killed_worker = False
        self._cures: list[tuple[float, Callable[[], None]]] = []
        self._returning: set[str] = set()  # processes of the services that will be restarted

    def begin(self, run: str, dice: random.Random) -> None:
        self.run, self.dice, self.done, self.workers = run, dice, Counter(), []

    def see(self, status: run_pb2.RunStatus) -> None:
        """Read the list of current workers."""
        self.workers = [(worker.worker_id, worker.pid) for worker in status.workers if worker.pid]
        self.directory = status.run.directory

    def total(self) -> int:
        return self.done.total()

    def strike(self) -> bool:
        """Inject one random fault. Returns False if there is nothing to hurt yet."""
        self.workers = [(name, pid) for name, pid in self.workers if is_worker(pid)]
        players, boxes = self._players() if self.game else ([], [])
        if self.game and not players:
            return False  # runs without a game get faults while they start
        possible: dict[str, tuple[object, Callable[[], str]]] = {
            "worker": (self.workers, self._hurt_worker),
            "host": (self.workers and self.directory and self.running.shape == "all", self._lose_host),
            "environment": (players, lambda: self._hurt_player(players)),
            "sandbox": (boxes, lambda: self._hurt_box(boxes)),
            "service": (any(map(self.running.alive, self.running.members())), self._hurt_member),
            "server": (self.servers.by_name, self._hurt_server),
            "link": (self.servers.by_name, self._hurt_link),
            "disk": (self.servers.by_name and self._replicated(), self._lose_disk),
            "failover": (self.standby and self.standby.ready(), self._fail_over),
        }
        kinds = [hurt for name, (can, hurt) in possible.items() if can and name in self.only]
        if not kinds:
            return False  # all were killed already
        # The first fault that finds a worker kills one, so that even a few faults on many processes
        # include it.
        first = self.workers and not self._killed_worker and "worker" in self.only
        what = self._kill_worker(*self.dice.choice(self.workers)) if first else self.dice.choice(kinds)()
        self.done[what] += 1
        with (self.running.state.parent / "faults.log").open("a") as log:
            log.write(f"{datetime.now(UTC):%H:%M:%S.%f} {self.run} {what}\n")
        return True

    def fix(self) -> None:
        """Undo the faults that are due: resume, restart, reconnect. Processes that exited by
        themselves are restarted too."""
        now = time.monotonic()
        due = [cure for when, cure in self._cures if when <= now]
        self._cures = [(when, cure) for when, cure in self._cures if when > now]
        for cure in due:
            cure()
        for name in self.running.members():
            if not self.running.alive(name) and name not in self._returning:
                code = self.running.processes[name].returncode
                assert code == UNAVAILABLE, f"rolloutd {name} exited by itself with code {code}:\n{self.running.log(name)}"
                self._bring_back(name, 0.5)  # it found no server when it started
        for server in self.servers.by_name.values():
            if server.left() and server.name not in self._returning:
                self._bring_back(server.name, 0.5)

    def end(self) -> Counter[str]:
        """Undo all faults at once and wait until everything serves. Returns the faults."""
        self.proxy.heal()
        self._cures = [(0.0, cure) for _, cure in self._cures]
        self.fix()

        def whole() -> bool:
            self.fix()
            members = all(self.running.alive(name) and self.running.serves(name) for name in self.running.members())
            return members and all(server.serves() for server in self.servers.by_name.values())

        until(whole, "everything to serve", 180)
        return self.done

    def _hurt_member(self) -> str:
        name = self.dice.choice([name for name in self.running.members() if self.running.alive(name)])
        pid = self.running.processes[name].pid
        if self.dice.random() < FROZEN:
            self.running.frozen.add(name)
            self._stop(lambda number: _send(pid, number), lambda: self.running.frozen.discard(name))
            return f"SIGSTOP {name}"
        self.running.kill(name)
        self._bring_back(name, self.dice.uniform(0, 0.5 if self.running.shape == "all" else AWAY_SECONDS))
        return f"kill -9 {name}"

    def _hurt_worker(self) -> str:
        name, pid = self.dice.choice(self.workers)
        if self.dice.random() < FROZEN:
            self._stop(lambda number: _send(pid, number))
            return f"SIGSTOP {name}"
        return self._kill_worker(name, pid)

    def _lose_host(self) -> str:
        lose_host(Path(self.directory), [pid for _, pid in self.workers])
        self._killed_worker = True
        return "lose the host of the workers"

    def _kill_worker(self, name: str, pid: int) -> str:
        _send(pid, signal.SIGKILL)
        self._killed_worker = True
        return f"kill -9 {name}"

    def _players(self) -> tuple[list[int], list[int]]:
        """The processes of environments, and the sandboxes that they started with their boxes."""
        workers = [pid for name, pid in self.workers if name.startswith("inference")]
        players = [pid for worker in workers for pid in children(worker, "rollout.hosting.child")]
        return players, [pid for player in players for pid in children(player)]

    def _hurt_player(self, players: list[int]) -> str:
        assert self.game is not None
        pid = self.dice.choice(players)
        match self.dice.choice(("kill -9", "SIGSTOP", "hang")):
            case "hang":
                (self.game / "hang").touch()
                return "hang environment"
            case "SIGSTOP":
                self._stop(lambda number: _send(pid, number))
                return "SIGSTOP environment"
            case _:
                _send(pid, signal.SIGKILL)
                return "kill -9 environment"

    def _hurt_box(self, boxes: list[int]) -> str:
        pid = self.dice.choice(boxes)
        with contextlib.suppress(OSError):
            if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                _send(pid, signal.SIGKILL)
                return "kill -9 rollout-sandbox"
        _send(pid, signal.SIGKILL)
        return "kill -9 box"

    def _hurt_server(self) -> str:
        server = self.dice.choice(list(self.servers.by_name.values()))
        if self.dice.random() < FROZEN:
            self._stop(server.signal)
            return f"SIGSTOP {server.name}"
        server.kill()
        self._bring_back(server.name, self.dice.uniform(0, AWAY_SECONDS))
        return f"kill -9 {server.name}"

    def _replicated(self) -> bool:
        """Whether every node of the NATS cluster has all data, so that one of them may lose its
        own."""
        return all(self.servers.by_name[name].serves() for name in self._nodes())

    def _nodes(self) -> list[str]:
        return [name for name in self.servers.by_name if name.startswith("nats-")]

    def _lose_disk(self) -> str:
        server = self.servers.by_name[self.dice.choice(self._nodes())]
        server.kill()
        shutil.rmtree(server.data)
        self._bring_back(server.name, self.dice.uniform(0, AWAY_SECONDS))
        return f"lose the disk of {server.name}"

    def _fail_over(self) -> str:
        assert self.standby is not None
        self.standby.fail_over()
        return "fail over postgres"

    def _hurt_link(self) -> str:
        link = self.dice.choice(list(self.proxy.links.values()))
        what, seconds = trouble(link, self.dice)
        if seconds:
            self._later(seconds, link.heal)
        return f"{what} connections to {link.name}"

    def _stop(self, send: Callable[[signal.Signals], None], after: Callable[[], None] = lambda: None) -> None:
        send(signal.SIGSTOP)

        def go_on() -> None:
            send(signal.SIGCONT)
            after()

        self._later(self.dice.uniform(0.05, FROZEN_SECONDS), go_on)

    def _bring_back(self, name: str, seconds: float) -> None:
        def start() -> None:
            self._returning.discard(name)
            if name in self.servers.by_name:
                if self.servers.by_name[name].left():
                    self.servers.by_name[name].launch()
            elif not self.running.alive(name):
                self.running.frozen.discard(name)
                self.running.launch(name)

        self._returning.add(name)
        self._later(seconds, start)

    def _later(self, seconds: float, cure: Callable[[], None]) -> None:
        self._cures.append((time.monotonic() + seconds, cure))


def lose_host(directory: Path, pids: Sequence[int]) -> None:
    """Kill the workers of a run and remove the weights in shared memory, as when their host fails.
    directory: the folder of the run."""
    for pid in pids:
        _send(pid, signal.SIGKILL)
    for version in (directory / "weights").glob("v*"):
        if version.is_symlink():
            shutil.rmtree(version.resolve(), ignore_errors=True)


def is_worker(pid: int) -> bool:
    """Whether a process that a service named is still a worker, and not another process with its
    number."""
    with contextlib.suppress(OSError):
        return b"rollout" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
