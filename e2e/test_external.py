"""Workers that are started by hand, and join: `rollout-worker KIND --join ADDRESS --token FILE`."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import GROUPS, SAMPLES, STEPS
from mesh import ROOT, Mesh, assert_consumed_once, mesh, until
from scenario import SLOW
from test_gates import events

from rollout.run.v1 import run_pb2

ALL = '[launch]\nkind = "external"\n'


@dataclass
class Places:
    """Places that this test starts. Their logs are in the folder."""

    running: Mesh
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, kind: str) -> subprocess.Popen[bytes]:
        daemon = self.running.daemon()
        command = [ROOT / "bin" / "rollout-worker", kind, "--join", str(daemon["grpc"]), "--token", str(daemon["token_file"])]
        with (self.folder / f"{kind}-{len(self.processes)}.log").open("ab") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        return self.processes[-1]

    def leave(self, place: subprocess.Popen[bytes]) -> None:
        place.send_signal(signal.SIGTERM)
        assert place.wait(60) == 0


@contextmanager
def places(running: Mesh, folder: Path) -> Iterator[Places]:
    made = Places(running, folder)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait()


def toml(folder: Path, text: str) -> Path:
    path = folder / "rolloutd.toml"
    path.write_text(text)
    return path


def waits(running: Mesh, run: str) -> set[str]:
    return {wait.evidence for wait in running.status(run).waits if wait.reason == "WORKER_AWAITED"}


def digest_of(running: Mesh, run: str) -> str:
    running.finish(run)
    return assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)


@pytest.fixture(scope="module")
def reference(config: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights with workers that the scheduler starts."""
    with mesh(tmp_path_factory.mktemp("reference")) as running:
        return digest_of(running, running.submit(config))


def test_workers_started_by_hand_train_the_same_bits(reference: str, config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path, config=toml(tmp_path, ALL)) as running, places(running, tmp_path) as made:
        run = running.submit(config, "engine.workers=2")
        expected = {
            "1 external learner worker for learner-0",
            "2 external inference workers for inference-0 and inference-1",
        }
        until(lambda: waits(running, run) == expected, "the run to wait for its workers", 60)
        explain = [ROOT / "bin" / "rollout", "explain", run, "--state-dir", str(tmp_path)]
        text = " ".join(subprocess.run(explain, capture_output=True, text=True, timeout=60).stdout.split())
        assert "the run waits for 2 external inference workers for inference-0 and inference-1" in text, text
        assert f"fix: start them with `rollout-worker inference --join {running.daemon()['grpc']} --token FILE`" in text, text
        assert "also: 1 external learner worker for learner-0" in text, text
        for kind in ("learner", "inference", "inference"):
            made.start(kind)
        assert digest_of(running, run) == reference
        assert {worker.kind for worker in running.status(run).workers} <= {"learner", "inference"}
        assert all(process.poll() is None for process in made.processes), "a place ends with its run"


def test_workers_join_and_leave_at_any_time(reference: str, config: Path, tmp_path: Path) -> None:
    with (
        mesh(tmp_path, config=toml(tmp_path, '[launch.inference]\nkind = "external"\n')) as running,
        places(running, tmp_path) as made,
    ):
        run = running.submit(config, SLOW, "limits.worker_restarts=0")
        first = made.start("inference")
        running.until_step(run, 1)
        made.leave(first)
        until(lambda: waits(running, run) == {"1 external inference worker for inference-0"}, "the run to wait for a worker", 60)
        second = made.start("inference")
        running.until_step(run, 3)
        second.kill()
        second.wait()
        made.start("inference")
        running.finish(run)
        exits = [event.message for event in events(running, run, "worker.exited")]
        assert len(exits) == 2, exits
        assert "inference-0 was withdrawn from" in exits[0]
        assert "inference-0 was lost: the connection to its host process" in exits[1]


def test_a_scheduler_that_is_killed_leaves_no_worker_behind(config: Path, tmp_path: Path) -> None:
    """The places stop the workers, join the next scheduler, and the resumed run ends."""
    with (
        mesh(tmp_path, config=toml(tmp_path, ALL + "[worker]\nresume_on_start = true\n")) as running,
        places(running, tmp_path) as made,
    ):
        for kind in ("learner", "inference"):
            made.start(kind)
        run = running.submit(config, SLOW)
        running.until_step(run, 2)
        running.kill("all")
        running.start_service("all")
        finished = running.finish(run)
        assert finished.incarnation == 2
        assert finished.state == run_pb2.RUN_STATE_SUCCEEDED
        assert all(process.poll() is None for process in made.processes)


def test_a_place_is_refused_without_external_workers(tmp_path: Path) -> None:
    with mesh(tmp_path) as running, places(running, tmp_path) as made:
        assert made.start("inference").wait(60) == 78
        assert "no kind of worker is external" in (tmp_path / "inference-0.log").read_text()
