"""Reading the spec of a worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.run.v1.run_pb2 import WorkerSpec
from rollout_testing.run import write_spec
from rollout_workers.kinds import WORKERS
from rollout_workers.worker.spec import SpecError, identity, is_deterministic, load_spec, resolve


def made() -> WorkerSpec:
    return WorkerSpec(
        worker_id="inference-3",
        kind="inference",
        run_id="run-01",
        base_dir="/home/me",
        nats_url="nats://127.0.0.1:1",
        consul_address="127.0.0.1:2",
        incarnation=4,
    )


def test_reads_the_file_that_the_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_WORKER_SPEC", str(write_spec(tmp_path / "spec.json", made())))
    spec = load_spec()
    assert spec == made()
    assert resolve(spec, "data/train.jsonl") == "/home/me/data/train.jsonl"
    assert resolve(spec, "/data") == "/data"


def test_references_are_replaced_by_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = made()
    secret.token, secret.nats.password, secret.consul_token = "mesh", "pass", "acl"
    path = write_spec(tmp_path / "spec.json", secret)
    assert not any(word in path.read_text() for word in ('"mesh"', '"pass"', '"acl"'))
    assert load_spec(str(path)) == secret
    monkeypatch.setenv("ACL", "from-env")
    path.write_text(path.read_text().replace(f"file:{tmp_path}/spec.consul_token", "env:ACL"))
    path.write_text(path.read_text().replace(f"file:{tmp_path}/spec.password", "env:ACL"))
    spec = load_spec(str(path))
    assert (spec.consul_token, spec.nats.password) == ("from-env", "from-env")
    assert "ACL" not in os.environ  # the variables are removed for child processes


@pytest.mark.parametrize("reference", ["hunter2", "env:", "file:", "env:NOBODY_SETS_THIS", "file:/none"])
def test_a_secret_instead_of_a_reference_is_rejected(tmp_path: Path, reference: str) -> None:
    path = write_spec(tmp_path / "spec.json", made())
    path.write_text(path.read_text().replace("{", f'{{"token": "{reference}", ', 1))
    with pytest.raises(SpecError, match="token: ") as refused:
        load_spec(str(path))
    assert "hunter2" not in str(refused.value)


def test_names_derive_from_the_spec() -> None:
    who, again = identity(made()), identity(made())
    assert who.registration == "run-01/inference-3"
    assert who.event_source == "inference-worker/inference-3"
    assert (who.work_stream, who.trajectory_subject) == ("WORK_run-01", "rollout.traj.run-01")
    assert who.process != again.process


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "is not a worker spec"),
        ("{}", "has no `worker_id`"),
        ('{"worker_id": 1.5}', "is not a worker spec"),
        (
            '{"worker_id": "a", "run_id": "b", "nats_url": "c", "consul_address": "d", "kind": "chef"}',
            "has the unknown kind `chef`",
        ),
    ],
)
def test_the_error_for_an_invalid_file_names_the_problem(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=what):
        load_spec(str(path), kinds=WORKERS)


def test_a_missing_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_WORKER_SPEC", raising=False)
    with pytest.raises(SpecError, match="ROLLOUT_WORKER_SPEC is not set"):
        load_spec()
    with pytest.raises(SpecError, match="can't read"):
        load_spec(str(tmp_path / "none.json"))


def test_sync_mode_is_deterministic_by_default() -> None:
    assert is_deterministic(RunConfig(mode="sync"))
    assert not is_deterministic(RunConfig(mode="async"))
    assert not is_deterministic(RunConfig(mode="sync", deterministic=False))
