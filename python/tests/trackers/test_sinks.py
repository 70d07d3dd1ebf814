"""Trackers store each step once, even after failures and restarts. The tests read the data back
with each tracker's reader."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.event.v1.event_pb2 import Event
from rollout_workers.trackers.build import facts_of, sinks_of, tracking
from rollout_workers.trackers.feed import Feed
from rollout_workers.trackers.source import from_lines
from rollout_workers.trackers.types import Facts, LibraryMissing, Record, Sink
from rollout_workers.trackers.worker import quiet

quiet()
pytestmark = pytest.mark.timeout(600)  # creating an MLflow store is slow on a busy host
RUN = "run-01kapq3n8jz3gq5p1cs0e8q0vd"


def event(kind: str, step: int, metrics: dict[str, float] | None = None, **attributes: str) -> Event:
    made = Event(
        event_id=f"{kind}{step}", run_id=RUN, kind=kind, step=step, metrics=metrics, attributes=attributes, service="test"
    )
    made.time.FromMilliseconds(1_700_000_000_000 + 1000 * step)
    return made


def story(steps: int) -> list[Event]:
    """A run with completions in each step and an evaluation every third step. A recovery commits
    step 2 again."""
    events = [event("run.state", 0, state="STARTING"), event("eval.finished", 0, {"eval/reward": 0.1})]
    for step in range(1, steps + 1):
        rows = [{"epoch": 0, "index": step, "sample": 0, "prompt": "1|1=", "completion": "<2>\n", "reward": 1, "advantage": None}]
        events.append(event("completions", step, completions=json.dumps(rows)))
        loss = math.nan if step == 1 else 1 / step
        events.append(event("step.committed", step, {"loss": loss, "reward/mean": 0.1 * step}))
        if step % 3 == 0:
            events.append(event("eval.finished", step, {"eval/reward": 0.2 * step}))
    events.insert(8, event("step.committed", 2, {"loss": 99.0, "reward/mean": 99.0}))
    return [*events, event("run.state", steps, state="SUCCEEDED")]


def lines(events: list[Event]) -> list[str]:
    return [json_format.MessageToJson(e, indent=None, preserving_proto_field_name=True) for e in events]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow store, shared because creating one takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def facts(tmp_path: Path, request: pytest.FixtureRequest) -> Facts:
    if "mlflow" in request.node.name:
        (tmp_path / "run/sinks").mkdir(parents=True)
        shutil.copy(request.getfixturevalue("store"), tmp_path / "run/sinks/mlflow.db")
    config = RunConfig(name="addition", mode="sync")
    config.train.steps = 6
    return facts_of(config, RUN, str(tmp_path / "run"), str(tmp_path))


def sink(kind: str, facts: Facts) -> Sink:
    config = RunConfig()
    getattr(config.sinks, kind).SetInParent()
    config.sinks.wandb.project, config.sinks.wandb.mode = "rollout", "offline"
    config.sinks.mlflow.experiment = "rollout"
    return next(made for made in sinks_of(config.sinks, facts) if made.name == kind)


def feed(made: Sink, events: list[Event], warn: Callable[[str, str], None] = lambda *_: None) -> Feed:
    fed = Feed(made, from_lines(lines(events)), warn, tries=3)
    fed.start()
    fed.thread.join()
    return fed


# Content of a tracker: (metric, step) -> values in the order of writing, and the steps with a
# table.
Content = tuple[dict[tuple[str, int], list[float]], list[int]]


def read_tensorboard(facts: Facts) -> Content:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(facts.directory + "/sinks/tensorboard", size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    scalars: dict[tuple[str, int], list[float]] = {}
    for tag in reader.Tags()["scalars"]:
        for point in reader.Scalars(tag):
            scalars.setdefault((tag, point.step), []).append(point.value)
    tables = reader.Tensors("completions")
    assert b"1\\|1=" in tables[0].tensor_proto.string_val[0] and b"&lt;2>" in tables[0].tensor_proto.string_val[0]
    return scalars, sorted(point.step for point in tables)  # files of the same second are read in name order


def read_wandb(facts: Facts) -> Content:
    from rollout_workers.trackers.wandb import history

    scalars: dict[tuple[str, int], list[float]] = {}
    tables: list[int] = []
    places: list[int] = []
    for path in sorted(Path(facts.directory).glob(f"sinks/wandb/offline-run-*-{RUN}*/run-{RUN}.wandb")):
        for row in history(path):
            places.append(row["_step"])
            if any(key.startswith("completions") for key in row):
                tables.append(row["step"])
            for key, value in row.items():
                if not key.startswith(("_", "completions")) and key != "step":
                    scalars.setdefault((key, row["step"]), []).append(float(value))
    assert places == sorted(set(places))
    return scalars, tables


def read_mlflow(facts: Facts) -> Content:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{facts.directory}/sinks/mlflow.db")
    experiment = client.get_experiment_by_name("rollout")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.data.params["train.steps"] in ("6", '"6"') and run.info.run_name == "addition"
    scalars: dict[tuple[str, int], list[float]] = {}
    for key in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, key):
            scalars.setdefault((key, point.step), []).append(point.value)
    files = sorted(file.path for file in client.list_artifacts(run.info.run_id, "completions"))
    return scalars, [int(path[-13:-5]) for path in files]


READERS: dict[str, Callable[[Facts], Content]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
}


def whole(content: Content, steps: int) -> None:
    scalars, tables = content
    names = [("loss", s) for s in range(1, steps + 1)] + [("reward/mean", s) for s in range(1, steps + 1)]
    names += [("eval/reward", s) for s in range(0, steps + 1, 3)]
    assert Counter({key: len(values) for key, values in scalars.items()}) == Counter(names)
    assert tables == list(range(1, steps + 1))
    assert scalars["reward/mean", 2] == [pytest.approx(0.2)] and math.isnan(scalars["loss", 1][0])


@pytest.mark.parametrize("kind", READERS)
def test_a_resumed_run_has_each_step_once(kind: str, facts: Facts) -> None:
    first = feed(sink(kind, facts), story(4)[:-3])  # stops before the last record of step 4
    assert first.tally.done and first.tally.failures == 0, first.tally
    again = feed(sink(kind, facts), story(6))
    assert again.tally.done and again.tally.written > 0 and again.tally.known >= first.tally.written, again.tally
    whole(READERS[kind](facts), 6)
    assert feed(sink(kind, facts), story(6)).tally.written == 0
    whole(READERS[kind](facts), 6)


KILLED = """
import sys, threading
sys.path.insert(0, {here!r})
import test_sinks as t
from rollout_workers.trackers.build import facts_of
from rollout_workers.trackers.types import record_of
config = t.RunConfig(name="addition", mode="sync")
config.train.steps = 6
made = t.sink({kind!r}, facts_of(config, t.RUN, {directory!r}, {directory!r}))
made.open()
for record in filter(None, map(record_of, t.story(3)[:-2])):
    made.write(record)
print("written", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("kind", READERS)
def test_a_killed_process_neither_loses_nor_repeats_records(kind: str, facts: Facts) -> None:
    code = KILLED.format(here=str(Path(__file__).parent), kind=kind, directory=facts.directory)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert "written\n" in iter(process.stdout.readline, "")
    os.killpg(process.pid, signal.SIGKILL)  # the launcher also kills the process group, which includes the process of wandb
    process.wait()
    if kind == "tensorboard":  # the last record is truncated
        [path] = Path(facts.directory).glob("sinks/tensorboard/events.*")
        path.write_bytes(path.read_bytes()[:-5])
    assert feed(sink(kind, facts), story(6)).tally.done
    whole(READERS[kind](facts), 6)


def test_files_of_a_process_started_in_the_same_second_are_read(facts: Facts) -> None:
    for ahead in range(60):  # whichever second the test runs in
        second = time.strftime("%Y%m%d_%H%M%S", time.localtime(time.time() + ahead))
        Path(facts.directory, "sinks", "wandb", f"offline-run-{second}-{facts.run_id}").mkdir(parents=True)
    first = feed(sink("wandb", facts), story(6))
    assert first.tally.where.split(";")[0].endswith(f"{facts.run_id}-1"), first.tally
    assert feed(sink("wandb", facts), story(6)).tally.written == 0
    whole(READERS["wandb"](facts), 6)


class Broken:
    """A sink that fails the given number of times."""

    name = "broken"

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.closed = failures, error, ""
        self.wrote: list[tuple[str, int]] = []

    def open(self) -> str:
        return "nowhere"

    def write(self, record: Record) -> bool:
        if (record.kind, record.step) in self.wrote:
            return False
        if record.step == 2 and self.failures:
            self.failures -= 1
            raise self.error
        self.wrote.append((record.kind, record.step))
        return True

    def close(self, state: str) -> None:
        self.closed = state


def test_a_failing_sink_is_retried_and_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_workers.trackers.feed._FIRST_PAUSE", 0.0)
    reports: list[tuple[str, str]] = []
    made = Broken(2, OSError("no space"))
    fed = feed(made, story(3), lambda *report: reports.append(report))
    assert fed.tally.done and fed.tally.failures == 2 and not fed.tally.error
    assert reports == [("broken", "OSError: no space")]
    assert len(made.wrote) == len(set(made.wrote)) == 8 and made.closed == "SUCCEEDED"


def test_a_sink_that_always_fails_does_not_affect_others(monkeypatch: pytest.MonkeyPatch, facts: Facts) -> None:
    monkeypatch.setattr("rollout_workers.trackers.feed._FIRST_PAUSE", 0.0)
    broken, other = Broken(99, OSError("no space")), sink("tensorboard", facts)
    feeds = [Feed(made, from_lines(lines(story(6))), lambda *_: None, tries=2) for made in (broken, other)]
    for fed in feeds:
        fed.start()
    for fed in feeds:
        fed.thread.join()
    assert not feeds[0].tally.done and feeds[0].tally.error == "OSError: no space"
    whole(read_tensorboard(facts), 6)


def test_a_hanging_call_is_detected() -> None:
    entered, release = threading.Event(), threading.Event()

    class Hangs(Broken):
        def write(self, record: Record) -> bool:
            entered.set()
            return release.wait() and super().write(record)

    fed = Feed(Hangs(0, OSError()), from_lines(lines(story(1))), lambda *_: None)
    fed.start()
    entered.wait()
    assert fed.stuck(0.0) and not fed.stuck(60.0)
    release.set()
    fed.thread.join()
    assert not fed.stuck(0.0) and fed.tally.done
    fed.stop()  # does nothing after the end


def test_a_missing_library_is_not_retried(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    fed = feed(sink("wandb", facts), story(1))
    assert fed.tally.failures == 1 and "rollout-workers[wandb]" in fed.tally.error and not fed.tally.done
    with pytest.raises(LibraryMissing):
        sink("wandb", facts).open()


@pytest.mark.parametrize(
    ("uri", "want"),
    [
        ("", ("sqlite:////own/mlflow.db", "/own/mlflow")),
        ("sqlite:///runs.db", ("sqlite:////base/runs.db", "/base/runs-artifacts")),
        ("sqlite:////data/m.db", ("sqlite:////data/m.db", "/data/m-artifacts")),
        ("mlruns", ("file:///base/mlruns", None)),
        ("http://127.0.0.1:5000", ("http://127.0.0.1:5000", None)),
    ],
)
def test_store_paths_are_relative_to_the_configuration(uri: str, want: tuple[str, Any]) -> None:
    made, artifacts = tracking(uri, "/base", Path("/own"))
    assert (made, str(artifacts) if artifacts else None) == want
