"""A job without a model (`rollout_testing.sim`), for tests of everything except models. It starts
in a second."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mesh import ROOT, Mesh, describe, pages

from rollout.buffer.v1 import buffer_pb2
from rollout.run.v1 import run_pb2
from rollout_testing.sim import journal, policy
from rollout_workers.environments.episode import sample_seed

SEED, ROWS, GROUPS, SAMPLES = 11, 30, 4, 3
UNAVAILABLE = 69
CALL_TOKENS = 90
"""Most tokens of a turn with a call."""
TURN_SECONDS = 10
"""The deadline of a turn, which only a process that hangs exceeds."""

_CONFIG = """
name = "sim"
seed = {seed}
mode = "{mode}"

[model]
path = "model"
chat_template = {chat}

[data]
train = "train.jsonl"

[sampling]
group_size = {samples}
max_tokens = {tokens}

{scores}
[algorithm.{algorithm}]

[train]
steps = {steps}
groups_per_step = {groups}
learning_rate = 1e-3

[engine]
slots = 12
max_model_len = {context}
workers = {workers}

[limits]
group_attempts = {attempts}
worker_restarts = 1000
stall_seconds = {stall}

[staleness]
max_steps = {staleness}

[snapshot]
every_steps = {snapshot}
keep_payloads = {keep}

[weights]
way = "{way}"

[recovery]
old_lineage = "{old_lineage}"
"""

_REWARD = '''"""The share of letters. Row 7 can't be scored; row 13 not the first time that anybody tries."""

import pathlib

TRIED = pathlib.Path(__file__).with_name("tried")


def letters(samples):
    for sample in samples:
        if sample.prompt == "row 7:" or (sample.prompt == "row 13:" and not TRIED.exists()):
            TRIED.touch()
            raise RuntimeError(f"{sample.prompt} can't be scored")
    return [sum(c.isalpha() for c in sample.completion) / max(1, len(sample.completion)) for sample in samples]
'''


_SCORED = """[reward]
plugin = "reward.py:letters"
retries = 0
"""

_EXTERNAL = """[environment]
kind = "external"
"""

_PLAYED = """[environment]
kind = "python"
path = "game.py:{game}"
args = {{ boxes = {boxes}, helpers = {helpers} }}
max_turns = 8
turn_timeout_seconds = {turn_seconds}
"""

_TOOLS = """[environment]
kind = "tools"
args = {{ tools = ["{tool}"] }}
max_turns = 4
tool_timeout_seconds = {turn_seconds}
"""

_FLAT = """

_letters = letters


def letters(samples):
    return [0.5 if int(sample.prompt[4:-1]) % 3 == 0 else score for sample, score in zip(samples, _letters(samples))]
"""


@dataclass(frozen=True)
class Job:
    """A run without a model. It passes over its few rows several times."""

    folder: Path
    steps: int = 20
    mode: str = "sync"
    staleness: int = 0
    workers: int = 2
    snapshot: int = 5
    keep_payloads: bool = False
    old_lineage: str = "keep"
    way: str = "auto"
    """The path of weights to the workers."""
    draws: bool = False
    """Dynamic sampling, with a reward that is equal for all answers to every third prompt."""
    turns: bool = False
    """Episodes of several turns (`game.py`) in place of a reward. No row fails each time."""
    agents: bool = False
    """An agent plays the samples in sessions of the gateway."""
    tool: str = ""
    """The plugin of a tool with the numbers `a` and `b`, which the policy calls before it
    answers."""
    boxes: bool = False
    """Every turn of an episode runs a command in a sandbox."""
    stall_seconds: float = 300.0
    """After which a worker without progress restarts."""
    saves: bool = False
    """Episodes can be saved and continued (`game.SavedGame`)."""
    helpers: bool = False
    """Every episode opens one to three child sessions after its first turn."""

    def write(self) -> Path:
        """Write the config and its files to one folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        policy.write_model(self.folder / "model", chat=bool(self.tool))
        rows = [json.dumps({"prompt": f"row {n}:", "answer": str(n)}) for n in range(ROWS)]
        (self.folder / "train.jsonl").write_text("\n".join(rows) + "\n")
        (self.folder / "reward.py").write_text(_REWARD + (_FLAT if self.draws else ""))
        shutil.copyfile(Path(__file__).with_name("game.py"), self.folder / "game.py")
        boxes, helpers = ("true" if on else "false" for on in (self.boxes, self.helpers))
        game = "SavedGame" if self.saves else "Game"
        played = _PLAYED.format(game=game, boxes=boxes, helpers=helpers, turn_seconds=TURN_SECONDS)
        scored = _SCORED + (_TOOLS.format(tool=self.tool, turn_seconds=TURN_SECONDS) if self.tool else "")
        path = self.folder / "job.toml"
        path.write_text(
            _CONFIG.format(
                seed=SEED,
                mode=self.mode,
                samples=SAMPLES,
                steps=self.steps,
                groups=GROUPS,
                workers=self.workers,
                stall=self.stall_seconds,
                staleness=self.staleness,
                snapshot=self.snapshot,
                keep="true" if self.keep_payloads else "false",
                way=self.way,
                old_lineage=self.old_lineage,
                algorithm="dapo" if self.draws else "grpo",
                scores=played if self.turns else _EXTERNAL if self.agents else scored,
                chat="true" if self.tool else "false",
                tokens=CALL_TOKENS if self.tool else 12,
                attempts=100 if self.turns or self.tool else 20 if self.agents else 2,
                context=1024 if self.tool else 256 if self.turns or self.agents else 64,
            )
        )
        return path

    def plan(self, running: Mesh) -> bytes:
        """The lock of the plan."""
        return running.plan(self.write())

    def agree(self, running: Mesh, run: str) -> dict[str, int]:
        """Compare the journals with the ledger."""
        return journals_agree(running, run, self)


def edit(config: Path, **values: object) -> None:
    """Replace values in a written config."""
    lines = config.read_text().splitlines()
    for name, value in values.items():
        lines = [f"{name} = {value}" if line.startswith(f"{name} = ") else line for line in lines]
    config.write_text("\n".join(lines) + "\n")


def sim_mesh(state: Path, shape: str = "all", seconds: float = 0.0, arguments: tuple[str, ...] = (), **environment: str) -> Mesh:
    """Services whose workers have no model. seconds: the longest duration of a sample. arguments:
    additional ones of `rolloutd`."""
    return Mesh(
        state,
        shape,
        arguments=(
            *("--worker-command", f"{sys.executable} -m rollout_testing.sim", "--worker-python", sys.executable),
            *("--buffer-segment-bytes", "8192"),  # small segments, so that snapshots free some
            *arguments,
        ),
        environment={"PYTHONPATH": str(ROOT / "python"), "ROLLOUT_SIM_SECONDS": str(seconds), **environment},
    )


class HasFolder(Protocol):
    """A job of any kind."""

    @property
    def folder(self) -> Path: ...


def submit(running: Mesh, lock: bytes, job: HasFolder) -> str:
    """Start a run of an existing plan."""
    return running.scheduler.CreateRun(run_pb2.CreateRunRequest(lock=lock, base_dir=str(job.folder))).run.run_id


def audited(running: Mesh, run: str, gone: Callable[[], bool] = lambda: False) -> dict:
    """The output of `rollout audit` for a run. Fails if the audit reports a problem. gone: whether
    a service was killed in the meantime, so that the audit may be unavailable."""
    command = [str(ROOT / "bin" / "rollout"), "--format", "json", "audit", run]
    if running.namespace:
        command += ["--insecure"]
    if running.shape == "all":
        command += ["--state-dir", str(running.state)]
    else:
        daemon = running.daemon()
        command += ["--consul", str(daemon["consul"]), "--token-file", str(daemon["token_file"])]
        for flag, file in zip(("--ca-file", "--cert-file", "--key-file"), running.certificates(), strict=False):
            command += [flag, file]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
    for _ in range(60):  # not all services know a restarted service yet
        if outcome.returncode != UNAVAILABLE or gone():
            break
        time.sleep(0.5)
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if outcome.returncode == UNAVAILABLE and gone():
        return {}
    assert outcome.returncode == 0, f"{outcome.returncode}: {outcome.stdout[-6000:]}{outcome.stderr[-3000:]}"
    return json.loads(outcome.stdout)


def audited_offline(running: Mesh, run: str) -> dict:
    """The audit from databases and the bucket, without the services."""
    command = [str(ROOT / "bin" / "rollout"), "--format", "json", "audit", run, "--config", str(running.config)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, f"{outcome.returncode}: {outcome.stdout[-6000:]}{outcome.stderr[-3000:]}"
    return json.loads(outcome.stdout)


def replay(running: Mesh, run: str, code: int = 0) -> dict:
    """The output of `rollout replay`, with the workers of the services."""
    worker = running.arguments[running.arguments.index("--worker-command") + 1]
    command = [
        str(ROOT / "bin" / "rollout"),
        "--format",
        "json",
        "replay",
        run,
        "--worker",
        worker,
        *(("--config", str(running.config)) if running.config else ("--state-dir", str(running.state))),
    ]
    outcome = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={"HOME": tempfile.gettempdir(), "PATH": "/usr/bin:/bin", **running.environment},
    )
    assert outcome.returncode == code, f"{outcome.returncode}: {outcome.stdout[-3000:]}{outcome.stderr[-3000:]}"
    return json.loads(outcome.stdout)


def finish(running: Mesh, run: str) -> str:
    """Wait for the end of a run, which must succeed. Returns its last weights digest."""
    status = None
    for seen in running.watch(run):
        status = seen
    assert status is not None
    assert status.run.state == run_pb2.RUN_STATE_SUCCEEDED, describe(status)
    return status.run.weights_digest


def journals_agree(running: Mesh, run: str, job: Job) -> dict[str, int]:
    """Compare the journals of the learner and the engines with the ledger, independent of the
    audit.

    Each committed step must equal the learner's last step with that number: the same samples and
    the same digest. A sample may be in only one step, and must have been sampled with the weights
    of its receipt.
    """
    directory = running.status(run).run.directory
    trained = journal.read(directory, "learner", running.environment)
    sampled = {
        (r["request"], r["seed"], r["version"], r["digest"]) for r in journal.read(directory, "inference", running.environment)
    }
    steps = [s for page in pages(running.buffer.ListSteps, buffer_pb2.ListStepsRequest(run_id=run)) for s in page.steps]
    digests = {step.step: step.weights_digest for step in steps}
    used: dict[str, int] = {}
    receipts = _receipts(running, run)
    for step in steps:
        batch = running.buffer.GetBatch(buffer_pb2.GetBatchRequest(run_id=run, step=step.step)).batch
        names = [f"{ref.key.epoch}/{ref.key.index}/{ref.key.sample}" for ref in batch.samples]
        made = [record for record in trained if record["step"] == step.step]
        assert made, f"step {step.step} is committed, but the learner did not make it"
        for record in made:
            assert record["samples"] == names, f"step {step.step}: trained on {record['samples']}, the ledger has {names}"
            assert record["digest"] == step.weights_digest, (
                f"step {step.step}: made {record['digest']}, ledger {step.weights_digest}"
            )
        for ref, name in zip(batch.samples, names, strict=True):
            assert used.setdefault(name, step.step) == step.step, (
                f"{name} was trained by step {used[name]} and by step {step.step}"
            )
            if job.turns or job.agents or job.tool:
                continue  # turns have their own weights, which `recording.ids_agree` compares
            key = ref.key
            version = receipts[name]
            digest = digests.get(version) or _initial(job)
            seed = sample_seed(SEED, key.epoch, key.index, key.sample)
            request = f"{key.epoch}/{key.index}/{key.attempt}"
            assert (request, seed, version, digest) in sampled, (
                f"{name}: no engine recorded that it sampled this with version {version}"
            )
    left_out = sum(step.excluded for step in steps)
    for step in steps:
        assert step.groups + (0 if job.draws else step.excluded) == GROUPS, f"step {step.step}: {step}"
    assert len(used) == sum(step.groups for step in steps) * SAMPLES, f"{len(used)} samples in {len(steps)} steps"
    return {"steps": len(steps), "trained": len(used), "sampled": len(sampled), "steps_made": len(trained), "excluded": left_out}


def _receipts(running: Mesh, run: str) -> dict[str, int]:
    """The weights version of each sample."""
    out: dict[str, int] = {}
    for rows in running.buffer.ExportLedger(buffer_pb2.ExportLedgerRequest(run_id=run)):
        for sample in rows.samples:
            key = sample.ref.key
            out[f"{key.epoch}/{key.index}/{key.sample}"] = sample.receipt_version
    return out


def _initial(job: Job) -> str:
    return policy.digest(policy.read(job.folder / "model")).root


def stop(running: Mesh) -> None:
    """Kill all processes at once, also stopped ones."""
    for process in running.processes.values():
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait(10)
