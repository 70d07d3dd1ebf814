"""``make check-schemathesis``: requests that Schemathesis generates from /openapi.json, with a
valid key, to a gateway whose workers have no model and start in a second (`rollout_testing.sim`).
Prints how many were sent to each endpoint, and with which results. Fails if a response is a server
error, or if an endpoint got no request."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from mesh import ENDED, ROOT, Mesh, until
from sim import Job, sim_mesh, stop, submit

HERE = Path(__file__).parent
PROGRAM = ROOT / ".tools" / "clients" / "schemathesis" / "bin" / "schemathesis"
EXAMPLES = 5
"""Requests to an endpoint before the next one gets some. All get more until the time is over."""


def fuzzed(seconds: float, folder: Path) -> int:
    """Returns the exit code: 0 if every endpoint got requests and none was a server error."""
    running = sim_mesh(folder / "state")
    running.state.mkdir()
    job = Job(folder / "job", steps=100_000, agents=True)
    try:
        run = submit(running.start(), job.plan(running), job)
        url, key = str(running.daemon()["gateway"]), create_key(running)
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
            until(lambda: client.get("/v1/models").raise_for_status().json()["data"], "a worker", 600)
            operations = operations_of(client.get("/openapi.json").raise_for_status().json())
            made = client.post("/v1/responses", json={"model": "sim", "input": "count", "max_output_tokens": 4})
            response = made.raise_for_status().json()["id"]
        log = folder / "requests.jsonl"
        log.touch()
        environment = {"FUZZED_MODEL": "sim", "FUZZED_RESPONSE": response, "FUZZED_LOG": str(log)}
        with progress(log):
            done = schemathesis(url, key, seconds, folder, environment)
        assert running.status(run).run.state not in ENDED
    finally:
        stop(running)
    return report(operations, results(log), done)


def create_key(running: Mesh) -> str:
    """An API key that may call every endpoint, made as a user does."""
    command = [ROOT / "bin" / "rollout", "keys", "create", "fuzzed", "--scope", "session", "--state-dir", str(running.state)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def schemathesis(url: str, key: str, seconds: float, folder: Path, environment: dict[str, str]) -> int:
    """Runs Schemathesis. Its output goes to a file, of which the end is printed if it failed."""
    command = [str(PROGRAM), "run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {key}"]
    command += ["--phases", "fuzzing", "--checks", "not_a_server_error", "--continue-on-failure", "--max-failures", "50"]
    command += ["--max-time", str(int(seconds)), "--max-examples", str(EXAMPLES), "--no-shrink", "--no-color"]
    command += ["--request-timeout", "60", "--suppress-health-check", "all", "--warnings", "off", "--workers", "2"]
    variables = os.environ | environment | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE)}
    output = folder / "schemathesis.txt"
    with output.open("w") as file:
        done = subprocess.run(command, cwd=folder, check=False, stdout=file, stderr=subprocess.STDOUT, env=variables)
    if done.returncode:
        print("\n".join(output.read_text().splitlines()[-200:]))
    return done.returncode


@contextmanager
def progress(log: Path) -> Iterator[None]:
    """Prints every 30 s how many requests were sent."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(30):
            print(f"{len(log.read_text().splitlines())} requests", flush=True)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def operations_of(document: dict) -> list[str]:
    """The endpoints of an OpenAPI document, such as ``POST /v1/chat/completions``."""
    return [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]


def results(log: Path) -> dict[str, Counter[int]]:
    """The number of responses with each status, by endpoint."""
    out: dict[str, Counter[int]] = defaultdict(Counter)
    for line in log.read_text().splitlines():
        sent = json.loads(line)
        out[sent["operation"]][sent["status"]] += 1
    return out


def report(operations: list[str], found: dict[str, Counter[int]], code: int) -> int:
    """Prints the table, and returns the exit code."""
    print("| endpoint | requests | 2xx | 4xx | 5xx |\n|---|---|---|---|---|")
    for operation in sorted(operations):
        statuses = found.get(operation, Counter())
        kinds = [sum(n for status, n in statuses.items() if status // 100 == hundred) for hundred in (2, 4, 5)]
        print(f"| {operation} | {statuses.total()} | {kinds[0]} | {kinds[1]} | {kinds[2]} |")
    missing = [operation for operation in operations if not found.get(operation)]
    failed = sum(n for statuses in found.values() for status, n in statuses.items() if status >= 500)
    total = sum(statuses.total() for statuses in found.values())
    print(f"{total} requests to {len(operations)} endpoints; server errors: {failed}; Schemathesis exited with {code}")
    if missing:
        print(f"no request was sent to {', '.join(missing)}: run it for longer")
    return int(bool(code or missing or failed))
