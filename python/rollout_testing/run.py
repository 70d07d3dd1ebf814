"""Creates the parts of a run that workers use: spec, streams, work items, and trajectories."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nats
from google.protobuf import json_format
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StreamConfig
from nats.js.errors import NotFoundError

from rollout import names
from rollout.config.v1.run_config_pb2 import RunConfig
from rollout.run.v1.run_pb2 import PromptGroup, WorkerSpec
from rollout.trajectory.v1.trajectory_pb2 import Trajectory, TrajectoryBatch, TrajectoryEnvelope
from rollout_testing.credential import peer_token, services_key
from rollout_testing.daemon import REPOSITORY, Daemon
from rollout_workers.environments.episode import sample_seed
from rollout_workers.worker.spec import secrets_of

RUN = "run-test"
EXAMPLE = REPOSITORY / "examples" / "addition"


@dataclass(frozen=True, slots=True)
class Example:
    """The addition example in a folder: a small model with random weights, and the sums."""

    model: Path
    data: Path

    @classmethod
    def prepare(cls, folder: Path, *, layers: int = 1, hidden: int = 32) -> Example:
        """Write the folder; imports torch."""
        names = runpy.run_path(str(EXAMPLE / "prepare.py"))
        names["write_model"](folder / "model", layers=layers, hidden=hidden)
        names["write_data"](folder / "data")
        return cls(folder / "model", folder / "data")

    def rows(self, count: int, start: int = 0) -> list[bytes]:
        """Training rows, as JSON."""
        lines = (self.data / "train.jsonl").read_bytes().splitlines()
        return lines[start : start + count]


def config(example: Example, algorithm: str = "grpo", **changes: Any) -> RunConfig:
    """The addition example with every default written out. changes: top-level tables that replace
    or extend these."""
    tables: dict[str, Any] = {
        "name": "addition-test",
        "seed": 1,
        "mode": "sync",
        "deterministic": False,
        "model": {"path": str(example.model), "dtype": "float32", "chat_template": False},
        "data": {
            "train": str(example.data / "train.jsonl"),
            "eval": str(example.data / "eval.jsonl"),
            "prompt_field": "prompt",
            "answer_field": "answer",
            "shuffle": True,
        },
        "sampling": {
            "group_size": 4 if algorithm == "grpo" else 1,
            "max_tokens": 8,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
        },
        "reward": {
            "plugin": f"{EXAMPLE / 'reward.py'}:exact_match",
            "timeout_seconds": 10.0,
            "retries": 1,
        },
        "algorithm": {algorithm: {}},
        "train": {
            "steps": 10,
            "groups_per_step": 8,
            "learning_rate": 1e-3,
            "schedule": "constant",
            "warmup_steps": 0,
            "weight_decay": 0.0,
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-8,
            "max_grad_norm": 1.0,
            "tokens_per_microbatch": 16384,
            "threads": 1,
            "deliver_every_steps": 1,
        },
        "engine": {"kind": "transformers", "workers": 1, "slots": 32, "max_model_len": 64, "threads": 1},
        "staleness": {"max_steps": 0},
        "completions": {"per_step": 4, "every_steps": 1},
    }
    for name, change in changes.items():
        tables[name] = {**tables.get(name, {}), **change} if isinstance(change, dict) else change
    return json_format.ParseDict(tables, RunConfig())


def spec(daemon: Daemon, run_config: RunConfig, *, kind: str = "inference", number: int = 0, run: str = RUN,
         directory: Path | None = None, incarnation: int = 1) -> WorkerSpec:  # fmt: skip
    """The spec of a worker of ``run``. directory: of the run."""
    made = WorkerSpec(
        worker_id=f"{kind}-{number}",
        kind=kind,
        run_id=run,
        base_dir="/",
        run_directory=str(directory or daemon.state / "runs" / run),
        nats_url=daemon.nats_url,
        nats_token=daemon.token,
        consul_address=daemon.consul,
        consul_token=daemon.token,
        token=daemon.token,
        peer_token=peer_token(daemon.token, run, incarnation),
        services_key=services_key(daemon.token),
        incarnation=incarnation,
        threads=1,
    )
    made.plan.format = 1
    made.plan.config.CopyFrom(run_config)
    return made


def prompt_group(position: int, row_json: bytes, *, group_size: int = 4, seed: int = 1, min_version: int = 0,
                 attempt: int = 0, run: str = RUN) -> PromptGroup:  # fmt: skip
    """A group of the first epoch, with the seeds of the scheduler."""
    return PromptGroup(
        run_id=run,
        epoch=0,
        index=position,
        attempt=attempt,
        row=position,
        row_json=row_json,
        group_size=group_size,
        seeds=[sample_seed(seed, 0, position, sample) for sample in range(group_size)],
        min_version=min_version,
        position=position,
    )


class RunStreams:
    """The streams of a run, with the settings of docs/wire.md, and the calls of the scheduler and
    the buffer."""

    def __init__(self, client: Client, run: str = RUN) -> None:
        self.client, self.run = client, run
        self.js: JetStreamContext = client.jetstream()

    @classmethod
    async def open(cls, daemon: Daemon, run: str = RUN) -> RunStreams:
        """Connect, and create the missing streams."""
        self = cls(await nats.connect(daemon.nats_url, token=daemon.token), run)
        await self._ensure(names.work_stream(run), names.work_subject(run), names.WORKERS_CONSUMER, 4.0)
        await self._ensure(names.traj_stream(run), names.traj_subject(run), names.BUFFER_CONSUMER, 30.0)
        await self._ensure(names.EVENT_STREAM, names.EVENT_SUBJECTS, names.STORAGE_CONSUMER, 30.0, RetentionPolicy.LIMITS)
        return self

    async def issue(self, groups: Sequence[PromptGroup], headers: dict[str, str] | None = None) -> None:
        """Publish work like the scheduler."""
        for group in groups:
            name = f"{group.run_id}/{group.epoch}/{group.index}/{group.attempt}/1"
            given = {**(headers or {}), "Nats-Msg-Id": name}
            await self.js.publish(names.work_subject(self.run), group.SerializeToString(), headers=given)

    async def collect(self, samples: int, timeout: float = 60.0) -> list[TrajectoryEnvelope]:
        """The next ``samples`` trajectories, which are acknowledged like by the buffer."""
        puller = await self.js.pull_subscribe_bind(names.BUFFER_CONSUMER, stream=names.traj_stream(self.run))
        envelopes: list[TrajectoryEnvelope] = []
        while len(envelopes) < samples:
            for message in await puller.fetch(1, timeout=timeout):
                envelopes.extend(TrajectoryBatch.FromString(message.data).trajectories)
                await message.ack()
        await puller.unsubscribe()
        return envelopes

    async def work_left(self) -> int:
        """The number of work items that are not acknowledged."""
        return (await self.js.stream_info(names.work_stream(self.run))).state.messages

    async def redeliver_after(self, seconds: float) -> None:
        """Set how long a work item stays with a worker that stopped sending progress acks. Items
        that are given back go to another worker at once."""
        info = await self.js.consumer_info(names.work_stream(self.run), names.WORKERS_CONSUMER)
        await self.js.add_consumer(names.work_stream(self.run), replace(info.config, ack_wait=seconds))

    async def close(self) -> None:
        await self.client.close()

    async def _ensure(self, stream: str, subject: str, consumer: str, ack_wait: float,
                      retention: RetentionPolicy = RetentionPolicy.WORK_QUEUE) -> None:  # fmt: skip
        try:
            await self.js.stream_info(stream)
        except NotFoundError:
            await self.js.add_stream(StreamConfig(name=stream, subjects=[subject], retention=retention))
            await self.js.add_consumer(
                stream,
                ConsumerConfig(
                    durable_name=consumer,
                    ack_policy=AckPolicy.EXPLICIT,
                    ack_wait=ack_wait,
                    max_deliver=-1,
                    max_ack_pending=65536,
                    max_waiting=4096,
                ),
            )


def by_key(envelopes: Sequence[TrajectoryEnvelope]) -> dict[tuple[int, int, int, int], bytes]:
    """Payloads by (epoch, index, attempt, sample)."""
    keys = [envelope.header.key for envelope in envelopes]
    return {(k.epoch, k.index, k.attempt, k.sample): e.payload for k, e in zip(keys, envelopes, strict=True)}


def trajectory(envelope: TrajectoryEnvelope) -> Trajectory:
    """The parsed payload."""
    return Trajectory.FromString(envelope.payload)


def write_spec(path: Path, made: WorkerSpec) -> Path:
    """Write the spec like the scheduler, with secrets in files next to it."""
    written = WorkerSpec.FromString(made.SerializeToString())
    for message, name in secrets_of(written):
        if secret := getattr(message, name):
            secret_file = path.with_suffix(f".{name}")
            secret_file.write_text(secret)
            secret_file.chmod(0o600)
            setattr(message, name, f"file:{secret_file}")
    path.write_text(json.dumps(json_format.MessageToDict(written, preserving_proto_field_name=True)))
    path.chmod(0o600)
    return path
