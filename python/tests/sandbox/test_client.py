"""The client of ``rollout-sandbox``, against the program."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from rollout.sandbox import Bind, Limits, Sandbox, SandboxError, Sandboxes, Spec, python_binds
from rollout_testing.daemon import sandbox_binary

NO_OUTPUT = {"stdout": "", "stderr": ""}


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("sandboxes need Linux")
    monkeypatch.setenv("ROLLOUT_SANDBOX", sandbox_binary())
    report = Sandbox.probe()
    if not report.ok:
        pytest.skip(f"this host builds no sandboxes: {report.error}")


def test_the_probe_names_what_enforces_each_limit() -> None:
    report = Sandbox.probe()
    assert report.by("wall_time_s") == "supervisor"
    assert report.by("files") == "mount namespace"
    assert report.by("memory_bytes") != "none"
    assert report.by("no such limit") == "none"


async def test_a_box_keeps_files_until_it_is_reset() -> None:
    async with Sandbox() as box:
        assert (await box.run(["sh", "-c", "echo kept > file"])).ok
        assert (await box.run(["cat", "file"])).stdout == b"kept\n"
        await box.reset()
        assert not (await box.run(["cat", "file"])).ok


async def test_a_command_gets_input_files_and_variables() -> None:
    code = b"import os, sys; print(os.environ['NAME'], sys.stdin.read(), os.getcwd())"
    async with Sandbox(Spec(binds=python_binds())) as box:
        python = [sys.executable, "main.py"]
        result = await box.run(python, stdin=b"input", files={"main.py": code}, env={"NAME": "value"}, cwd="/tmp")
    assert result.stdout == b"value input /tmp\n", result


async def test_bytes_are_exact_in_both_directions() -> None:
    data = bytes(range(256))
    async with Sandbox() as box:
        assert (await box.run(["cat"], stdin=data)).stdout == data


async def test_an_interpreter_answers_line_by_line() -> None:
    async with Sandboxes() as server:
        await server.warm(Spec(), 1, ["sh"])
        async with server.open(Spec()) as box:
            shell = box.prestarted
            assert shell is not None
            await shell.write(b"x=41; echo $((x + 1))\n")
            assert await shell.read() == ("stdout", b"42\n")
            await shell.write(b"echo $x >&2; exit 3\n", eof=True)
            assert await shell.read() == ("stderr", b"41\n")
            assert (await shell.wait()).exit_code == 3


async def test_the_end_of_a_process_is_kept_until_it_is_read() -> None:
    async with Sandboxes() as server:
        process = {"process": "process-1"}
        for event in ({"stream": "stdout", "data": "early"}, {"result": {"reason": "EXITED", "exit_code": 0, **NO_OUTPUT}}):
            server._dispatch({"event": process | event})  # pyright: ignore[reportPrivateUsage]
        short = server.attach("process-1")
        async with asyncio.timeout(5):
            assert await short.read() == ("stdout", b"early")
            assert (await short.wait()).ok
        async with server.open(Spec()) as box:
            for n in range(10):
                short = await box.start(["echo", str(n)])
                await asyncio.sleep(0.05)
                assert [data async for _, data in short] == [b"%d\n" % n]
        assert not server._streams  # pyright: ignore[reportPrivateUsage]


async def test_a_process_whose_output_is_not_read_is_killed() -> None:
    async with Sandbox() as box:
        loud = await box.start(["yes"])
        while not (await box.run(["sh", "-c", "! pgrep -x yes"])).ok:
            await asyncio.sleep(0.05)
        unread = 0
        async for _, data in loud:
            unread += len(data)
        result = await loud.wait()
    assert (result.reason, result.limits_hit, result.ok) == ("LIMIT_OUTPUT", ("LIMIT_OUTPUT",), False)
    assert unread <= 16 << 20


async def test_a_prestarted_command_keeps_its_own_limits_and_input() -> None:
    async with Sandboxes() as server:
        await server.warm(Spec(), 1, ["sh"], stdin=b"echo warm\n", output_bytes=1000)
        async with server.open(Spec()) as box:
            shell = box.prestarted
            assert shell is not None
            async with asyncio.timeout(10):
                assert await shell.read() == ("stdout", b"warm\n")
                await shell.write(b"yes\n")
                assert (await shell.wait()).reason == "LIMIT_OUTPUT"


async def test_limits_end_a_command_with_their_reason() -> None:
    async with Sandbox(Spec(limits=Limits(wall_time_s=0.3, output_bytes=1000))) as box:
        slow = await box.run(["sleep", "60"])
        assert (slow.reason, slow.ok) == ("LIMIT_WALL_TIME", False)
        loud = await box.run(["yes"])
        assert (loud.reason, len(loud.stdout), loud.stdout_truncated) == ("LIMIT_OUTPUT", 1000, True)


async def test_a_canceled_call_kills_its_command() -> None:
    async with Sandbox() as box:
        call = asyncio.create_task(box.run(["sleep", "60"]))
        while (await box.run(["pgrep", "-x", "sleep"])).exit_code != 0:
            pass
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while (await box.run(["pgrep", "-x", "sleep"])).exit_code == 0:
            pass


async def test_refusals_are_typed_and_name_the_fix() -> None:
    async with Sandbox() as box:
        with pytest.raises(SandboxError, match="not in the box") as missing:
            await box.run(["no-such-program"])
        assert missing.value.reason == "COMMAND_NOT_FOUND"
        with pytest.raises(SandboxError, match="argv is empty"):
            await box.run([])
    with pytest.raises(SandboxError, match=r"binds\[0\]: /no/such/folder") as bind:
        async with Sandbox(Spec(binds=[Bind("/no/such/folder")])):
            pass
    assert bind.value.reason == "INVALID_SPEC"


async def test_calls_fail_when_the_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_SANDBOX", "/bin/true")
    with pytest.raises(SandboxError) as lost:
        async with Sandbox():
            pass
    assert lost.value.reason == "BOX_LOST"


async def test_a_killed_server_is_started_again_and_its_boxes_are_lost() -> None:
    async with Sandboxes() as server:
        await server.warm(Spec(), 1)
        async with server.open(Spec()) as box:
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(SandboxError) as lost:
                await box.run(["sleep", "30"])
            assert lost.value.reason == "BOX_LOST"
            async with server.open(Spec()) as other:
                assert (await other.run(["echo", "up"])).stdout == b"up\n"
                with pytest.raises(SandboxError) as gone:  # `other` may have its name
                    await box.run(["echo", "elsewhere"])
                assert gone.value.reason == "BOX_LOST"
        assert server.starts == 2
