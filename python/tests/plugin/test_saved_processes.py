"""An environment's process is saved between two turns and continues: here, in several copies, and
in another network. Needs CRIU and root (`make check-process`)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from rollout import checkpoint
from rollout.checkpoint import CheckpointError
from rollout.environment import Task, Turn
from rollout.hosting import wire
from rollout.hosting.child import ChildProcess
from rollout.hosting.host import Source
from rollout.plugin.v1 import plugin_pb2 as pb

CODE = """
import random, threading
from rollout.environment import SingleEpisode

class Count(SingleEpisode):
    async def reset(self, task):
        self.turns, self.random, self.lock = 0, random.Random(task.seed), threading.Lock()
        return "begin"

    async def step(self, turn):
        with self.lock:  # a lock and a generator have no state_dict
            self.turns += 1
            return f"{self.turns} {self.random.random()}"
"""


def _missing() -> str:
    if os.name != "posix" or os.geteuid() != 0:
        return "only root can save processes"
    try:
        program = Path(checkpoint.find_program())
    except CheckpointError as error:
        return str(error)
    return "" if (program.parent / "criu").exists() else "criu is not built: run scripts/criu"


needs_criu = pytest.mark.skipif(bool(_missing()), reason=_missing())


@contextmanager
def _output(path: Path) -> Iterator[None]:
    """A file as the output of processes. pytest's own is opened with O_NOFOLLOW, so CRIU can't open
    it through /proc."""
    with path.open("ab") as output:
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        try:
            yield
        finally:
            for number, was in zip((1, 2), kept, strict=True):
                os.dup2(was, number)
                os.close(was)


def _source(folder: Path) -> Source:
    (folder / "count.py").write_text(CODE)
    return {"kind": "environment", "plugin": "count.py:Count", "base_dir": str(folder)}


@asynccontextmanager
async def _closing(folder: Path, *processes: ChildProcess) -> AsyncIterator[None]:
    with _output(folder / "output"):
        try:
            yield
        finally:
            for process in processes:
                await process.close()


def _task() -> Task:
    return Task("task", json.dumps({"n": 1}).encode(), (0,), (7,))


async def _begin(process: ChildProcess) -> None:
    await process.start()
    request = pb.ResetEnvironmentRequest(plugin="Count", tasks=[wire.task_to(_task())])
    await process.call("ResetEnvironment", request, 60)


async def _step(process: ChildProcess, number: int) -> str:
    ids = np.zeros(1, np.int32)
    turn = Turn(task=_task(), sample=0, number=number, prompt="begin", token_ids=ids, text="x", truncated=False)
    answer = await process.call("StepEnvironment", pb.StepEnvironmentRequest(plugin="Count", turns=[wire.turn_to(turn)]), 60)
    said = wire.answer_from(answer.answers[0])
    assert hasattr(said, "text"), said
    return str(getattr(said, "text", ""))


async def _gone(pid: int) -> None:
    """Wait until a killed process is no longer a zombie; init may reap it."""
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(Path(f"/proc/{pid}/stat").read_text())


@needs_criu
async def test_an_episode_continues_in_restored_processes(tmp_path: Path) -> None:
    whole, first, second, third = (ChildProcess([_source(tmp_path)]) for _ in range(4))
    async with _closing(tmp_path, whole, first, second, third):
        await _begin(whole)
        undisturbed = [await _step(whole, number) for number in range(4)]

        await _begin(first)
        assert [await _step(first, number) for number in range(2)] == undisturbed[:2]
        await first.save(str(tmp_path / "saved"), keep=True)
        assert await _step(first, 2) == undisturbed[2]  # it continues after it was saved
        await first.close()

        # Two copies of the same turn do not know of each other.
        await second.restore(str(tmp_path / "saved"))
        await third.restore(str(tmp_path / "saved"))
        assert [await _step(second, number) for number in (2, 3)] == undisturbed[2:]
        assert [await _step(third, number) for number in (2, 3)] == undisturbed[2:]

        # A restored process is saved again, and ends.
        await third.save(str(tmp_path / "again"), keep=False)
        await _gone(third.pid)


@needs_criu
async def test_a_restored_process_ends_with_its_parent_and_its_end_is_noticed(tmp_path: Path) -> None:
    process, copy = ChildProcess([_source(tmp_path)]), ChildProcess([_source(tmp_path)])
    async with _closing(tmp_path, process, copy):
        await _begin(process)
        await process.save(str(tmp_path / "saved"), keep=False)
        assert process.broken
        await copy.restore(str(tmp_path / "saved"))
        pid = copy.pid
        assert (await _step(copy, 0)).startswith("1 ")
        copy.kill()
        await _gone(pid)
        await copy.restore(str(tmp_path / "saved"))
        os.kill(copy.pid, 9)
        with pytest.raises(wire.EnvironmentExited, match="ended its process"):
            await _step(copy, 0)


@needs_criu
async def test_a_process_moves_to_another_network(tmp_path: Path) -> None:
    process, copy = ChildProcess([_source(tmp_path)]), ChildProcess([_source(tmp_path)])
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "ip link set lo up; echo ready; exec sleep 300"], stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            network = f"/proc/{other.pid}/ns/net"
            async with _closing(tmp_path, process, copy):
                await _begin(process)
                first = await _step(process, 0)
                await process.save(str(tmp_path / "saved"), keep=False)
                await copy.restore(str(tmp_path / "saved"), network=network)
                assert first.startswith("1 ")
                assert (await _step(copy, 1)).startswith("2 ")
                assert os.stat(f"/proc/{copy.pid}/ns/net").st_ino == os.stat(network).st_ino
        finally:
            other.kill()


@needs_criu
async def test_errors_name_the_reason(tmp_path: Path) -> None:
    process = ChildProcess([_source(tmp_path)])
    async with _closing(tmp_path, process):
        await _begin(process)
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        with pytest.raises(CheckpointError, match="is not empty") as error:
            await process.save(str(tmp_path / "full"))
        assert error.value.reason == "PROCESS_IMAGE_EXISTS"
        call = asyncio.create_task(_step(process, 0))
        await asyncio.sleep(0)
        with pytest.raises(CheckpointError, match="in progress") as error:
            await process.save(str(tmp_path / "saved"))
        assert error.value.reason == "PROCESS_BUSY"
        assert (await call).startswith("1 ")
        await process.save(str(tmp_path / "saved"))
        (tmp_path / "saved" / "files.img").write_bytes(b"damaged")
        with pytest.raises(CheckpointError, match=r"files\.img of the image is damaged") as error:
            await ChildProcess([_source(tmp_path)]).restore(str(tmp_path / "saved"))
        assert error.value.reason == "PROCESS_IMAGE_DAMAGED"
    with pytest.raises(CheckpointError) as error:
        await ChildProcess([_source(tmp_path)]).restore(str(tmp_path / "none"))
    assert error.value.reason == "PROCESS_IMAGE_DAMAGED"
