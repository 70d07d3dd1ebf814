"""What a process of plugins does is seen from outside: the line of the user's code, and what it
waits for."""

from __future__ import annotations

import asyncio
import fcntl
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from rollout.hosting.child import ChildProcess
from rollout.hosting.kernel import system_call, waits_for
from rollout.hosting.lines import At, with_source
from rollout.hosting.look import Look, looks
from rollout.plugin.v1 import plugin_pb2 as pb

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_REWARDS = """
import asyncio, ctypes, fcntl, os, re, resource, socket, sqlite3, subprocess, threading, time
from multiprocessing import Pool
from concurrent.futures import ThreadPoolExecutor

LOCK = threading.Lock()


def deadlock(samples):
    with LOCK:
        LOCK.acquire()  # here: deadlock


def loops(samples):
    re.match(r"(a+)+$", "a" * 60 + "!")  # here: loops


def naps(samples):
    time.sleep(1000)  # here: naps


def retries(samples):
    from urllib.error import HTTPError

    try:
        raise HTTPError("http://judge", 429, "Too Many Requests", None, None)
    except HTTPError:
        time.sleep(3600)  # here: retries


def polls(samples):
    while True:
        while os.path.exists("/"):
            time.sleep(0.5)  # here: polls


def hoards(samples):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    files = []
    try:
        while True:
            files.append(open(__file__))
    except OSError:
        pass
    while True:
        time.sleep(1000)  # here: hoards


POOL = ThreadPoolExecutor(2)


async def starves(samples):
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.run_in_executor(POOL, simulate) for _ in range(2)))


def simulate():
    time.sleep(0.2)
    POOL.submit(int).result()  # here: starves


def prints(samples):
    child = subprocess.Popen(["sh", "-c", "yes | head -c 1000000 >&2"], stderr=subprocess.PIPE)
    child.wait()  # here: prints


def pipes(samples):
    with open(samples[0].prompt) as pipe:  # here: pipes
        pipe.read()


def leaks(samples):
    import httpx

    client = httpx.Client(timeout=None, limits=httpx.Limits(max_connections=1))
    for _ in range(2):
        client.send(client.build_request("GET", samples[0].prompt), stream=True)  # here: leaks


def writes(samples):
    with open(samples[0].prompt, "a") as log:  # here: writes
        log.write("scored")


def runs(samples):
    subprocess.run(["sleep", "1000"])  # here: runs


def asks(samples):
    import urllib.request

    urllib.request.urlopen(samples[0].prompt).read()  # here: asks


def locks(samples):
    with open(samples[0].prompt, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # here: locks


def scored(text):
    if text.endswith("kill"):
        os.kill(os.getpid(), 9)
    time.sleep(1000 if text.endswith("slow") else 0)


def maps(samples):
    with Pool(2) as pool:
        time.sleep(1.5)
        pool.map(scored, [samples[0].prompt, "fast"], 1)  # here: maps


def caches(samples):
    sqlite3.connect(samples[0].prompt, timeout=1000).execute("INSERT INTO scores VALUES (1)")  # here: caches


def verifies(samples):
    child = subprocess.Popen(["sh", "-c", samples[0].prompt], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdin.write(b"1 + 1")
    child.stdout.read()  # here: verifies


async def verifies_async(samples):
    child = await asyncio.create_subprocess_exec("sleep", "1000", stdout=asyncio.subprocess.PIPE)
    await child.stdout.readline()  # here: verifies_async


def own_pipe(samples):
    reading, writing = os.pipe()
    os.read(reading, 1)  # here: own_pipe


def resolves(samples):
    own_name_server(samples[0].prompt)
    judge = socket.create_connection(samples[0].row["idle"])  # it does not wait for this one
    socket.create_connection(("judge.internal", 18777))  # here: resolves


def own_name_server(file):
    libc = ctypes.CDLL(None)
    assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
    assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # private, recursively
    assert libc.mount(file.encode(), b"/etc/resolv.conf", None, 0x1000, None) == 0  # bind


async def awaits(samples):
    await helper(samples)


async def helper(samples):
    reader, _ = await asyncio.open_connection("127.0.0.1", int(samples[0].prompt))
    await reader.read(1)  # here: awaits


def pools(samples):
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, [samples[0].prompt] * 3))


def ask(port):
    with socket.create_connection(("127.0.0.1", int(port))) as judge:
        judge.recv(1)  # here: pools


async def delegates(samples):
    await asyncio.to_thread(ask_one, samples[0].prompt)


def ask_one(port):
    with socket.create_connection(("127.0.0.1", int(port))) as judge:
        judge.recv(1)  # here: delegates


async def forgets(samples):
    lock = asyncio.Lock()
    async with lock:
        await lock.acquire()  # here: forgets


async def chats(samples):
    from rollout.endpoint import Endpoint

    await Endpoint(samples[0].prompt, "user", timeout_seconds=100).chat([])  # here: chats
"""


@asynccontextmanager
async def _called(folder: Path, name: str, prompt: str, row: bytes = b"{}") -> AsyncIterator[ChildProcess]:
    """A process with a call of a reward that does not return."""
    (folder / "reward.py").write_text(_REWARDS)
    process = ChildProcess([{"kind": "reward", "plugin": f"reward.py:{name}", "base_dir": str(folder)}])
    await process.start()
    group = pb.RewardGroup(row_json=row, samples=[pb.RewardSample(prompt=prompt)])
    call = asyncio.create_task(process.call("Reward", pb.RewardRequest(groups=[group]), 100))
    try:
        yield process
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await process.close()


async def _seen(process: ChildProcess, does: str) -> Look:
    """The look at a process as soon as it does this."""
    deadline = time.monotonic() + 20
    while True:
        seen = [look for look in await looks(0.0) if look.pid == process.pid]
        if seen and seen[0].at is not None and re.search(does, seen[0].does):
            return seen[0]
        assert time.monotonic() < deadline, [(each.does, each.fix) for each in seen]
        await asyncio.sleep(0.05)


_IN_A_CIRCLE = r"reads its input, a pipe that process \d+, which waits, has open for writing$"
_PIPES = {
    "exec cat": rf"reads a pipe that process \d+ \(`cat`\) has open for writing, which {_IN_A_CIRCLE}",
    "cat | wc -c": r"reads a pipe that process \d+ \(`sh .*`\) has open for writing \(as process \d+ \(`wc -c`\) has\), "
    r"which waits for process \d+ \(`wc -c`\), which reads its input, a pipe that process \d+ \(`cat`\) has open for writing, "
    rf"which {_IN_A_CIRCLE}",
    "exec sleep 1000": r"reads a pipe that process \d+ \(`sleep 1000`\) has open for writing, which sleeps for 1000 s$",
}


@pytest.mark.parametrize("command", _PIPES)
async def test_the_process_whose_output_is_read_is_seen(command: str, tmp_path: Path) -> None:
    async with _called(tmp_path, "verifies", command) as process:
        look = await _seen(process, _PIPES[command])
        assert look.at is not None
        assert _REWARDS.splitlines()[look.at.line - 1].endswith("here: verifies"), look
        assert ("communicate()" in look.fix) == ("cat" in command), look.fix


_CASES = {
    "verifies_async": r"waits for process \d+ \(`sleep 1000`\)",
    "own_pipe": "reads a pipe that only it has open for writing$",
    "deadlock": "waits for a lock",
    "loops": "computes, with .* of a core",
    "naps": r"^sleeps for another \d{3} s$",
    "retries": r"^sleeps for another \d{4} s, while it handles HTTPError: HTTP Error 429: Too Many Requests from http://judge$",
    "polls": r"^sleeps, in the loop `while os.path.exists\('/'\):`$",
    "hoards": r"^sleeps, and has 64 files open, \d+ of them of .*/reward.py: the limit is 64, so it can open no other$",
    "forgets": "awaits a lock",
    "prints": r"waits for process \d+ \(`sh .*`\), which waits for process \d+ \(`.*`\), which is blocked in a write to its "
    r"output, a full pipe that process \d+ \(`.*`\) should read$",
    "runs": r"waits for process \d+ \(`sleep 1000`\)",
}


@pytest.mark.parametrize("name", _CASES)
async def test_the_line_of_a_blocking_call_is_seen(name: str, tmp_path: Path) -> None:
    async with _called(tmp_path, name, "") as process:
        look = await _seen(process, _CASES[name])
        assert look.at is not None
        assert (look.at.file, look.at.function) == (str(tmp_path / "reward.py"), name)
        assert _REWARDS.splitlines()[look.at.line - 1].endswith(f"here: {name}"), look
        assert look.at.source == " ".join(_REWARDS.splitlines()[look.at.line - 1].split())[:80]


def test_the_source_of_a_line_is_read_from_short_regular_files_only(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_bytes(b"\n\t" + b"x = 1; " * 100 + b"\n" + b"\xff\x1b\n" + b"#" * (1 << 20) + b"\nlate = 1\n")
    os.mkfifo(tmp_path / "pipe")

    def source(name: str, line: int) -> str:
        return with_source(At(str(tmp_path / name), line, "score"), os.getpid()).source

    os.utime(file, (1, 1))
    assert source("reward.py", 2) == ("x = 1; " * 12)[:80]
    assert source("reward.py", 3) == "\N{REPLACEMENT CHARACTER}" * 2
    assert [source("reward.py", line) for line in (1, 5, 99)] == ["", "", ""]
    assert [source(name, 1) for name in ("pipe", "missing", ".")] == ["", "", ""]
    os.utime(file, (1, time.time() + 100))
    assert source("reward.py", 2) == "", "the file was changed after the process had read it"


@pytest.mark.parametrize("name", ["asks", "awaits", "pools", "delegates"])
async def test_the_server_that_does_not_answer_is_seen(name: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with _called(tmp_path, name, f"http://127.0.0.1:{port}" if name == "asks" else str(port)) as process:
            look = await _seen(
                process, rf"waits for an answer of 127.0.0.1:{port}, where process {os.getpid()} \(`.*`\) listens$"
            )
            assert look.at is not None
            assert _REWARDS.splitlines()[look.at.line - 1].endswith(f"here: {name}"), look
            assert f"see why process {os.getpid()} does not answer" in look.fix


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts another resolv.conf")
async def test_the_name_server_that_does_not_answer_is_seen(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.79\n")
    with socket.create_server(("127.0.0.1", 0)) as idle, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.79", 53))
        row = json.dumps({"idle": idle.getsockname()}).encode()
        async with _called(tmp_path, "resolves", str(tmp_path / "resolv.conf"), row) as process:
            look = await _seen(process, "waits for the name server 127.0.0.79:53$")
            assert look.at is not None
            assert look.at.calls == "getaddrinfo"
            assert _REWARDS.splitlines()[look.at.line - 1].endswith("here: resolves"), look
            assert "why the name server 127.0.0.79:53 does not answer" in look.fix


def test_a_resolution_without_a_socket_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "import select; select.poll().poll()"]) as process:
        try:
            deadline = time.monotonic() + 20
            while "poll" not in (found := system_call(process.pid, process.pid))[0]:
                assert time.monotonic() < deadline, found
                time.sleep(0.02)
            at = At("/job/judge.py", 12, "judge", ("socket.py",), calls="getaddrinfo")
            assert waits_for(process.pid, at.thread, at.inner, at.calls)[0] == "resolves a host name (getaddrinfo)"
        finally:
            process.kill()


async def test_the_answer_of_an_endpoint_that_is_asked_again_is_seen(tmp_path: Path) -> None:
    class Overloaded(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(503, "no capacity")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Overloaded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        async with _called(tmp_path, "chats", url) as process:
            look = await _seen(process, f"the model at {url}/chat/completions answers 503")
            assert look.at is not None
            assert _REWARDS.splitlines()[look.at.line - 1].endswith("here: chats"), look
            assert "overloaded" in look.fix
        server.shutdown()


_SERVER = """
import socket, sys
with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        connection, _ = server.accept()
        if len(sys.argv) > 1:
            socket.create_connection(("127.0.0.1", int(sys.argv[1]))).recv(1)
"""


def _server(folder: Path, *arguments: str, name: str = "server.py") -> tuple[subprocess.Popen[bytes], str]:
    """A process that listens, and its port. It answers nothing: it asks the port of an argument."""
    (folder / name).write_text(_SERVER)
    server = subprocess.Popen([sys.executable, str(folder / name), *arguments], stdout=subprocess.PIPE)
    assert server.stdout is not None
    return server, server.stdout.readline().decode().strip()


async def test_the_servers_behind_a_server_are_seen(tmp_path: Path) -> None:
    far, far_port = _server(tmp_path, name="a\n server.py")  # named in one line
    near, near_port = _server(tmp_path, far_port)
    try:
        async with _called(tmp_path, "asks", f"http://127.0.0.1:{near_port}") as process:
            listens = rf"waits for an answer of 127.0.0.1:{near_port}, where process {near.pid} \(`.*`\) listens, "
            deeper = rf"which waits for an answer of 127.0.0.1:{far_port}, where process {far.pid} \(`.*`\) listens"
            look = await _seen(process, f"{listens}{deeper}$")
            assert f"see why process {far.pid} does not answer" in look.fix
            far.send_signal(signal.SIGSTOP)
            look = await _seen(process, f"{listens}{deeper}, which is stopped by a signal$")
            assert look.fix == f"continue it: `kill -CONT {far.pid}`"
    finally:
        for server in (near, far):
            server.kill()
            server.communicate()


async def test_a_server_that_accepts_no_connection_is_seen(tmp_path: Path) -> None:
    server, port = _server(tmp_path)
    server.send_signal(signal.SIGSTOP)
    waiting = [socket.socket() for _ in range(4)]
    try:
        for each in waiting:  # its queue of connections becomes full
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", int(port)))
        async with _called(tmp_path, "asks", f"http://127.0.0.1:{port}") as process:
            waits = f"waits for (a connection to|an answer of) 127.0.0.1:{port}"  # the client may see itself connected
            listens = rf"{waits}, where process {server.pid} \(`.*`\) listens"
            look = await _seen(process, f"{listens}, which is stopped by a signal$")
            assert look.fix == f"continue it: `kill -CONT {server.pid}`"
    finally:
        server.kill()
        server.communicate()
        for each in waiting:
            each.close()


async def test_the_endpoint_of_the_control_plane_is_named(tmp_path: Path) -> None:
    (tmp_path / "rolloutd").symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "server.py").write_text(_SERVER)
    with subprocess.Popen([tmp_path / "rolloutd", tmp_path / "server.py"], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().decode().strip()
            async with _called(tmp_path, "asks", f"http://127.0.0.1:{port}") as process:
                look = await _seen(
                    process, rf"answer of 127.0.0.1:{port}, an endpoint of the control plane \(process {server.pid}\)$"
                )
                assert "restart" not in look.fix
                assert "see what else the run waits for" in look.fix
        finally:
            server.kill()


@contextmanager
def _printed(script: str, *arguments: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a script, after it has printed a line."""
    with subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process


async def test_what_the_holder_of_a_lock_waits_for_is_seen(tmp_path: Path) -> None:
    first, second = tmp_path / "a.lock", tmp_path / "b.lock"
    begin = (
        "import fcntl, os, sys; files = [open(path, 'w') for path in sys.argv[1:]]; fcntl.flock(files[0], 2); print(flush=True)"
    )
    with (
        _printed(f"{begin}; os.kill(os.getpid(), 19)", second) as last,
        _printed(f"{begin}; fcntl.flock(files[1], 2)", first, second) as holder,
    ):
        try:
            async with _called(tmp_path, "locks", str(first)) as process:
                look = await _seen(
                    process,
                    f"waits for the lock of {first}, which process {holder.pid} .* holds, and which waits for the lock of "
                    f"{second}, which process {last.pid} .* holds, and which is stopped by a signal$",
                )
                assert look.fix == f"continue it: `kill -CONT {last.pid}`"
        finally:
            holder.kill()
            last.kill()


async def test_an_executor_whose_threads_wait_for_its_own_work_is_seen(tmp_path: Path) -> None:
    async with _called(tmp_path, "starves", "") as process:
        look = await _seen(process, "waits for the result of a future, as all 2 threads of executors do: work that is queued")
        assert look.at is not None
        assert _REWARDS.splitlines()[look.at.line - 1].endswith("here: starves"), look
        assert "max_workers" in look.fix


async def test_the_holder_of_a_file_lock_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "cache.lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        async with _called(tmp_path, "locks", str(path)) as process:
            look = await _seen(process, re.escape(f"waits for the lock of {path}, which process {os.getpid()} ("))
            assert f"process {os.getpid()}" in look.fix


async def test_all_holders_of_an_inherited_lock_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "cache.lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(["sleep", "1000"], pass_fds=[held.fileno()]) as heir:
            try:
                async with _called(tmp_path, "locks", str(path)) as process:
                    first, second = sorted((os.getpid(), heir.pid))
                    look = await _seen(process, f"process {first} .* and process {second} .* hold$")
                    assert "when all of them have ended" in look.fix
                    held.close()  # its inheritor has the lock
                    look = await _seen(process, rf"which process {heir.pid} \(`sleep 1000`\) holds$")
            finally:
                heir.kill()


async def test_a_pool_of_connections_without_a_free_one_is_seen(tmp_path: Path) -> None:
    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            time.sleep(1000)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        async with _called(tmp_path, "leaks", f"http://127.0.0.1:{server.server_port}") as process:
            look = await _seen(process, "waits for a free connection of an HTTP connection pool .httpx.$")
            assert "close each response" in look.fix
        server.shutdown()
        server.block_on_close = False


async def test_a_named_pipe_is_not_a_dead_file_system(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with _called(tmp_path, "pipes", str(tmp_path / "pipe")) as process:
        look = await _seen(process, f"^opens {tmp_path}/pipe, a named pipe that no process has open at its other end$")
        assert look.at is not None
        assert _REWARDS.splitlines()[look.at.line - 1].endswith("here: pipes"), look


async def test_the_holder_of_a_database_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    script = f"import sqlite3, time; db = sqlite3.connect({str(path)!r}); db.execute('CREATE TABLE scores(x)'); db.commit(); \
db.execute('BEGIN EXCLUSIVE'); print('ready', flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"ready\n"
            async with _called(tmp_path, "caches", str(path)) as process:
                look = await _seen(process, f"sleeps, and has {path} open, whose lock process {holder.pid} .* holds")
                assert f"why process {holder.pid} holds the lock of {path}" in look.fix
        finally:
            holder.kill()


@pytest.mark.parametrize(
    ("prompt", "does"), [("kill", "one of which has ended and was replaced"), ("slow", "pool of 2 processes$")]
)
async def test_a_pool_that_waits_for_a_lost_task_is_seen(prompt: str, does: str, tmp_path: Path) -> None:
    async with _called(tmp_path, "maps", prompt) as process:
        look = await _seen(process, does)
        assert look.at is not None
        assert _REWARDS.splitlines()[look.at.line - 1].endswith("here: maps"), look


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts and freezes a file system")
async def test_the_file_system_that_does_not_answer_is_seen(tmp_path: Path) -> None:
    image, mount = tmp_path / "disk.img", tmp_path / "disk"
    mount.mkdir()
    for command in (f"truncate -s 16M {image}", f"mkfs.ext4 -q {image}", f"mount -o loop {image} {mount}"):
        if subprocess.run(command.split(), capture_output=True).returncode:
            pytest.skip(f"can't run {command}")
    try:
        subprocess.run(["fsfreeze", "-f", str(mount)], check=True)
        try:
            async with _called(tmp_path, "writes", str(mount / "log")) as process:
                try:
                    look = await _seen(process, f"the open of {mount}/log waits for the file system at {mount} .ext4.$")
                    assert f"fsfreeze -u {mount}" in look.fix
                    began = time.monotonic()
                    process.kill()  # no signal ends it now
                    assert time.monotonic() - began < 10, "a process that can't be killed stops the worker"
                finally:
                    subprocess.run(["fsfreeze", "-u", str(mount)], check=True)
        finally:
            subprocess.run(["fsfreeze", "-u", str(mount)], capture_output=True)
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


async def test_a_process_without_a_call_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(_REWARDS)
    process = ChildProcess([{"kind": "reward", "plugin": "reward.py:naps", "base_dir": str(tmp_path)}])
    await process.start()
    try:
        assert [look for look in await looks(0.0) if look.pid == process.pid] == []
    finally:
        await process.close()
