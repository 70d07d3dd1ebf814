"""``make check-clients``: unmodified clients use the gateway, with fixed weights and while they
change. Prints a table of client, case, and result, and writes it to .cache/clients/ENGINE.json."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from counting import problem
from fuzzed import fuzzed
from mesh import ROOT
from served import PYTHON, Served, served

HERE = Path(__file__).parent
TOOLS = ROOT / ".tools" / "clients"
FAST = 0.05
SLOW = 5.0
"""Seconds between two weights versions: of the embedded engine, and of the others. A step takes the
control plane another 50 ms."""


@dataclass(frozen=True)
class Suite:
    """A program that runs the cases of some clients, and prints a JSON object for each."""

    name: str
    command: tuple[str, ...]
    fixed_only: bool = False
    """Whether its results are only meaningful with fixed weights."""

    def run(self, at: Served, seconds: float) -> list[dict[str, object]]:
        arguments = (at.url, at.key, at.model, str(seconds), str(at.folder))
        log = ROOT / ".cache" / "clients" / f"{self.name}.log"
        with log.open("w") as errors:
            done = subprocess.run(
                [*self.command, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, timeout=1800, cwd=HERE
            )
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"c')]
        if done.returncode or not found:
            found.append(
                {"client": self.name, "case": "the program", "times": 0, "error": f"exit code {done.returncode}, see {log}"}
            )
        return found


def python(name: str, environment: str, *, fixed_only: bool = False) -> Suite:
    return Suite(name, (str(TOOLS / environment / "bin" / "python"), str(HERE / "python" / f"{name}_client.py")), fixed_only)


SUITES = (
    python("openai", "agents"),
    python("anthropic", "agents"),
    python("langchain", "agents"),
    python("agents", "agents"),
    Suite("node", ("node", str(HERE / "node" / "client.mjs"))),
    Suite("go", (str(TOOLS / "go" / "clients"),)),
    python("inspect", "inspect"),
    python("lm_eval", "lm-eval", fixed_only=True),
    python("verifiers02", "verifiers-0.2"),
    python("verifiers04", "verifiers-0.4"),
)


@dataclass
class Watch:
    """Requests that run as long as the clients, half of them streamed, whose spans are checked."""

    at: Served
    stop: threading.Event = field(default_factory=threading.Event)
    problems: list[str] = field(default_factory=list)
    completions: int = 0
    changed: int = 0
    """Completions that more than one version sampled."""

    def follow(self, stream: bool) -> None:
        body = {"model": self.at.model, "max_tokens": 200, "temperature": 0, "return_token_ids": True, "stream": stream}
        with httpx.Client(timeout=120, headers={"authorization": f"Bearer {self.at.key}"}) as client:
            while not self.stop.is_set():
                try:
                    response = client.post(f"{self.at.url}/v1/completions", json=body | {"prompt": f"count {self.completions}"})
                    response.raise_for_status()
                    ids, spans = streamed(response.text) if stream else whole(response.json())
                    wrong = problem(ids, spans)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    wrong, spans = f"{type(error).__name__}: {error}", []
                self.completions += 1
                self.changed += len(spans) > 1
                if wrong:
                    self.problems.append(wrong)

    @contextlib.contextmanager
    def running(self) -> Iterator[Watch]:
        threads = [threading.Thread(target=self.follow, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()


def whole(body: dict) -> tuple[list[int], list[dict[str, int]]]:
    return body["choices"][0]["token_ids"], body["choices"][0]["weight_versions"]


def streamed(text: str) -> tuple[list[int], list[dict[str, int]]]:
    """The token ids and spans of a streamed completion."""
    ids: list[int] = []
    spans: list[dict[str, int]] = []
    for event in text.split("\n\n"):
        if event.startswith("data: {"):
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                ids += choice.get("token_ids") or []
                spans = choice.get("weight_versions") or spans
    return ids, spans


def check(engine: str, suites: list[Suite], seconds: float, folder: Path, only: str) -> list[dict[str, object]]:
    """Run the suites with fixed weights, then while they change. only: one of both; empty: both."""
    results: list[dict[str, object]] = []
    for weights in ("fixed", "changing"):
        if only and weights != only:
            continue
        pause = 0.0 if weights == "fixed" else FAST if engine == "transformers" else SLOW
        with served(folder / weights, engine, seconds=pause) as at:
            at.ready()
            watch, began, first = Watch(at), time.monotonic(), at.version()
            with watch.running() if pause else contextlib.nullcontext():
                for suite in suites:
                    if pause and suite.fixed_only:
                        continue
                    for found in suite.run(at, seconds if pause else 0):
                        results.append(found | {"weights": weights})
                        print(f"{weights:8} {found['client']}: {found['case']}: {found['error'] or 'ok'}", flush=True)
            if pause:
                rate = (at.version() - first) / (time.monotonic() - began)
                about = f"{watch.completions} completions, {watch.changed} of several versions, {rate:.1f} versions a second"
                error = f"{len(watch.problems)} wrong, the first: {watch.problems[0]}" if watch.problems else ""
                results.append({"client": "httpx", "case": about, "times": watch.completions, "error": error, "weights": weights})
                print(f"{weights:8} {about}: {error or 'ok'}", flush=True)
    return results


def table(results: list[dict[str, object]]) -> str:
    """The results by client."""
    lines = ["| client | cases | fixed weights | while weights change |", "|---|---|---|---|"]
    for client in dict.fromkeys(str(result["client"]) for result in results):
        mine = [result for result in results if result["client"] == client]
        cells = []
        for weights in ("fixed", "changing"):
            some = [result for result in mine if result["weights"] == weights]
            failed = [result["case"] for result in some if result["error"]]
            times = sum(int(str(result["times"])) for result in some)
            passed = f"{len(some) - len(failed)} of {len(some)} pass" + (f" ({times} times)" if times > len(some) else "")
            cells.append((passed + "".join(f", {case} fails" for case in failed)) if some else "")
        cases = ", ".join(dict.fromkeys(str(result["case"]) for result in mine))
        lines.append(f"| {client} | {cases} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=tuple(PYTHON), default="transformers")
    parser.add_argument("--clients", default="", help="names of suites, separated by commas; empty: all")
    parser.add_argument("--weights", choices=("fixed", "changing"), default="", help="only these (default: both)")
    parser.add_argument("--seconds", type=float, default=2, help="how long a case is repeated while the weights change")
    parser.add_argument("--schemathesis", type=float, metavar="SECONDS", help="instead, send generated requests for so long")
    options = parser.parse_args()
    if options.schemathesis:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(fuzzed(options.schemathesis, Path(folder)))
    names = {suite.name for suite in SUITES}
    chosen = set(filter(None, options.clients.split(",")))
    if unknown := chosen - names:
        parser.error(f"--clients: {', '.join(sorted(unknown))} is none of {', '.join(sorted(names))}")
    (ROOT / ".cache" / "clients").mkdir(parents=True, exist_ok=True)
    suites = [suite for suite in SUITES if not chosen or suite.name in chosen]
    with tempfile.TemporaryDirectory() as folder:
        results = check(options.engine, suites, options.seconds, Path(folder), options.weights)
    (ROOT / ".cache" / "clients" / f"{options.engine}.json").write_text(json.dumps(results, indent=1))
    print(table(results))
    sys.exit(any(result["error"] for result in results))


if __name__ == "__main__":
    main()
