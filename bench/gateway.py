"""Measures what the gateway adds to a call of an inference worker, next to SMG 1.13 and the proxy
of LiteLLM 1.109.

    make bench-gateway ARGS="[--streams 1,64,512] [--rounds 5] [--gateways rollout,smg,litellm] [--check]"

A policy (`cmd/internal/scripted`) samples at a fixed pace, so that what differs between two calls
is due to the path. `cmd/internal/gatewayload` is all clients: each sends chats of four turns, one
request after another, as a stream of server-sent events. Each round measures the path without and
then with the gateway:

- rollout: gRPC calls of the worker, then HTTP through a `rolloutd` with all services, with a
  session for each chat, whose ledger (SQLite) has the turn before the client receives the end. The
  workers are simulated (`cmd/internal/fleet`).
- smg, litellm: HTTP calls of a policy with OpenAI's API, then the same through the gateway. They
  have no sessions.

Three latencies are measured of each request. *first*: from the request to the first token. *token*:
of each later token, from the policy's call that sends it to the client's that reads it; the text of
a token is the time at which it was sent. *whole*: from the request to the end of the stream.
"Added" is a percentile with the gateway minus the same percentile of the calls without it in the
same round; the table has the median over the rounds, and every round is printed. Processor time is
that of all processes of the gateway, divided by the tokens.

*abort* is the time from a client's disconnect to the end of the request's context in the policy.

With `--check` the exit code is 1 if the bars are missed: at most 0.3 ms added to the median token,
less than the peers at 64 and 512 streams, and aborts within 100 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from mesh import ROOT, Mesh, describe, until
from record import recorded

from rollout.run.v1 import run_pb2
from rollout_testing.sim import policy

MOST_ADDED = 300.0  # microseconds
MOST_ABORT = 100.0  # milliseconds
TOKENS = 32
LEVELS = {1: (10, 12), 64: (20, 4), 512: (50, 2)}
"""By streams: milliseconds between two tokens, and requests of each stream in a round."""
KINDS = ("first", "token", "whole")
PERCENTILES = ("p50", "p95", "p99")
PEERS = ROOT / ".tools" / "gateways" / "bin"
TOOLS = ROOT / ".cache"

_CONFIG = """
name = "gateway"

[environment]
kind = "external"

[model]
path = "model"

[data]
train = "train.jsonl"

[sampling]
group_size = 2
max_tokens = 64

[algorithm.grpo]

[train]
steps = 1000
groups_per_step = 1
learning_rate = 1e-6

[engine]
slots = 64
max_model_len = 1024
"""

_STAND_IN = """trap 'exit 0' TERM
printf '%s %s\\n' "$$" "$ROLLOUT_WORKER_SPEC" 1<> "$ROLLOUT_FLEET"
read -r end
"""


@dataclass
class Route:
    """A gateway and the policy behind it. aborts: the file where the policy records them."""

    name: str
    direct: str
    through: str
    model: str
    aborts: Path
    pids: list[int]
    policy: int
    sessions: bool = False

    def load(self, target: str, streams: int) -> dict[str, Any]:
        pace, requests = LEVELS.get(streams, (50, 2))
        watched = f"gateway={','.join(map(str, family(self.pids)))};policy={self.policy}"
        return load(
            *("--target", target, "--model", self.model, "--streams", streams, "--tokens", TOKENS),
            *("--pace", f"{pace}ms", "--requests", requests, "--watch", watched),
            *(["--sessions"] if self.sessions else []),
        )

    def disconnect(self, times: int) -> list[float]:
        """Milliseconds from a client's disconnect to the abort."""
        before = len(self.aborts.read_text().split())
        closed = load("--target", self.through, "--model", self.model, "--tokens", 1000, "--pace", "20ms", "--close", times)[
            "closed"
        ]
        aborted = [int(line) for line in self.aborts.read_text().split()[before:]]
        if len(aborted) != len(closed):
            raise AssertionError(f"{self.name}: {len(aborted)} of {len(closed)} requests were aborted")
        return [(at - since) / 1e6 for since, at in zip(closed, aborted, strict=True)]


def load(*arguments: object) -> Any:
    done = subprocess.run([str(TOOLS / "gatewayload"), *map(str, arguments)], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)


def family(pids: list[int]) -> list[int]:
    """The processes and their descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = list(pids)
    for pid in found:
        found += children.get(pid, [])
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serves(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@contextlib.contextmanager
def process(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own session, which ends with the block."""
    with log.open("ab") as out:
        running = subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, cwd=log.parent, env={**os.environ, **(environment or {})}
        )
    try:
        yield running
    except BaseException:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGTERM)
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait(20)


@contextlib.contextmanager
def rollout(folder: Path) -> Iterator[Route]:
    job = folder / "job"
    job.mkdir(parents=True)
    policy.write_model(job / "model")
    rows = (json.dumps({"prompt": f"row {n}", "answer": str(n)}) for n in range(64))
    (job / "train.jsonl").write_text("\n".join(rows) + "\n")
    (job / "stand-in.sh").write_text(_STAND_IN)
    (job / "job.toml").write_text(_CONFIG)
    fifo, aborts, worker = folder / "workers", folder / "aborts", f"127.0.0.1:{free_port()}"
    os.mkfifo(fifo, 0o600)
    command = [str(TOOLS / "fleet"), "--fifo", str(fifo), "--address", worker, "--aborts", str(aborts)]
    mesh = Mesh(
        folder / "state",
        arguments=("--worker-command", f"/bin/sh {job / 'stand-in.sh'}", "--worker-python", sys.executable),
        environment={"PYTHONPATH": str(ROOT / "python"), "ROLLOUT_FLEET": str(fifo)},
    )
    with process(command, folder / "fleet.log") as fleet:
        try:
            mesh.start()
            lock = mesh.plan(job / "job.toml")
            run = mesh.scheduler.CreateRun(run_pb2.CreateRunRequest(lock=lock, base_dir=str(job))).run.run_id
            url = str(mesh.daemon()["gateway"])
            until(lambda: run in urlopen(url + "/v1/models", timeout=5).read().decode(), "the gateway to serve the run", 60)
            pid = mesh.processes["all"].pid
            yield Route("rollout", worker, url, run, aborts, [pid], fleet.pid, sessions=True)
        except BaseException:
            with contextlib.suppress(Exception):
                print(describe(mesh.status(run)), mesh.log("all"), file=sys.stderr)
            raise
        finally:
            for running in mesh.processes.values():
                os.killpg(running.pid, signal.SIGKILL)  # its state is discarded
                running.wait(30)


@contextlib.contextmanager
def openai(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A policy with OpenAI's API."""
    address = f"127.0.0.1:{free_port()}"
    command = [str(TOOLS / "gatewayload"), "--serve", address, "--aborts", str(folder / "aborts")]
    with process(command, folder / "policy.log") as running:
        until(lambda: serves(f"http://{address}/health"), "the policy to serve", 30)
        yield f"http://{address}", running


@contextlib.contextmanager
def smg(folder: Path) -> Iterator[Route]:
    folder.mkdir()
    with openai(folder) as (url, served):
        port = free_port()
        command = [str(PEERS / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", url]
        command += ["--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(free_port())]
        with process(command, folder / "smg.log") as gateway:
            at = f"http://127.0.0.1:{port}"
            ready(at)
            yield Route("smg", url, at, "scripted", folder / "aborts", [gateway.pid], served.pid)


@contextlib.contextmanager
def litellm(folder: Path) -> Iterator[Route]:
    folder.mkdir()
    with openai(folder) as (url, served):
        port = free_port()
        settings = {
            "model_list": [
                {
                    "model_name": "scripted",
                    "litellm_params": {"model": "openai/scripted", "api_base": url + "/v1", "api_key": "none"},
                }
            ],
            "litellm_settings": {"drop_params": True, "num_retries": 0, "telemetry": False},
            "general_settings": {"disable_spend_logs": True},
        }
        (folder / "config.yaml").write_text(json.dumps(settings))
        command = [str(PEERS / "litellm"), "--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--num_workers", str(os.cpu_count()), "--keepalive_timeout", "120"]
        path = f"{PEERS}:{os.environ['PATH']}"
        quiet = {
            "LITELLM_LOG": "ERROR",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "LITELLM_MODE": "PRODUCTION",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PATH": path,
        }
        with process(command, folder / "litellm.log", quiet) as gateway:
            at = f"http://127.0.0.1:{port}"
            ready(at)
            yield Route("litellm", url, at, "scripted", folder / "aborts", [gateway.pid], served.pid)


def ready(url: str) -> None:
    """Wait until a gateway answers a request."""

    why = ""

    def answers() -> bool:
        nonlocal why
        try:
            load("--target", url, "--tokens", 1, "--requests", 1, "--pace", "1ms")
        except AssertionError as error:
            why = str(error)
            return False
        return True

    try:
        until(answers, "the gateway to answer", 300)
    except AssertionError as error:
        raise AssertionError(f"{error}: {why}") from None


GATEWAYS = {"rollout": rollout, "smg": smg, "litellm": litellm}


@dataclass
class Level:
    """The rounds of one gateway at a number of streams."""

    rounds: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, path: Route, streams: int) -> None:
        direct, through = path.load(path.direct, streams), path.load(path.through, streams)
        added = {kind: {p: through[kind][p] - direct[kind][p] for p in PERCENTILES} for kind in KINDS}
        cost = 1e6 * through["cpu"]["gateway"] / through["tokens"]
        self.rounds.append({"direct": direct, "through": through, "added": added, "cpu": cost, "load": os.getloadavg()[0]})
        figures = "  ".join(f"{kind} {'/'.join(f'{added[kind][p] / 1000:.2f}' for p in PERCENTILES)}" for kind in KINDS)
        busy = through["load"] / through["seconds"]
        print(
            f"{streams:4} streams  {path.name:8} added ms p50/p95/p99: {figures}  {cost:6.0f} us a token  clients {busy:.2f}",
            flush=True,
        )

    def added(self, kind: str, percentile: str) -> float:
        return statistics.median(one["added"][kind][percentile] for one in self.rounds)

    def cost(self) -> float:
        return statistics.median(one["cpu"] for one in self.rounds)


def idle(path: Route) -> float:
    """Processor time per second of the gateway without requests."""
    return (
        load(
            *("--target", path.direct, "--tokens", 100, "--requests", 1, "--pace", "30ms", "--watch", f"gateway={path.pids[0]}")
        )["cpu"]["gateway"]
        / 3
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,64,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gateways", default=",".join(GATEWAYS))
    parser.add_argument("--aborts", type=int, default=20, help="disconnects of each gateway")
    parser.add_argument("--check", action="store_true", help="exit with code 1 if a bar is missed")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends all processes
    TOOLS.mkdir(exist_ok=True)
    for tool in ("fleet", "gatewayload"):
        subprocess.run(["go", "build", "-o", str(TOOLS / tool), f"./internal/{tool}"], cwd=ROOT / "cmd", check=True)
    streams = [int(n) for n in given.streams.split(",")]
    names = given.gateways.split(",")
    with recorded("gateway") as kept, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        paths = [stack.enter_context(GATEWAYS[name](Path(folder) / name)) for name in names]
        levels = {(name, n): Level() for n in streams for name in names}
        kept["rounds"] = {f"{name} {n}": level.rounds for (name, n), level in levels.items()}
        kept["idle"] = {path.name: idle(path) for path in paths}
        for n in streams:
            for _ in range(given.rounds):
                for path in paths:
                    levels[path.name, n].measure(path, n)
        kept["aborts"] = {path.name: path.disconnect(given.aborts) for path in paths}
        missed = report(levels, kept, streams)
    return int(given.check and missed > 0)


def report(levels: dict[tuple[str, int], Level], kept: dict[str, Any], streams: list[int]) -> int:
    """Print the medians over the rounds, and return the number of missed bars."""
    print("\nmedians over the rounds, added ms p50/p95/p99")
    print("streams  gateway   first                 token                 whole                 us a token")
    for (name, n), level in levels.items():
        columns = ("/".join(f"{level.added(kind, p) / 1000:.2f}" for p in PERCENTILES) for kind in KINDS)
        print(f"{n:7}  {name:8}  " + "  ".join(f"{column:20}" for column in columns) + f"  {level.cost():6.0f}")
    for name, took in kept["aborts"].items():
        print(f"{name}: abort after a disconnect, ms: median {statistics.median(took):.2f}, largest {max(took):.2f}")
    print("idle, cores: " + ", ".join(f"{name} {cores:.3f}" for name, cores in kept["idle"].items()))
    missed = []
    for n in streams:
        if ("rollout", n) not in levels:
            continue
        ours = {kind: levels["rollout", n].added(kind, "p50") for kind in KINDS}
        if ours["token"] > MOST_ADDED:
            missed.append(f"{n} streams: {ours['token'] / 1000:.2f} ms added to a token")
        for peer in ("smg", "litellm"):
            if n > 1 and (peer, n) in levels and ours["token"] >= levels[peer, n].added("token", "p50"):
                missed.append(f"{n} streams: {peer} adds less to a token")
    if max(kept["aborts"].get("rollout", [0])) > MOST_ABORT:
        missed.append("an abort took more than 100 ms")
    kept["missed"] = missed
    print("bars: " + ("; ".join(missed) if missed else "all met"))
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
