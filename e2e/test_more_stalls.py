"""Stalls of user code, of servers that it asks, and of what surrounds a run, each planted in a real
job. `rollout explain` must name the root: the process, the line, the address, or the prompts, and a
fix (docs/reliability.md has the counts of the first tries)."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from planted import Stalled, children, flag, job_of
from sim import Job
from sim import edit as set_values

from rollout.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from rollout.run.v1 import run_pb2

pytestmark = pytest.mark.slow

LONG = 100_000  # steps


@dataclass(frozen=True)
class Root:
    """words: patterns of owner, reason, evidence, and fix of the root, all of which must occur."""

    job: Stalled
    words: list[str]
    also: dict[str, Any] = field(default_factory=dict)


def _rewarded(
    at: Path, body: str, head: str = "", timeout: float = 3600, attempts: int = 2, workers: int = 1, **settings: Any
) -> contextlib.AbstractContextManager[Stalled]:
    """A job with a reward. body: what it does while there is a file `hang` next to it."""
    reward = f"""import pathlib
{head}

HANG = pathlib.Path(__file__).with_name("hang")


def letters(samples):
    if HANG.exists():
{body}
    return [sum(c.isalpha() for c in sample.completion) / max(1, len(sample.completion)) for sample in samples]
"""

    def edit(config: Path) -> None:
        config.with_name("reward.py").write_text(reward)
        text = config.read_text().replace("retries = 0", f"retries = 0\ntimeout_seconds = {timeout}")
        config.write_text(text)
        set_values(config, group_attempts=attempts)

    return job_of(Job(at / "job", steps=LONG, workers=workers), at / "state", edit=edit, **settings)


def _line(job: Stalled, text: str, file: str = "reward.py") -> str:
    """file.py:NN of the line with a text."""
    lines = (job.folder / file).read_text().splitlines()
    return re.escape(file) + f":{next(n for n, line in enumerate(lines, 1) if text in line)}\\b"


@contextlib.contextmanager
def _reward_deadlock(at: Path) -> Iterator[Root]:
    """The reward takes a lock that it holds."""
    body = "        with LOCK:\n            LOCK.acquire()"
    with _rewarded(at, body, "import threading\n\nLOCK = threading.Lock()") as job, flag(job.folder / "hang"):
        yield Root(job, [_line(job, "LOCK.acquire"), r"process \d+"])


@contextlib.contextmanager
def _judge_is_silent(at: Path) -> Iterator[Root]:
    """The judge accepts connections and never answers."""
    body = '        urllib.request.urlopen(HANG.read_text(), data=b"{}").read()'
    with _rewarded(at, body, "import urllib.request") as job, socket.create_server(("127.0.0.1", 0)) as judge:
        port = judge.getsockname()[1]
        with flag(job.folder / "hang", f"http://127.0.0.1:{port}/score"):
            yield Root(job, [_line(job, "urlopen("), f"127.0.0.1:{port}"])


@contextlib.contextmanager
def _judge_is_silent_in_threads(at: Path) -> Iterator[Root]:
    """The reward asks the judge in several threads, and the judge never answers."""
    head = """import socket
from concurrent.futures import ThreadPoolExecutor


def ask(sample):
    with socket.create_connection(("127.0.0.1", int(HANG.read_text()))) as judge:
        return judge.recv(1)
"""
    body = "        with ThreadPoolExecutor(4) as pool:\n            list(pool.map(ask, samples))"
    with _rewarded(at, body, head) as job, socket.create_server(("127.0.0.1", 0)) as judge:
        port = judge.getsockname()[1]
        with flag(job.folder / "hang", str(port)):
            yield Root(job, [_line(job, "judge.recv"), f"127.0.0.1:{port}"])


@contextlib.contextmanager
def _environment_gathers(at: Path) -> Iterator[Root]:
    """A step of the environment awaits several tasks, which wait for an event that does not
    come."""
    body = """        await asyncio.gather(*(self.part() for _ in range(3)))

    async def part(self):
        await asyncio.Event().wait()"""
    with _played(at, body) as job, flag(job.folder / "stall"):
        yield Root(job, [_line(job, "asyncio.Event", "game.py")])


@contextlib.contextmanager
def _reward_in_sandbox_sleeps(at: Path) -> Iterator[Root]:
    """The reward has a sandbox, and does not return for one of the prompts."""
    reward = """import time


def letters(samples):
    if any(sample.prompt == "row 20:" for sample in samples):
        time.sleep(100000)
    return [sum(c.isalpha() for c in sample.completion) / max(1, len(sample.completion)) for sample in samples]
"""

    def edit(config: Path) -> None:
        config.with_name("reward.py").write_text(reward)
        text = config.read_text().replace("retries = 0", "retries = 0\ntimeout_seconds = 3600\nsandbox = true")
        config.write_text(text)

    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state", steps=0, edit=edit) as job:
        yield Root(job, [_line(job, "time.sleep"), "in the sandbox"])


@contextlib.contextmanager
def _reward_loops(at: Path) -> Iterator[Root]:
    """A regular expression of the reward takes exponential time."""
    body = '        re.match(r"(a+)+$", "a" * 60 + "!")'
    with _rewarded(at, body, "import re") as job, flag(job.folder / "hang"):
        yield Root(job, [_line(job, "re.match"), r"process \d+"])


@contextlib.contextmanager
def _reward_waits_for_program(at: Path) -> Iterator[Root]:
    """The reward runs a program that never ends."""
    body = '        subprocess.run(["sleep", "100000"])'
    with _rewarded(at, body, "import subprocess") as job, flag(job.folder / "hang"):
        yield Root(job, [_line(job, "subprocess.run"), r"sleep"])


@contextlib.contextmanager
def _reward_waits_for_file_lock(at: Path) -> Iterator[Root]:
    """Another process holds the lock of a file that the reward takes."""
    body = '        with HANG.with_name("cache.lock").open("w") as lock:\n            fcntl.flock(lock, fcntl.LOCK_EX)'
    with _rewarded(at, body, "import fcntl") as job, (job.folder / "cache.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with flag(job.folder / "hang"):
            yield Root(job, [_line(job, "fcntl.flock"), r"cache\.lock"])


@contextlib.contextmanager
def _some_rows_raise(at: Path) -> Iterator[Root]:
    """The reward raises for some of the prompts."""
    body = """        for sample in samples:
            if int(sample.prompt[4:-1]) % 5 == 0:
                time.sleep(0.5)
                sample.row["unit"]"""
    with _rewarded(at, body, "import time", attempts=100) as job, flag(job.folder / "hang"):
        yield Root(job, ["REWARD_RAISED", _line(job, 'sample.row["unit"]'), "unit"])


@contextlib.contextmanager
def _reasons_change(at: Path) -> Iterator[Root]:
    """Many samples failed at first because a package was missing; now a judge does not answer in
    time."""
    body = """        if HANG.read_text() == "raise":
            time.sleep(0.5)
            raise ImportError("no module named sympy")
        time.sleep(100000)"""
    with _rewarded(at, body, "import time", timeout=1, attempts=100) as job:
        with flag(job.folder / "hang", "raise"):
            time.sleep(15)
        with flag(job.folder / "hang", "sleep"):
            time.sleep(6)
            yield Root(job, ["REWARD_TIMEOUT|REWARD_CALL"])


@contextlib.contextmanager
def _reward_is_killed(at: Path) -> Iterator[Root]:
    """The kernel kills the process of the reward for its memory, each time."""
    with _rewarded(at, "        os.kill(os.getpid(), 9)", "import os", attempts=100) as job, flag(job.folder / "hang"):
        yield Root(job, ["signal 9|SIGKILL|killed", "memory"])


@contextlib.contextmanager
def _reward_import_hangs(at: Path) -> Iterator[Root]:
    """The process of the reward was killed, and the next one waits while it imports the file."""
    head = 'import time\n\nwhile pathlib.Path(__file__).with_name("loading").exists():\n    time.sleep(0.5)'
    with _rewarded(at, "        pass", head) as job, flag(job.folder / "loading"):
        for child in children(job.worker("inference-0").pid):
            os.kill(child, signal.SIGKILL)
        yield Root(job, [_line(job, "time.sleep(0.5)")])


@contextlib.contextmanager
def _name_does_not_resolve(at: Path) -> Iterator[Root]:
    """The name of the judge does not resolve any more."""
    body = '        urllib.request.urlopen("http://judge.invalid/score", timeout=5)'
    with _rewarded(at, body, "import urllib.request", attempts=100) as job, flag(job.folder / "hang"):
        yield Root(job, [_line(job, "urlopen("), "REWARD_RAISED", "resol|Name or service|name"])


def _played(at: Path, body: str, head: str = "", **settings: Any) -> contextlib.AbstractContextManager[Stalled]:
    """A job with an environment. body: what a step does while there is a file `stall`."""
    game = f"""import asyncio
import json
import pathlib
{head}
from rollout.environment import Observation, Result, SingleEpisode

STALL = pathlib.Path(__file__).with_name("stall")


class Game(SingleEpisode):
    def __init__(self, boxes=False, helpers=False):
        self.count = 0

    async def reset(self, task):
        return json.loads(task.row_json)["prompt"]

    async def step(self, turn):
        if STALL.exists():
            await self.look_up(turn)
        if turn.number == 1:
            return Result(reward=float(sum(c.isalpha() for c in turn.text)))
        return Observation(text="more", reward=0.0)

    async def look_up(self, turn):
{body}
"""

    def edit(config: Path) -> None:
        config.with_name("game.py").write_text(game)
        config.write_text(config.read_text().replace("turn_timeout_seconds = 10", "turn_timeout_seconds = 3600"))

    return job_of(Job(at / "job", steps=LONG, workers=1, turns=True), at / "state", seconds=0.05, edit=edit, **settings)


@contextlib.contextmanager
def _tool_server_is_silent(at: Path) -> Iterator[Root]:
    """A step of the environment waits, asynchronously, for a server that never answers."""
    body = """        reader, _ = await asyncio.open_connection("127.0.0.1", int(STALL.read_text()))
        await reader.read(1)"""
    with _played(at, body) as job, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with flag(job.folder / "stall", str(port)):
            yield Root(job, [_line(job, "reader.read", "game.py"), f"127.0.0.1:{port}"])


@contextlib.contextmanager
def _environment_deadlock(at: Path) -> Iterator[Root]:
    """Episodes wait for a lock of the event loop that none of them releases."""
    body = "        await LOCK.acquire()"
    with _played(at, body, "\nLOCK = asyncio.Lock()") as job, flag(job.folder / "stall"):
        yield Root(job, [_line(job, "LOCK.acquire", "game.py")])


@contextlib.contextmanager
def _environment_waits_for_program(at: Path) -> Iterator[Root]:
    """A step of the environment runs a program that never ends."""
    body = '        process = await asyncio.create_subprocess_exec("sleep", "100000")\n        await process.wait()'
    with _played(at, body) as job, flag(job.folder / "stall"):
        yield Root(job, [_line(job, "process.wait", "game.py"), "sleep"])


@contextlib.contextmanager
def _environment_is_stopped(at: Path) -> Iterator[Root]:
    """The process of the environment is stopped."""
    with _played(at, "        pass") as job:
        found = children(job.worker("inference-0").pid)
        for child in found:
            os.kill(child, signal.SIGSTOP)
        try:
            yield Root(job, [rf"process ({'|'.join(map(str, found))}) of inference-0", "kill -CONT"])
        finally:
            for child in found:
                os.kill(child, signal.SIGCONT)


class _Refuses(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(503, "no capacity")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@contextlib.contextmanager
def _user_simulator_is_overloaded(at: Path) -> Iterator[Root]:
    """The server of the simulated user answers 503 to everything."""
    body = """        session = self.sessions.open(Endpoint(STALL.read_text(), "user", timeout_seconds=1800))
        await session.chat("hello")"""
    with (
        _played(at, body, "\nfrom rollout.endpoint import Endpoint") as job,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        with flag(job.folder / "stall", url):
            yield Root(job, [re.escape(f"127.0.0.1:{server.server_port}"), "503"])
        server.shutdown()


@contextlib.contextmanager
def _run_is_paused(at: Path) -> Iterator[Root]:
    """Someone paused the run and forgot it."""
    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state") as job:
        job.running.scheduler.PauseRun(run_pb2.PauseRunRequest(run_id=job.run))
        yield Root(job, ["[Pp]aused|PAUSED", "rollout runs resume"])


@contextlib.contextmanager
def _evaluation_worker_is_stopped(at: Path) -> Iterator[Root]:
    """The worker that only evaluates is stopped; the run waits for its evaluation."""

    def edit(config: Path) -> None:
        config.with_name("eval.jsonl").write_text('{"prompt": "held out:", "answer": "1"}\n')
        text = config.read_text().replace('train = "train.jsonl"', 'train = "train.jsonl"\neval = "eval.jsonl"')
        config.write_text(text + "\n[eval]\nevery_steps = 2\nworkers = 1\n")

    with job_of(Job(at / "job", steps=LONG, workers=2), at / "state", edit=edit) as job:
        kinds = {worker.worker_id: worker.pid for worker in job.running.status(job.run).workers}
        pid = kinds["inference-1"]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield Root(job, ["inference-1", str(pid)])
        finally:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _trainer_hangs(at: Path) -> Iterator[Root]:
    """The trainer waits forever in a collective operation."""
    hangs = at / "hangs"
    hangs.mkdir()
    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state", ROLLOUT_SIM_HANG=str(hangs)) as job:
        (hangs / "trainer").touch()
        yield Root(job, ["learner-0", "no micro-batch", r"is at \w+\.py:\d+", "limits.stall_seconds"])


@contextlib.contextmanager
def _engine_hangs(at: Path) -> Iterator[Root]:
    """The engine waits forever in a kernel."""
    hangs = at / "hangs"
    hangs.mkdir()
    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state", ROLLOUT_SIM_HANG=str(hangs)) as job:
        (hangs / "engine").touch()
        yield Root(job, ["inference-0", "no token", "limits.stall_seconds"])


@contextlib.contextmanager
def _one_session_is_open(at: Path) -> Iterator[Root]:
    """An agent plays all of its sessions, except one that it forgets."""
    with job_of(Job(at / "job", steps=LONG, workers=1, agents=True), at / "state", steps=0) as job:
        agents = gateway_pb2_grpc.RolloutGatewayServiceStub(
            job.running.channel(str(job.running.daemon("rollout-gateway")["grpc"]))
        )
        asked = gateway_pb2.NextPromptsRequest(model=job.run, max_groups=8, wait_seconds=30)
        sessions = agents.NextPrompts(asked, timeout=60).sessions
        yield Root(job, ["SESSIONS_OPEN", sessions[0].session_id])


@contextlib.contextmanager
def _too_stale(at: Path) -> Iterator[Root]:
    """The reward of one group takes so long that sampling may not run further ahead."""
    body = '        if any(sample.prompt == "row 5:" for sample in samples):\n            time.sleep(100000)'
    with _rewarded(at, body, "import time", workers=2) as job, flag(job.folder / "hang"):
        yield Root(job, [_line(job, "time.sleep"), "REWARD_CALL"])


@contextlib.contextmanager
def _no_agent_has_asked(at: Path) -> Iterator[Root]:
    """The agent was never started, so that the gateway does not know the run."""
    with job_of(Job(at / "job", steps=LONG, workers=1, agents=True), at / "state", steps=0) as job:
        yield Root(job, ["NO_AGENT", "start an agent"])


Plant = Callable[[Path], contextlib.AbstractContextManager[Root]]

STALLS: list[Plant] = [
    _reward_deadlock,
    _judge_is_silent,
    _judge_is_silent_in_threads,
    _environment_gathers,
    _reward_in_sandbox_sleeps,
    _reward_loops,
    _reward_waits_for_program,
    _reward_waits_for_file_lock,
    _some_rows_raise,
    _reasons_change,
    _reward_is_killed,
    _reward_import_hangs,
    _name_does_not_resolve,
    _tool_server_is_silent,
    _environment_deadlock,
    _environment_waits_for_program,
    _environment_is_stopped,
    _user_simulator_is_overloaded,
    _run_is_paused,
    _evaluation_worker_is_stopped,
    _trainer_hangs,
    _engine_hangs,
    _one_session_is_open,
    _no_agent_has_asked,
    _too_stale,
]


@pytest.mark.parametrize("plant", STALLS, ids=[plant.__name__.strip("_") for plant in STALLS])
def test_the_root_is_named(tmp_path: Path, plant: Plant) -> None:
    with plant(tmp_path) as root:

        def named(wait: dict[str, Any]) -> bool:
            text = json.dumps(wait)
            return all(re.search(word, text) for word in root.words)

        root.job.root(named, f"{plant.__doc__} {root.words}", 45)
