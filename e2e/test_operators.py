"""Ways in which a run can hang, as an operator would describe them. Each is planted in a real job,
and `rollout explain` must name its root (docs/reliability.md has the counts of the first tries)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from planted import Stalled, crashing, flag, frozen, job_of
from sim import Job

from rollout.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from rollout.inference.v1 import inference_pb2

pytestmark = pytest.mark.slow

LONG = 100_000  # steps


@contextlib.contextmanager
def _scheduler_is_suspended(at: Path) -> Iterator[tuple[Stalled, str]]:
    """Someone attaches a debugger to the scheduler, and leaves."""
    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state", "seven") as job, frozen(job.running, "scheduler"):
        yield job, "scheduler"


@contextlib.contextmanager
def _every_reward_raises(at: Path) -> Iterator[tuple[Stalled, str]]:
    """The reward has a bug: it raises for every sample. The run tries each group again and
    again."""

    reward = """import pathlib

BROKEN = pathlib.Path(__file__).with_name("broken")


def letters(samples):
    if BROKEN.exists():
        raise KeyError("answer")
    return [1.0 for _ in samples]
"""

    def edit(config: Path) -> None:
        config.with_name("reward.py").write_text(reward)
        config.write_text(config.read_text().replace("group_attempts = 2", "group_attempts = 100"))

    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state", edit=edit) as job, flag(job.folder / "broken"):
        yield job, "REWARD_RAISED"


@contextlib.contextmanager
def _environment_blocks(at: Path) -> Iterator[tuple[Stalled, str]]:
    """The code of the environment loops, and holds the interpreter of its worker."""

    def edit(config: Path) -> None:
        config.write_text(config.read_text().replace("turn_timeout_seconds = 10", "turn_timeout_seconds = 600"))

    with job_of(Job(at / "job", steps=LONG, workers=1, turns=True), at / "state", seconds=0.05, edit=edit) as job:
        (job.folder / "hang").touch()
        yield job, "game.py:Game"


@contextlib.contextmanager
def _learner_crashes(at: Path) -> Iterator[tuple[Stalled, str]]:
    """The learner is killed for its memory each time it starts."""
    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state") as job, crashing(job, "learner"):
        yield job, "learner-0"


@contextlib.contextmanager
def _engine_stays_paused(at: Path) -> Iterator[tuple[Stalled, str]]:
    """A script pauses the engine, and dies before it resumes it."""
    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state") as job:
        worker = job.running.inference(job.run, job.worker("inference-0").address)
        worker.PauseEngine(inference_pb2.PauseEngineRequest(max_seconds=600))
        yield job, "ENGINE_PAUSED"
        worker.ResumeEngine(inference_pb2.ResumeEngineRequest())


@contextlib.contextmanager
def _engine_is_slow(at: Path) -> Iterator[tuple[Stalled, str]]:
    """The engine computes on a machine that is far too slow."""
    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state", steps=0, seconds=600.0) as job:
        yield job, "GENERATE"


def _taken(job: Stalled) -> None:
    """An agent takes prompts, as a client of the gateway."""
    agents = gateway_pb2_grpc.RolloutGatewayServiceStub(job.running.channel(str(job.running.daemon("rollout-gateway")["grpc"])))
    asked = gateway_pb2.NextPromptsRequest(model=job.run, max_groups=8, wait_seconds=30)
    assert agents.NextPrompts(asked, timeout=60).sessions


@contextlib.contextmanager
def _agent_is_gone(at: Path) -> Iterator[tuple[Stalled, str]]:
    """An agent takes prompts, and its machine is switched off."""
    with job_of(Job(at / "job", steps=LONG, workers=1, agents=True), at / "state", steps=0) as job:
        _taken(job)
        yield job, "SESSIONS_OPEN"


@contextlib.contextmanager
def _gateway_is_suspended(at: Path) -> Iterator[tuple[Stalled, str]]:
    """The process from which agents take prompts hangs."""
    with job_of(Job(at / "job", steps=LONG, workers=1, agents=True), at / "state", "seven", steps=0) as job:
        _taken(job)
        with frozen(job.running, "rollout-gateway"):
            yield job, "rollout-gateway"


@contextlib.contextmanager
def _model_is_moved(at: Path) -> Iterator[tuple[Stalled, str]]:
    """Someone cleans up the folder of the model, and a worker restarts."""
    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state") as job:
        shutil.move(job.folder / "model", job.folder / "elsewhere")
        for worker in job.running.status(job.run).workers:
            os.kill(worker.pid, signal.SIGKILL)
        yield job, "model"
        shutil.move(job.folder / "elsewhere", job.folder / "model")


@contextlib.contextmanager
def _controller_is_killed(at: Path) -> Iterator[tuple[Stalled, str]]:
    """The learner-controller is killed, and nothing starts it again."""
    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state", "seven") as job:
        job.running.kill("learner-controller")
        yield job, "learner-controller"
        job.running.start_service("learner-controller")


@contextlib.contextmanager
def _reward_is_debugged(at: Path) -> Iterator[tuple[Stalled, str]]:
    """Someone attaches a debugger to the process of the reward, and leaves."""
    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state") as job:
        worker = job.worker("inference-0").pid
        [child] = map(int, Path(f"/proc/{worker}/task/{worker}/children").read_text().split())
        os.kill(child, signal.SIGSTOP)
        try:
            yield job, f"process {child} of inference-0"
        finally:
            os.kill(child, signal.SIGCONT)


@contextlib.contextmanager
def _rewards_are_equal(at: Path) -> Iterator[tuple[Stalled, str]]:
    """The reward is the same for every answer, and dynamic sampling leaves all groups out."""

    def edit(config: Path) -> None:
        config.with_name("reward.py").write_text("def letters(samples):\n    return [1.0 for _ in samples]\n")
        config.write_text(config.read_text().replace("max_tokens = 12", "max_tokens = 12\nrefill_rounds = 1000"))

    with job_of(Job(at / "job", steps=LONG, workers=1, draws=True), at / "state", steps=0, edit=edit) as job:
        yield job, "EQUAL_REWARDS"


@contextlib.contextmanager
def _held_out_reward_hangs(at: Path) -> Iterator[tuple[Stalled, str]]:
    """The reward does not return for a row of the evaluation."""

    reward = """import pathlib
import time

HANG = pathlib.Path(__file__).with_name("hang")


def letters(samples):
    while HANG.exists() and any(sample.prompt == "held out:" for sample in samples):
        time.sleep(0.05)
    return [1.0 for _ in samples]
"""

    def edit(config: Path) -> None:
        config.with_name("reward.py").write_text(reward)
        config.with_name("eval.jsonl").write_text('{"prompt": "held out:", "answer": "1"}\n')
        text = config.read_text().replace('train = "train.jsonl"', 'train = "train.jsonl"\neval = "eval.jsonl"')
        config.write_text(text.replace("retries = 0", "retries = 0\ntimeout_seconds = 300") + "\n[eval]\nevery_steps = 2\n")

    with job_of(Job(at / "job", steps=LONG, workers=1), at / "state", edit=edit) as job, flag(job.folder / "hang"):
        yield job, "REWARD_CALL"


@contextlib.contextmanager
def _database_is_locked(at: Path) -> Iterator[tuple[Stalled, str]]:
    """Someone has a transaction open in the database of the buffer."""
    with (
        job_of(Job(at / "job", steps=LONG, workers=1), at / "state") as job,
        contextlib.closing(sqlite3.connect(job.running.state / "db" / "buffer.sqlite", isolation_level=None)) as shell,
    ):
        shell.execute("BEGIN EXCLUSIVE")
        yield job, "locked the database"


Plant = Callable[[Path], contextlib.AbstractContextManager[tuple[Stalled, str]]]
"""Starts a job that stalls, with a word of the owner, the reason, or the evidence of the root."""

STALLS: list[Plant] = [
    _scheduler_is_suspended,
    _every_reward_raises,
    _environment_blocks,
    _learner_crashes,
    _engine_stays_paused,
    _engine_is_slow,
    _agent_is_gone,
    _gateway_is_suspended,
    _model_is_moved,
    _controller_is_killed,
    _reward_is_debugged,
    _rewards_are_equal,
    _held_out_reward_hangs,
    _database_is_locked,
]


@pytest.mark.parametrize("plant", STALLS, ids=[plant.__name__.strip("_") for plant in STALLS])
def test_the_root_is_named(
    tmp_path: Path, plant: Callable[[Path], contextlib.AbstractContextManager[tuple[Stalled, str]]]
) -> None:
    with plant(tmp_path) as (job, word):
        job.root(lambda wait: any(word in wait[key] for key in ("owner", "reason", "evidence")), plant.__doc__ or "", 45)
