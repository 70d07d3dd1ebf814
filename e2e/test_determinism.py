"""Two deterministic runs of one plan end with the same bits, without interruption and after an
interruption at any step."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from conftest import GROUPS, SAMPLES, STEPS
from mesh import Mesh, assert_consumed_once, mesh
from scenario import SLOW

from rollout.run.v1 import run_pb2


def undisturbed(running: Mesh, config: Path) -> str:
    run = running.submit(config)
    running.finish(run)
    return assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)


@pytest.fixture(scope="module")
def reference(config: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    with mesh(tmp_path_factory.mktemp("reference")) as running:
        return undisturbed(running, config)


def test_equal_plans_give_equal_digests(reference: str, config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        assert undisturbed(running, config) == reference


def test_another_seed_gives_another_digest(reference: str, config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(config, "seed=99")
        assert running.finish(run).weights_digest != reference


@contextmanager
def asked(running: Mesh, run: str) -> Iterator[list[str]]:
    """Chat with the policy during the run, with the sampling settings of the run. Returns the
    answers."""
    client = openai.OpenAI(base_url=f"{running.daemon()['gateway']}/v1", api_key="none", max_retries=0)
    answers, over = list[str](), threading.Event()

    def talk(stream: bool) -> None:
        while not over.is_set():
            if stream:
                pieces = client.completions.create(model=run, prompt="2+2=", stream=True)
                answers.append("".join(piece.choices[0].text for piece in pieces if piece.choices))
            else:
                answers.append(client.completions.create(model=run, prompt="2+2=").choices[0].text)

    with ThreadPoolExecutor(16) as pool:
        talks = [pool.submit(talk, stream) for stream in (True, False) * 8]
        try:
            yield answers
        finally:
            over.set()
        for each in talks:
            each.result()


def test_chats_with_the_policy_do_not_change_the_digest(reference: str, config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = running.submit(config)
        running.until_step(run, 1)
        with asked(running, run) as answers:
            running.until_step(run, STEPS - 1)
        running.finish(run)
        assert len(answers) > 8 and sum(map(bool, answers)) > len(answers) / 2  # an untrained policy may end at once
        assert assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES) == reference


def interrupted(running: Mesh, config: Path, step: int) -> str:
    """A run that was cancelled after a step. Its reward is slow, because a fast machine could make
    the last step before the cancel arrives. If that happens nevertheless, another run is
    started."""
    for _ in range(5):
        run = running.submit(config, SLOW)
        running.until_step(run, step)
        running.scheduler.CancelRun(run_pb2.CancelRunRequest(run_id=run, drain=step % 2 == 0))
        list(running.watch(run))
        if running.status(run).run.state != run_pb2.RUN_STATE_SUCCEEDED:
            return run
    raise AssertionError("five runs made their last step before they could be cancelled")


@pytest.mark.parametrize("step", [1, *(pytest.param(step, marks=pytest.mark.slow) for step in range(2, STEPS - 1)), STEPS - 1])
def test_an_interruption_after_a_step_does_not_change_the_digest(step: int, reference: str, config: Path, tmp_path: Path) -> None:
    with mesh(tmp_path) as running:
        run = interrupted(running, config, step)
        running.scheduler.ResumeRun(run_pb2.ResumeRunRequest(run_id=run))
        running.finish(run)
        digest = assert_consumed_once(running, run, steps=STEPS, groups_per_step=GROUPS, group_size=SAMPLES)
        assert digest == reference
