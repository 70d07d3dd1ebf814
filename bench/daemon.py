"""The start-up time of `rolloutd`, its memory while idle, and the response time of the CLI.

Usage: ``python bench/daemon.py [--rounds 5]``
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

BIN = Path(__file__).resolve().parent.parent / "bin"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the start of rolloutd, its idle memory, and the CLI's help.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    starts, rests = zip(*(start_and_rest() for _ in range(rounds)), strict=True)
    helps = [timed([str(BIN / "rollout"), "--help"]) for _ in range(4 * rounds)]
    print(f"rolloutd ready after {1e3 * statistics.median(starts):.0f} ms (bar: 1,000)")
    print(f"rolloutd idle at {statistics.median(rests) / 2**20:.0f} MB resident (bar: 150)")
    print(f"rollout --help answers in {1e3 * statistics.median(helps):.0f} ms (bar: 50)")


def start_and_rest() -> tuple[float, int]:
    """Seconds until every target serves, and resident bytes five seconds later."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        daemon = subprocess.Popen([str(BIN / "rolloutd"), "--state-dir", folder], stderr=subprocess.DEVNULL)
        announced = Path(folder, "rolloutd.json")
        try:
            while not announced.exists() or not json.loads(announced.read_text() or "{}").get("grpc"):
                time.sleep(0.005)
            ready = time.perf_counter() - began
            time.sleep(5)
            status = Path(f"/proc/{daemon.pid}/status").read_text()
            return ready, 1024 * int(status.split("VmRSS:")[1].split()[0])
        finally:
            daemon.terminate()
            daemon.wait(20)


def timed(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
