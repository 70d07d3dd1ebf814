"""The spec and the identity of a worker process."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from google.protobuf import json_format

from rollout import inputs, names
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.errors import RolloutError
from rollout.plan.v1 import plan_pb2
from rollout.run.v1.run_pb2 import NatsAccess, WorkerSpec
from rollout.secret import SecretError, read_secret

SPEC_VARIABLE = "ROLLOUT_WORKER_SPEC"


class SpecError(RolloutError):
    """The spec file is missing or invalid."""

    reason: ClassVar[str] = "WORKER_SPEC_INVALID"


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a worker process, and the names that derive from it.

    rank: of this process within the worker; rank 0 serves and registers.

    nonce: secret of this launch, from the spec. It is never logged or registered; registrations
    carry :meth:`proof`.

    process: 16 random hex digits, which distinguish a restarted worker from its predecessor.
    """

    run: str
    worker: str
    kind: str  # a key of rollout_workers.kinds.WORKERS
    incarnation: int
    process: str = field(default_factory=lambda: secrets.token_hex(8))
    rank: int = 0
    nonce: str = field(default="", repr=False)
    reserved: bool = False  # for evaluations

    def proof(self, address: str) -> str:
        """Keyed hash that shows that the process at an address (host:port) was launched with the
        nonce (docs/wire.md)."""
        message = f"rollout.worker.v1\n{self.worker}\n{self.rank}\n{address}"
        return hmac.new(self.nonce.encode(), message.encode(), hashlib.sha256).hexdigest()

    @property
    def service(self) -> str:
        """The worker's service name in the registry: ``inference-worker``."""
        return names.worker_service(self.kind)

    @property
    def event_source(self) -> str:
        """The worker's name in events: ``inference-worker/inference-0``."""
        return f"{self.service}/{self.worker}"

    @property
    def registration(self) -> str:
        """The worker's service id in the registry: ``<run>/<worker>``."""
        return f"{self.run}/{self.worker}"

    @property
    def work_stream(self) -> str:
        return names.work_stream(self.run)

    @property
    def trajectory_stream(self) -> str:
        return names.traj_stream(self.run)

    @property
    def trajectory_subject(self) -> str:
        return names.traj_subject(self.run)

    @property
    def idle_subject(self) -> str:
        """The subject on which idle workers request work
        (``rollout_workers.inference.sharing``)."""
        return names.idle_subject(self.run)

    @property
    def event_subject(self) -> str:
        return names.run_event_subject(self.run)


def load_spec(path: str | None = None, *, kinds: Collection[str] = ()) -> WorkerSpec:
    """Read the spec from ``path``, or else from the file that ``ROLLOUT_WORKER_SPEC`` names, and
    replace references to secrets by the secrets. The environment variables of the secrets are
    removed, so that child processes do not inherit them.

    kinds: the accepted kinds; empty: all. Raises :class:`SpecError`.
    """
    path = path or os.environ.get(SPEC_VARIABLE, "")
    if not path:
        raise SpecError(f"{SPEC_VARIABLE} is not set", fix="workers are started by the scheduler; see docs/wire.md")
    try:
        spec = json_format.Parse(Path(path).read_bytes(), WorkerSpec(), ignore_unknown_fields=True)
    except OSError as error:
        raise SpecError(f"can't read {path}: {error.strerror}") from error
    except json_format.ParseError as error:
        raise SpecError(f"{path} is not a worker spec: {error}") from error
    for name in ("worker_id", "run_id", "nats_url", "consul_address"):
        if not getattr(spec, name):
            raise SpecError(f"{path} has no `{name}`")
    if kinds and spec.kind not in kinds:
        raise SpecError(f"{path} has the unknown kind `{spec.kind}`", fix=f"the kinds are {', '.join(kinds)}")
    try:
        _resolve_secrets(spec)
    except SecretError as error:
        raise SpecError(f"{path}: {error}") from error
    return spec


def _resolve_secrets(spec: WorkerSpec) -> None:
    variables: set[str] = set()
    for message, name in secrets_of(spec):
        reference: str = getattr(message, name)
        setattr(message, name, read_secret(reference, name))
        kind, _, rest = reference.partition(":")
        if kind == "env":
            variables.add(rest)
    for variable in variables:
        del os.environ[variable]


def secrets_of(spec: WorkerSpec) -> list[tuple[WorkerSpec | NatsAccess, str]]:
    """The fields that contain secrets or references to secrets: message and field name."""
    fields: list[tuple[WorkerSpec | NatsAccess, str]] = [
        (spec, "nats_token"),
        (spec, "consul_token"),
        (spec, "token"),
        (spec, "peer_token"),
    ]
    if spec.HasField("nats"):
        fields += [(spec.nats, "password"), (spec.nats, "nkey_seed")]
    return fields


def identity(spec: WorkerSpec) -> Identity:
    """The identity of this process. Each call draws another ``process``."""
    return Identity(spec.run_id, spec.worker_id, spec.kind, spec.incarnation, nonce=spec.nonce, reserved=spec.reserved)


def resolve(spec: WorkerSpec, path: str) -> str:
    """The absolute path of a file or folder that the plan names. A model of the hub is in the run's
    folder of inputs."""
    for item in spec.plan.inputs:
        if item.revision and item.path.startswith(path + "/"):
            return inputs.model(_inputs(spec), path, item.revision)
    return os.path.abspath(os.path.join(spec.base_dir, path))


def suite_file(spec: WorkerSpec, suite: str) -> str:
    """The file of a suite's rows (JSON Lines)."""
    config = spec.plan.config.eval.suites[suite]
    path = f"eval.suites.{suite}.baseline" if config.baseline else config.data
    if not path:
        return held_out_file(spec)
    for item in spec.plan.inputs:
        if item.role == plan_pb2.INPUT_ROLE_SUITE_DATA and os.path.normpath(item.path) == os.path.normpath(path):
            return _rows_file(spec, item)
    return resolve(spec, path)


def held_out_file(spec: WorkerSpec) -> str:
    """The file of the plan's held-out rows (JSON Lines); "" if it has none."""
    for item in spec.plan.inputs:
        if item.role == plan_pb2.INPUT_ROLE_EVAL_DATA:
            return _rows_file(spec, item)
    return resolve(spec, spec.plan.config.data.eval) if spec.plan.config.data.eval else ""


def _rows_file(spec: WorkerSpec, item: plan_pb2.Input) -> str:
    return inputs.rows(_inputs(spec), item.digest) if item.sources else resolve(spec, item.path)


def _inputs(spec: WorkerSpec) -> str:
    return os.path.join(spec.run_directory, inputs.FOLDER)


def model_directory(spec: WorkerSpec) -> str:
    """The folder of the plan's model."""
    return resolve(spec, spec.plan.config.model.path)


def is_deterministic(config: RunConfig) -> bool:
    """Whether equal inputs must give equal bits: as configured, by default only in sync mode."""
    if config.HasField("deterministic"):
        return config.deterministic
    return config.mode != "async"
