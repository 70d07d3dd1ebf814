"""Check docker-compose.yml without a container engine.

It must be valid YAML. Each image needs a stage in the Containerfile. The seven-container shape must
host every target exactly once. Services that start Python need the image that has it. No service
may listen beyond loopback, so the host's network is used without published ports. If `docker
compose` is installed, its `config` command checks the file too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
SERVICES = {"planner", "scheduler", "rollout-gateway", "learner-controller", "buffer", "snapshot", "storage"}
START_PYTHON = {"all", "planner", "scheduler"}

Service = dict[str, Any]


def main() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    problems = list(find_problems(compose["services"]))
    print(*problems, sep="\n" if problems else "", end="\n" if problems else "")
    config = docker_config()
    print(f"docker-compose.yml: {len(compose['services'])} services, {len(problems)} problems; docker compose config: {config}")
    sys.exit(1 if problems or config == "refused" else 0)


def find_problems(services: dict[str, Service]) -> Iterator[str]:
    containerfile = (ROOT / "deploy" / "Containerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", containerfile, re.MULTILINE))
    for name, service in services.items():
        stage = service["build"]["target"]
        if stage not in stages:
            yield f"{name}: the Containerfile has no stage {stage}"
        if service.get("network_mode") != "host" or service.get("ports"):
            yield f"{name}: must use the host's network and publish no port"
        if START_PYTHON & set(targets(service)) and stage != "worker":
            yield f"{name}: starts Python, but its image has none"
    hosted = Counter(target for service in services.values() if "seven" in service["profiles"] for target in targets(service))
    if hosted != Counter(SERVICES | {"nats", "registry"}):
        yield f"profile seven: hosts {dict(hosted)}"


def targets(service: Service) -> list[str]:
    command = service.get("command", [])
    return command[command.index("--target") + 1].split(",") if "--target" in command else []


def docker_config() -> str:
    try:
        if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
            return "not installed"
    except FileNotFoundError:
        return "not installed"
    command = ["docker", "compose", "--profile", "*", "config", "--quiet"]
    return "ok" if subprocess.run(command, cwd=ROOT, check=False).returncode == 0 else "refused"


if __name__ == "__main__":
    main()
