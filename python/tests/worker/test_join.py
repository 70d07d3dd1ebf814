"""A place for external workers, against a scheduler of this test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from rollout.channel import OPTIONS
from rollout.run.v1.run_pb2 import Assignment, JoinRequest, JoinResponse, StopWorker
from rollout.run.v1.run_pb2_grpc import PlaceServiceServicer, add_PlaceServiceServicer_to_server
from rollout_workers.worker.join import Joining, _Worker, join
from rollout_workers.worker.tls import PemFiles

SECONDS = 60


class Scheduler(PlaceServiceServicer):
    """Records what places report, and sends them orders."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[JoinRequest] = asyncio.Queue()
        self.orders: asyncio.Queue[JoinResponse | None] = asyncio.Queue()
        self.refuse: grpc.StatusCode | None = None
        self.metadata: dict[str, Any] = {}

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[JoinResponse]:
        self.metadata = dict(context.invocation_metadata())
        if self.refuse:
            await context.abort(self.refuse, "no")

        async def receive() -> None:
            async for report in request_iterator:
                await self.reports.put(report)
            await self.orders.put(None)

        receiving = asyncio.create_task(receive())
        while (order := await self.orders.get()) is not None:
            yield order
        receiving.cancel()

    async def next(self, report: str) -> Any:
        """The next report, which must be of this kind."""
        async with asyncio.timeout(SECONDS):
            got = await self.reports.get()
        assert got.WhichOneof("report") == report, got
        return getattr(got, report)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Scheduler, str]]:
    scheduler, server = Scheduler(), grpc.aio.server()
    add_PlaceServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield scheduler, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def assignment(script: str, folder: Path, *environment: str) -> tuple[JoinResponse, Path]:
    """The order to run a script in the place, which has it as its program, and the log."""
    (folder / "worker.py").write_text(script)
    log = folder / "worker.log"
    return JoinResponse(assignment=Assignment(id="a1", arguments=["/not/here"], environment=environment, log=str(log))), log


def place(address: str, folder: Path) -> Joining:
    token = folder / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    return Joining("inference", [address], str(token), program=(sys.executable, str(folder / "worker.py")))


def scenario(test: Callable[[Scheduler, str], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with serving() as (scheduler, address):
            await test(scheduler, address)

    asyncio.run(run())


async def ended(task: asyncio.Task[int]) -> int:
    async with asyncio.timeout(SECONDS):
        return await task


async def up(log: Path) -> None:
    """Return when the script has printed "up"."""
    async with asyncio.timeout(SECONDS):
        while not log.exists() or "up" not in log.read_text():
            await asyncio.sleep(0.01)


def test_a_place_runs_what_it_is_assigned_and_leaves(tmp_path: Path) -> None:
    async def test(scheduler: Scheduler, address: str) -> None:
        running = asyncio.create_task(join(place(address, tmp_path)))
        described = await scheduler.next("place")
        assert (described.kind, described.host, described.pid) == ("inference", socket.gethostname(), os.getpid())
        assert scheduler.metadata["authorization"] == "Bearer secret"
        script = "import os, sys\nprint(os.environ['GREETING'], sys.argv[1:])\nsys.exit(3)"
        order, log = assignment(script, tmp_path, "GREETING=hello")
        log.write_text("of an earlier process\n")
        for _ in range(2):  # one place runs one worker after another
            await scheduler.orders.put(order)
            assert (await scheduler.next("started")).id == "a1"
            exited = await scheduler.next("exited")
            assert (exited.id, exited.code, exited.signal, list(exited.last_lines)) == ("a1", 3, "", ["hello ['inference']"])
        assert log.read_text() == "of an earlier process\n" + 2 * "hello ['inference']\n"
        os.kill(os.getpid(), signal.SIGTERM)
        await scheduler.next("leaves")
        assert await ended(running) == 0

    scenario(test)


def test_a_worker_is_stopped_and_killed_after_its_grace_period(tmp_path: Path) -> None:
    async def test(scheduler: Scheduler, address: str) -> None:
        running = asyncio.create_task(join(place(address, tmp_path)))
        await scheduler.next("place")
        script = (
            "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\nprint('up', flush=True)\n"
        )
        order, log = assignment(script + "while True: time.sleep(0.01)", tmp_path)
        await scheduler.orders.put(order)
        await scheduler.next("started")
        await up(log)
        await scheduler.orders.put(JoinResponse(stop=StopWorker(id="a1", grace_ms=300)))
        exited = await scheduler.next("exited")
        assert (exited.code, exited.signal, list(exited.last_lines)) == (-1, "killed", ["up", "asked"])
        running.cancel()

    scenario(test)


def test_a_place_that_leaves_lets_its_worker_finish(tmp_path: Path) -> None:
    async def test(scheduler: Scheduler, address: str) -> None:
        running = asyncio.create_task(join(place(address, tmp_path)))
        await scheduler.next("place")
        script = "import signal, sys, time\ndef end(*_):\n    time.sleep(0.2)\n    print('done')\n    sys.exit(0)\n"
        script += "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"
        order, log = assignment(script, tmp_path)
        await scheduler.orders.put(order)
        await scheduler.next("started")
        await up(log)
        os.kill(os.getpid(), signal.SIGTERM)
        await scheduler.next("leaves")
        exited = await scheduler.next("exited")
        assert (exited.code, list(exited.last_lines)) == (0, ["up", "done"])
        assert await ended(running) == 0

    scenario(test)


def test_a_worker_ends_with_the_stream_and_the_place_joins_again(tmp_path: Path) -> None:
    async def test(scheduler: Scheduler, address: str) -> None:
        running = asyncio.create_task(join(place(address, tmp_path)))
        await scheduler.next("place")
        script = "import sys\nprint('up', flush=True)\nsys.stdin.read()\nprint('stdin closed', flush=True)"
        order, log = assignment(script, tmp_path)
        await scheduler.orders.put(order)
        await scheduler.next("started")
        await up(log)
        await scheduler.orders.put(None)  # the scheduler stops
        await scheduler.next("place")
        assert log.read_text() == "up\nstdin closed\n"
        running.cancel()

    scenario(test)


def test_a_host_without_the_files_of_the_scheduler_is_reported(tmp_path: Path) -> None:
    async def test(scheduler: Scheduler, address: str) -> None:
        running = asyncio.create_task(join(place(address, tmp_path)))
        await scheduler.next("place")
        order, _ = assignment("", tmp_path, f"ROLLOUT_WORKER_SPEC={tmp_path}/missing.json")
        await scheduler.orders.put(order)
        exited = await scheduler.next("exited")
        assert exited.code == -1
        assert exited.not_started.endswith(
            f"has no {tmp_path}/missing.json; mount the scheduler's shared folder (shared_dir) at the same path"
        )
        running.cancel()

    scenario(test)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_drops_lines_of_the_log_and_leaves_the_worker(tmp_path: Path) -> None:
    async def test(scheduler: Scheduler, address: str) -> None:
        running = asyncio.create_task(join(place(address, tmp_path)))
        await scheduler.next("place")
        order, _ = assignment("import sys\nprint('up', flush=True)\nsys.exit(5)", tmp_path)
        order.assignment.log = "/dev/full"
        await scheduler.orders.put(order)
        await scheduler.next("started")
        exited = await scheduler.next("exited")
        assert (exited.code, exited.not_started, list(exited.last_lines)) == (5, "", ["up"])
        running.cancel()

    scenario(test)


def test_a_worker_whose_output_cannot_be_read_is_killed_before_its_exit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> list[str]:
        raise OSError("no output")

    monkeypatch.setattr("rollout_workers.worker.join._copy", fail)

    async def test(scheduler: Scheduler, address: str) -> None:
        running = asyncio.create_task(join(place(address, tmp_path)))
        await scheduler.next("place")
        order, _ = assignment("import sys\nsys.stdin.read()", tmp_path)
        await scheduler.orders.put(order)
        await scheduler.next("started")
        exited = await scheduler.next("exited")
        assert (exited.code, exited.signal, exited.not_started) == (-1, "killed", "")
        running.cancel()

    scenario(test)


@pytest.mark.parametrize("left", [False, True])
def test_a_stop_during_the_start_of_a_process_is_not_lost(left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, spawning, go = asyncio.create_subprocess_exec, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any, **options: Any) -> Any:
        spawning.set()
        await go.wait()
        return await spawn(*arguments, **options)

    obey = _Worker.abandon if left else _Worker.stop

    def obeyed(worker: Any, *arguments: Any) -> Any:
        asyncio.get_running_loop().call_soon(go.set)
        return obey(worker, *arguments)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    monkeypatch.setattr(_Worker, obey.__name__, obeyed)

    async def test(scheduler: Scheduler, address: str) -> None:
        running = asyncio.create_task(join(place(address, tmp_path)))
        await scheduler.next("place")
        order, _ = assignment("import sys\nsys.stdin.read()\nsys.exit(5)", tmp_path)
        await scheduler.orders.put(order)
        async with asyncio.timeout(SECONDS):
            await spawning.wait()
        if left:
            await scheduler.orders.put(None)  # the scheduler stops
            await scheduler.next("place")
        else:
            await scheduler.orders.put(JoinResponse(stop=StopWorker(id="a1", grace_ms=60_000)))
            await scheduler.next("started")
            assert (await scheduler.next("exited")).signal == "terminated"
        running.cancel()

    scenario(test)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION])
def test_a_refused_place_exits(code: grpc.StatusCode, tmp_path: Path) -> None:
    async def test(scheduler: Scheduler, address: str) -> None:
        scheduler.refuse = code
        assert await ended(asyncio.create_task(join(place(address, tmp_path)))) == 78

    scenario(test)


def test_a_place_without_a_token_exits(tmp_path: Path) -> None:
    joining = Joining("inference", ["127.0.0.1:1"], str(tmp_path / "missing"))
    assert asyncio.run(join(joining)) == 78


def test_a_token_that_others_may_read_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    joining = place("127.0.0.1:1", tmp_path)
    Path(joining.token).chmod(0o640)
    assert asyncio.run(join(joining)) == 78
    assert f"--token: others may read {joining.token} (mode 0640, not 0600)" in caplog.text


@pytest.mark.parametrize(
    ("address", "tls", "insecure", "exposed"),
    [
        ("127.0.0.1:7000", PemFiles(), False, False),
        ("[::1]:7000", PemFiles(), False, False),
        ("localhost:7000", PemFiles(), False, False),
        ("head.internal:7000", PemFiles(), False, True),
        ("[fd00::1]:7000", PemFiles(), False, True),
        ("10.0.0.7:7000", PemFiles(), True, False),
        ("10.0.0.7:7000", PemFiles(ca="ca.pem"), False, False),
    ],
)
def test_the_token_is_not_sent_in_plain_text_beyond_loopback(address: str, tls: PemFiles, insecure: bool, exposed: bool) -> None:
    assert Joining("learner", [address], "token", tls, insecure=insecure).exposed() == (address if exposed else "")


def test_a_place_has_the_options_of_every_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    insecure = grpc.aio.insecure_channel

    def channel(address: str, options: Any) -> grpc.aio.Channel:
        made.append(options)
        return insecure(address, options)

    monkeypatch.setattr(grpc.aio, "insecure_channel", channel)

    async def test(scheduler: Scheduler, address: str) -> None:
        scheduler.refuse = grpc.StatusCode.UNAUTHENTICATED
        assert await ended(asyncio.create_task(join(place(address, tmp_path)))) == 78
        assert made == [OPTIONS]

    scenario(test)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sinks", "--join", "a:1", "--token", "t"], "sinks is not a kind of worker that can join"),
        (["learner", "--join", "a:1"], "name the file of the mesh token with --token"),
        (
            ["learner", "--join", "a:1", "--token", "t", "--cert-file", "c"],
            "--ca-file, --cert-file, and --key-file belong together",
        ),
        (
            ["learner", "--join", "127.0.0.1:1,10.0.0.7:1", "--token", "t"],
            "10.0.0.7:1 is not loopback, and the token would be sent in plain text; name the authority of the mesh",
        ),
    ],
)
def test_arguments_that_cannot_work(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rollout_workers.__main__ import main

    monkeypatch.setattr(sys, "argv", ["rollout-worker", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err
